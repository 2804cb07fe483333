"""Converts a Hugging Face folder to a Megatron checkpoint folder that `model.init_from` and Megatron-LM load.

    TARGET/
        latest_checkpointed_iteration.txt   0
        iter_0000000/                       the weights, in torch_dist format, with a manifest
        hf/                                 config.json, tokenizer and tensors that are not trained, for a later export

Reads and writes one block of rows at a time, so memory use does not grow with the model.  Weights are copied unchanged.
"""

import math
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing
from itertools import product
from pathlib import Path

import torch

from sft.checkpoint import folders, manifest
from sft.checkpoint.manifest import Manifest
from sft.checkpoint.train_state import installed
from sft.config import ModelConfig
from sft.console import Console, Progress, size
from sft.hf.family import RowSpan, TensorMapping
from sft.hf.hub import IMPORTED
from sft.hf.nested_config import text_part
from sft.hf.safetensors_files import DTYPES, SafetensorsFolder
from sft.hf.source import Source, open_source
from sft.layers.kinds import layer_groups
from sft.mcore.checkpoint_io.engine_state import CHECKPOINT_VERSION, write_common
from sft.mcore.checkpoint_io.megatron_arguments import model_arguments
from sft.parallel.layout import padded_vocab_size
from sft.weights import kept
from sft.weights.atomic_folder import new_folder, refuse_existing
from sft.weights.torch_dist import TorchDistWriter

BLOCK_BYTES = 256 << 20  # largest block in memory, which is stored as one chunk; reading a row loads its whole chunk

# Parts of a layer whose weights do not belong to modules of Transformer Engine.
_PLAIN_PARTS = ("router", "shared gate")


def import_hf(source: Path, target: Path, console: Console, name: str = "") -> None:
    """Convert the folder `source`, written by save_pretrained, to the new folder `target`.

    name: the name of the model on the hub, for the model card of an export
    Raises ConfigError if our model cannot represent config.json.  Raises CheckpointError if the files do not have the
    tensors of the model, or if the target exists, and StorageError if the disk has no room.
    """
    refuse_existing(target)  # before reading headers, which may take long
    opened = open_source(source, name)
    model, num_bytes = opened.architecture, opened.num_trained_bytes
    with closing(opened.stored):
        padding = (padded_vocab_size(model.vocab_size, 1) - model.vocab_size) * model.model.hidden_size * 4 * 2
        with new_folder(target, num_bytes + padding) as temporary:
            checkpoint = temporary / folders.name_of(0)
            checkpoint.mkdir()
            with console.track(f"importing {source}", num_bytes, "bytes") as progress:
                _write(opened, checkpoint, progress)
            kept.keep(opened, temporary / IMPORTED)
            (temporary / folders.POINTER).write_text("0", encoding="ascii")
    console.say(
        f"imported {source} ({model.family.model_type}, {size(num_bytes)}) to {target}; start a run from it with "
        f"model.init_from={target}"
    )


def _write(source: Source, folder: Path, progress: Progress) -> None:
    """Write the checkpoint into the existing, empty `folder`."""
    stored, mappings, model = source.stored, source.mappings, source.architecture
    positions = text_part(source.content, model.family).get("max_position_embeddings")
    padded_rows = padded_vocab_size(model.vocab_size, 1)
    with closing(TorchDistWriter(folder)) as writer:
        for key in _extra_state_keys(model.model):
            writer.write_object(key, None)
        for mapping in mappings:
            _write_tensor(writer, stored, mapping, padded_rows, progress)
        writer.finish()
    _write_common(
        folder,
        model.model,
        padded_vocab_size=padded_rows,
        positions=positions if isinstance(positions, int) else 0,
        bf16=stored.tensors[mappings[0].sources[0].name].dtype == "BF16",
    )
    others = {name: manifest.entry_of(folder / name) for name in manifest.names_in(folder) if name not in writer.files}
    facts = {
        "step": 0,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": installed(),
        "model_type": model.family.model_type,
    }
    manifest.write(folder, Manifest(files=writer.files | others, facts=facts))


def _write_tensor(
    writer: TorchDistWriter, stored: SafetensorsFolder, mapping: TensorMapping, padded_rows: int, progress: Progress
) -> None:
    """Write the part of our tensor that `mapping` describes, block by block."""
    dtype = DTYPES[stored.tensors[mapping.sources[0].name].dtype]
    num_rows = padded_rows if mapping.form == "vocabulary" else mapping.num_rows
    row_bytes = math.prod(mapping.row_shape) * dtype.itemsize
    for block in split_into_blocks(mapping.spans(num_rows), max(1, BLOCK_BYTES // row_bytes)):
        first = block[0].target
        data = torch.empty(sum(span.num_rows for span in block), *mapping.row_shape, dtype=dtype)
        for span in block:
            rows = data[span.target - first : span.target - first + span.num_rows]
            if span.source is None:
                rows.zero_()
            else:
                view = mapping.sources[span.source]
                stored.read_rows(
                    view.name, view.row(span.start), rows, index=view.index, transposed=view.transposed, step=view.step
                )
                progress.advance(rows.nbytes)
        offset = (*mapping.stack_index, first, *[0] * len(mapping.row_shape))
        writer.write_chunk(mapping.key, mapping.shape(num_rows), offset, data[(None,) * len(mapping.stack_index)])


def split_into_blocks(spans: list[RowSpan], max_rows: int) -> Iterator[list[RowSpan]]:
    """Split and combine the spans into blocks of `max_rows` rows; the last block may have fewer.

    span A of 3 rows, span B of 2 rows, max_rows 2 -> [A0 A1], [A2 B0], [B1]
    """
    block: list[RowSpan] = []
    free_rows = max_rows
    for span in spans:
        start = 0
        while start < span.num_rows:
            count = min(free_rows, span.num_rows - start)
            block.append(RowSpan(span.source, span.start + start, count, span.target + start))
            start, free_rows = start + count, free_rows - count
            if free_rows == 0:
                yield block
                block, free_rows = [], max_rows
    if block:
        yield block


def _write_common(folder: Path, model: ModelConfig, *, padded_vocab_size: int, positions: int, bf16: bool) -> None:
    """Write common.pt and metadata.json, which Megatron-LM reads in addition to the tensors."""
    args = Namespace(
        **model_arguments(model, padded_vocab_size=padded_vocab_size, positions=positions, bf16=bf16),
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        data_parallel_size=1,
        world_size=1,
        no_save_optim=True,
        no_save_rng=True,
        consumed_train_samples=0,
    )
    form = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    common = {"args": args, "checkpoint_version": CHECKPOINT_VERSION, "iteration": 0, "content_metadata": form}
    write_common(common, folder)


def _extra_state_keys(model: ModelConfig) -> list[str]:
    """Keys of the objects that Megatron-LM expects in addition to the tensors: FP8 scales of a module, here None.

    Megatron-LM requests the keys of norms only with Transformer Engine, and ignores keys that it does not request.
    """
    keys, count = ["decoder.final_layernorm._extra_state/shard_0_1"], model.num_layers
    for group in layer_groups(model):
        rows = [row for row in group.weights if row.key.endswith(".weight") and row.part not in _PLAIN_PARTS]
        modules = dict.fromkeys((row.module, row.is_of_expert) for row in rows if row.role != "kernel")
        for number, (module, is_of_expert) in product(group.numbers, modules):
            layer, shard = (f"{number - 1}.", "0_1") if not model.stacks_layers else ("", f"{number - 1}_{count}")
            key = f"decoder.layers.{layer}{module}._extra_state/shard_"
            experts = group.mlp.num_experts
            if not is_of_expert:
                keys.append(key + shard)
            elif model.stacks_layers:
                keys += [f"{key}{number - 1}.{expert}_{count}.{experts}" for expert in range(experts)]
            else:
                keys += [f"{key}{expert}_{experts}" for expert in range(experts)]
    return keys
