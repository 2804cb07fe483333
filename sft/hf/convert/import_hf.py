"""A Hugging Face folder -> a Megatron checkpoint folder that `model.init_from` and Megatron-LM understand.

    TARGET/
        latest_checkpointed_iteration.txt   0
        iter_0000000/                       the weights, in torch_dist form, with a manifest
        hf/                                 config.json, tokenizer and chat template, for the way back

Reads and writes a block of rows at a time; memory does not grow with the model.  Nothing is computed: every number is
the one that was read.
"""

import hashlib
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from sft.checkpoint import folders, manifest
from sft.checkpoint.manifest import Manifest
from sft.checkpoint.train_state import installed
from sft.console import Console, Progress, size
from sft.errors import CheckpointError
from sft.hf.architecture import CONFIG, Architecture, architecture, read
from sft.hf.convert.atomic_folder import copy_companions, new_folder
from sft.hf.convert.common_file import extra_state_keys, write_common_file
from sft.hf.convert.safetensors_folder import DTYPES, Folder
from sft.hf.convert.tensor_check import check_tensors, fold_by_layer
from sft.hf.convert.torch_dist_writer import TorchDistWriter
from sft.hf.family import LAYER, Item, Span
from sft.hf.model_keys import IMPORTED
from sft.parallel.layout import padded_vocab_size

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BLOCK_BYTES = 256 << 20  # at once in memory; also the largest part, and what its readers need


def import_hf(source: Path, target: Path, console: Console) -> None:
    """Convert the folder `source`, as save_pretrained writes it, to the new folder `target`.

    Raises ConfigError for a config.json that our model cannot be, CheckpointError for files that do not hold the
    model, a target that exists, and a disk without room.
    """
    if os.path.lexists(target):  # before long headers are read
        raise CheckpointError(f"{target} exists; nothing was written.  Remove it, or name another folder.")
    content = read(source)
    model = architecture(content, str(source / CONFIG))
    stored = Folder(source)
    try:
        items = list(model.family.items(model.model, model.vocab_size))
        _check(stored, items, model, source)
        num_bytes = sum(stored.tensors[part.name].num_bytes for item in items for part in item.parts)
        padding = (padded_vocab_size(model.vocab_size, 1) - model.vocab_size) * model.model.hidden_size * 4 * 2
        with new_folder(target, num_bytes + padding) as written:
            checkpoint = written / folders.name_of(0)
            checkpoint.mkdir()
            with console.track(f"importing {source}", num_bytes, "bytes") as progress:
                _write(stored, items, model, checkpoint, content.get("max_position_embeddings"), progress)
            (written / IMPORTED).mkdir()
            shutil.copyfile(source / CONFIG, written / IMPORTED / CONFIG)
            copy_companions(source, written / IMPORTED)
            (written / folders.POINTER).write_text("0", encoding="ascii")
    finally:
        stored.close()
    console.say(
        f"imported {source} ({model.family.model_type}, {size(num_bytes)}) to {target}; start a run from it with "
        f"model.init_from={target}"
    )


def _check(stored: Folder, items: list[Item], model: Architecture, source: Path) -> None:
    """Raise CheckpointError listing every tensor that is not as the model has it."""
    wanted = {part.name: part.shape for item in items for part in item.parts}
    unread = {
        name.replace(LAYER, str(layer)) for name in model.family.unread for layer in range(model.model.num_layers)
    }
    found = {name: tensor.shape for name, tensor in stored.tensors.items() if name not in unread}
    other = [
        f"of type {dtype}, only {', '.join(DTYPES)} are supported: {line}"
        for dtype in sorted({one.dtype for one in stored.tensors.values()} - set(DTYPES))
        for line in fold_by_layer(name for name in found if stored.tensors[name].dtype == dtype)
    ]
    kinds: dict[str, dict[str, str]] = {}  # by our key, each type and the first tensor of it
    for item in items:
        for part in item.parts:
            if part.name in found:
                kinds.setdefault(item.key, {}).setdefault(stored.tensors[part.name].dtype, part.name)
    for one in kinds.values():
        if len(one) > 1:
            told = ", ".join(f"{dtype} ({name})" for dtype, name in one.items())
            other.append(f"of several types, which become one tensor: {told}")
    if model.model.tie_embeddings and HEAD in found and EMBEDDING in found:
        if _is_copy(stored, EMBEDDING, HEAD):
            del found[HEAD]
        else:
            other.append(f"tie_word_embeddings is true, and {HEAD} is another tensor than {EMBEDDING}: one is wrong")
    check_tensors(found, wanted, str(source), other=other)


def _is_copy(stored: Folder, one: str, other: str) -> bool:
    """Bit for bit.  Some published files of tied models hold the embedding twice."""
    first, second = stored.tensors[one], stored.tensors[other]
    if (first.dtype, first.shape) != (second.dtype, second.shape) or first.dtype not in DTYPES:
        return False
    num_rows, row = first.shape[0], first.num_bytes // max(1, first.shape[0])
    step = max(1, BLOCK_BYTES // max(1, row))
    for start in range(0, num_rows, step):
        shape = (min(step, num_rows - start), *first.shape[1:])
        blocks = [torch.empty(shape, dtype=DTYPES[first.dtype]) for _ in range(2)]
        for name, block in zip((one, other), blocks):
            stored.read_rows(name, start, block)
        if not torch.equal(*(block.view(torch.uint8) for block in blocks)):
            return False
    return True


def _write(
    stored: Folder, items: list[Item], model: Architecture, folder: Path, positions: object, progress: Progress
) -> None:
    writer, digests = TorchDistWriter(folder), dict[str, str]()
    padded = padded_vocab_size(model.vocab_size, 1)
    try:
        for key in extra_state_keys(model.model):
            writer.value(key, None)
        for item in items:
            digests |= _write_item(writer, stored, item, padded, progress)
        writer.finish()
    except BaseException:
        writer.abandon()
        raise
    write_common_file(
        folder,
        model.model,
        padded_vocab_size=padded,
        positions=positions if isinstance(positions, int) else 0,
        bf16=stored.tensors[items[0].parts[0].name].dtype == "BF16",
    )
    rest = {name: manifest.entry_of(folder / name) for name in manifest.names_in(folder) if name not in writer.files}
    facts = {
        "step": 0,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": installed(),
        "model_type": model.family.model_type,
        "tensors": digests,  # SHA-256 of each tensor of the source
    }
    manifest.write(folder, Manifest(files=writer.files | rest, facts=facts))


def _write_item(
    writer: TorchDistWriter, stored: Folder, item: Item, padded: int, progress: Progress
) -> Mapping[str, str]:
    """One of our tensors; the digest of each of theirs."""
    dtype = DTYPES[stored.tensors[item.parts[0].name].dtype]
    num_rows = padded if item.form == "vocabulary" else item.num_rows
    digests = [hashlib.sha256() for _ in item.parts]
    row_bytes = math.prod(item.row) * dtype.itemsize
    for block in blocks(item.spans(num_rows), max(1, BLOCK_BYTES // row_bytes)):
        at = block[0].at
        data = torch.empty(sum(span.num_rows for span in block), *item.row, dtype=dtype)
        for span in block:
            rows = data[span.at - at : span.at - at + span.num_rows]
            if span.part is None:
                rows.zero_()
            else:
                read_bytes = stored.read_rows(item.parts[span.part].name, span.start, rows)
                digests[span.part].update(read_bytes)
                progress.advance(len(read_bytes))
        offset = (*item.first, at, *[0] * len(item.row))
        writer.tensor(item.key, item.shape(num_rows), offset, data[(None,) * len(item.first)])
    return {part.name: digest.hexdigest() for part, digest in zip(item.parts, digests)}


def blocks(spans: list[Span], max_rows: int) -> Iterator[list[Span]]:
    """The spans, cut and put together to at most `max_rows` rows each.

    spans of 3 and 2 rows, at most 2 -> [0, 2) of the first; the rest of it and one row of the second; its last row
    """
    block: list[Span] = []
    room = max_rows
    for span in spans:
        done = 0
        while done < span.num_rows:
            count = min(room, span.num_rows - done)
            block.append(Span(span.part, span.start + done, count, span.at + done))
            done, room = done + count, room - count
            if room == 0:
                yield block
                block, room = [], max_rows
    if block:
        yield block
