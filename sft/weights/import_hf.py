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
from pathlib import Path

import torch

from sft.checkpoint import folders, manifest
from sft.checkpoint.manifest import Manifest
from sft.checkpoint.train_state import installed
from sft.config import ModelConfig
from sft.console import Console, Progress, size
from sft.hf.architecture import Architecture
from sft.hf.family import RowSpan, TensorMapping
from sft.hf.hub import IMPORTED
from sft.hf.nested_config import text_part
from sft.hf.safetensors_files import DTYPES, SafetensorsFolder
from sft.hf.source import open_source
from sft.mcore.checkpoint_io.engine_state import CHECKPOINT_VERSION, write_common
from sft.mcore.checkpoint_io.megatron_arguments import model_arguments
from sft.parallel.layout import padded_vocab_size
from sft.weights import kept
from sft.weights.atomic_folder import new_folder, refuse_existing
from sft.weights.torch_dist import TorchDistWriter

BLOCK_BYTES = 256 << 20  # largest block in memory and largest stored chunk; to read a row, a resume loads its chunk

# Modules of a layer for which Megatron stores an extra state: FP8 scales, or None.  Norms have one only with
# Transformer Engine.  Megatron ignores extra states that it does not request.
_ATTENTION = ("self_attention.linear_qkv", "self_attention.linear_proj")
_LINEAR_ATTENTION = ("self_attention.in_proj", "self_attention.out_norm", "self_attention.out_proj")
_QK_NORM = ("self_attention.q_layernorm", "self_attention.k_layernorm")
_MLP = ("mlp.linear_fc1", "mlp.linear_fc2")
_BEFORE_EXPERTS = ("pre_mlp_layernorm",)
_EXPERT = ("mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2")
_SHARED_EXPERT = ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2")


def import_hf(source: Path, target: Path, console: Console, name: str = "") -> None:
    """Convert the folder `source`, written by save_pretrained, to the new folder `target`.

    name: of the model on the hub, for the model card of an export
    Raises ConfigError if our model does not support config.json.  Raises CheckpointError if the files do not hold the
    model, if the target exists, and if the disk has no room.
    """
    refuse_existing(target)  # before reading headers, which may take long
    opened = open_source(source, name)
    model, num_bytes = opened.architecture, opened.num_trained_bytes
    with closing(opened.stored) as stored:
        padding = (padded_vocab_size(model.vocab_size, 1) - model.vocab_size) * model.model.hidden_size * 4 * 2
        with new_folder(target, num_bytes + padding) as temporary:
            checkpoint = temporary / folders.name_of(0)
            checkpoint.mkdir()
            with console.track(f"importing {source}", num_bytes, "bytes") as progress:
                positions = text_part(opened.content, model.family).get("max_position_embeddings")
                _write(stored, opened.mappings, model, checkpoint, positions, progress)
            kept.keep(opened, temporary / IMPORTED)
            (temporary / folders.POINTER).write_text("0", encoding="ascii")
    console.say(
        f"imported {source} ({model.family.model_type}, {size(num_bytes)}) to {target}; start a run from it with "
        f"model.init_from={target}"
    )


def _write(
    stored: SafetensorsFolder,
    mappings: list[TensorMapping],
    model: Architecture,
    folder: Path,
    positions: object,
    progress: Progress,
) -> None:
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
    """Write one of our tensors, block by block."""
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
    """Split and combine the spans into blocks of at most `max_rows` rows.

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
    """Keys of the objects that Megatron-LM expects in addition to the tensors."""
    if not model.stacks_layers:
        return _extra_state_keys_by_layer(model)
    layers, experts = range(model.num_layers), range(model.moe.num_experts or 0)
    modules = (*_ATTENTION, *(_QK_NORM if model.qk_norm else ()), *(_BEFORE_EXPERTS if experts else _MLP))
    modules += _SHARED_EXPERT if model.moe.shared_ffn_hidden_size else ()
    of_layers = [f"{layer}_{len(layers)}" for layer in layers]
    of_experts = [f"{layer}.{expert}_{len(layers)}.{len(experts)}" for layer in layers for expert in experts]
    shards = [*((module, of_layers) for module in modules), *((module, of_experts) for module in _EXPERT)]
    keys = [f"decoder.layers.{module}._extra_state/shard_{shard}" for module, numbers in shards for shard in numbers]
    return ["decoder.final_layernorm._extra_state/shard_0_1", *keys]


def _extra_state_keys_by_layer(model: ModelConfig) -> list[str]:
    """The same for a model whose layers are of several kinds, each with objects of its own."""
    experts = range(model.moe.num_experts or 0)
    keys = ["decoder.final_layernorm._extra_state/shard_0_1"]
    for layer in range(model.num_layers):
        is_linear = model.kind_of(layer + 1) == "linear attention"
        modules: tuple[str, ...] = _LINEAR_ATTENTION if is_linear else _ATTENTION
        modules += _QK_NORM if model.qk_norm and not is_linear else ()
        has_experts = model.has_experts(layer + 1)
        modules += _BEFORE_EXPERTS if has_experts else _MLP
        modules += _SHARED_EXPERT if has_experts and model.moe.shared_ffn_hidden_size else ()
        keys += [f"decoder.layers.{layer}.{module}._extra_state/shard_0_1" for module in modules]
        for module in _EXPERT if has_experts else ():
            keys += [f"decoder.layers.{layer}.{module}._extra_state/shard_{e}_{len(experts)}" for e in experts]
    return keys
