"""Measures time, memory and bytes of reading weights straight from a Hugging Face folder, in one process without a GPU.

    python -m tools.bench load_hf                                    1 GiB of Llama-3.2-1B's layers
    python -m tools.bench load_hf --cases llama-3-8b --gib 2.9
    python -m tools.bench load_hf --folder /mnt/nfs                  on a given file system

Rows take turns, each in a new process.  The first two rows are load_file of safetensors and one pass over every byte: a
sum, or a copy.  Times are medians; ratios are to the sum and to the copy of the same turn.  A sum writes nothing, so
the bar for weights in the page cache compares with the copy.  `from disk` means that the page cache held none of the
files.  `peak` is the growth of the process in addition to its parameters and imports.  `requested` is the number of
bytes that were requested from the files, and `touched` the number that the kernel read, both / bytes of the parameters.
"""

import argparse
import ctypes
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import starmap
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from sft.console import QUIET
from sft.hf.architecture import architecture
from sft.hf.family import TensorMapping
from sft.hf.hub import CONFIG
from sft.hf.safetensors_writer import write_tensors
from sft.hf.source import open_source
from sft.weights.load import fill
from tools.bench import machine
from tools.bench.clock import growth
from tools.bench.harness import Bar, Column, Option, Refused, Row, Subject, one_of

SLOWEST, TP = 1.5, 8
MOST_REQUESTED = 1.05
CACHED, COLD = "cached", "from disk"
SUM, COPY, WHOLE, PART = "load_file, sum", "load_file, copy", "read and place", f"read and place, tp {TP}"
BY_ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_fc1.weight")
BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
# SHAPES has the values of these keys of config.json, for released models and a tiny one.
KEYS = "hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size tie_word_embeddings".split()
SHAPES = {
    "llama-3.2-1b": (2048, 8192, 32, 8, 128_256, True),
    "llama-3-8b": (4096, 14_336, 32, 8, 128_256, False),
    "llama-3-70b": (8192, 28_672, 64, 8, 128_256, False),
    "tiny": (64, 128, 4, 2, 512, False),
}
Turn = Mapping[tuple[str, str], Mapping[str, float]]  # (reader, state of the page cache) -> measurements


def config_of(shape: str, num_layers: int) -> dict[str, Any]:
    """The content of the model's config.json."""
    sizes = dict(zip(KEYS, SHAPES[shape]), num_hidden_layers=num_layers)
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", **sizes}


def tensors_of(content: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a model with this config.json, on the meta device."""
    model = architecture(content, CONFIG)
    mappings = model.family.mappings(model.model, model.vocab_size)
    parts = [part for mapping in mappings for part in mapping.sources]
    return {part.name: torch.empty(part.shape, dtype=torch.bfloat16, device="meta") for part in parts}


def num_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def num_layers_for(shape: str, limit: float) -> int:
    """The largest number of layers of a model of at most `limit` bytes; at least one."""
    first, second = (num_bytes(tensors_of(config_of(shape, layers))) for layers in (1, 2))
    return max(1, 1 + int((limit - first) // (second - first)))


def make_model(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes a random model, one tensor at a time."""
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(content), encoding="utf-8")
    tensors, generator = tensors_of(content), torch.Generator().manual_seed(0)

    def values(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        """The name, and random finite values of the tensor's shape: random bits, because normal values take longer."""
        bits = torch.empty(tensor.shape, dtype=torch.int16).random_(0, 0x4000, generator=generator)
        return name, bits.view(tensor.dtype)

    write_tensors(folder, tensors, starmap(values, tensors.items()))


def parts_of(mapping: TensorMapping, tp: int) -> Iterator[Any]:
    """The parts of our tensor that tensor-parallel rank 0 has, as Megatron makes them.

    Their memory is written once, so that its allocation does not count as growth of the process.
    """
    whole = mapping.shape(mapping.num_rows)
    axes, matrices = len(mapping.stack), 2 if mapping.key.endswith("linear_fc1.weight") else 1
    axis = 0 if mapping.key.endswith(BY_ROWS) else 1 if mapping.key.endswith(BY_COLUMNS) else None
    for number in range(matrices):
        shape, offset = list(whole[axes:]), [0] * (len(whole) - axes)
        shape[0] //= matrices
        offset[0] = number * shape[0]
        if axis is not None:
            shape[axis] //= tp
        yield SimpleNamespace(
            key=mapping.key,
            data=torch.zeros(shape, dtype=torch.bfloat16).fill_(torch.nan),
            global_shape=whole,
            global_offset=(*mapping.stack_index, *offset),
            prepend_axis_num=axes,
        )


def read_files(folder: Path, is_copy: bool) -> dict[str, float]:
    """Maps every file and reads every byte of it once: sums it, or copies it.  Runs in a new process."""
    files = sorted(folder.glob("*.safetensors"))
    target = torch.zeros(max(map(os.path.getsize, files)), dtype=torch.uint8).fill_(1)

    def read() -> None:
        for file in files:
            for tensor in load_file(file).values():
                numbers = tensor.reshape(-1).view(torch.uint8)
                target[: len(numbers)].copy_(numbers) if is_copy else numbers.view(torch.int64).sum().item()

    seconds, peak = growth(read)
    return {"seconds": seconds, "peak": peak}


def fill_parameters(folder: Path, tp: int) -> dict[str, float]:
    """Fills the parameters of rank 0 of `tp` ranks.  Runs in a new process."""
    source = open_source(folder)
    parts = [part for mapping in source.mappings for part in parts_of(mapping, tp)]
    seconds, peak = growth(lambda: fill(parts, source, QUIET))
    kept = sum(part.data.nbytes for part in parts)
    return {"seconds": seconds, "peak": peak, "kept": kept, "requested": source.stored.requested_bytes}


WAYS: dict[str, tuple[Callable[..., dict[str, float]], int]] = {
    SUM: (read_files, False),
    COPY: (read_files, True),
    WHOLE: (fill_parameters, 1),
    PART: (fill_parameters, TP),
}


def in_new_process(function: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    """The result of `function(*arguments)` in a new process.  Raises Refused with the error of a call that fails."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except Exception as error:
            raise Refused(f"{function.__name__}: {type(error).__name__}: {error}") from error


def turn(folder: Path) -> Turn:
    """Measures every row once."""
    files, numbers = sorted(folder.glob("*.safetensors")), {}
    for state in (CACHED, COLD):
        for way, (function, argument) in WAYS.items():
            prepare_page_cache(files, is_cold=state == COLD)
            took = in_new_process(function, folder, argument)
            numbers[way, state] = {**took, "touched": bytes_in_page_cache(files)}
    return numbers


def prepare_page_cache(files: Iterable[Path], *, is_cold: bool) -> None:
    """Drops the files from the page cache, or reads them, so that the page cache holds them."""
    for file in files:
        with file.open("rb") as opened:
            if is_cold:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while opened.read(16 << 20):
                    pass


def bytes_in_page_cache(files: Iterable[Path]) -> int:
    """Bytes of the files that are in the page cache."""
    libc, pages = ctypes.CDLL(None, use_errno=True), 0
    for file in files:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE) as mapped:
            resident = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), resident):
                raise OSError(ctypes.get_errno(), "mincore")
            pages += sum(page & 1 for page in resident)
    return pages * mmap.PAGESIZE


def measure(shape: str, options: argparse.Namespace) -> Iterator[Row]:
    num_layers = num_layers_for(shape, options.gib * 2**30)
    tensors = tensors_of(content := config_of(shape, num_layers))
    facts: Row = {"layers": num_layers, "largest": max(tensor.nbytes for tensor in tensors.values())}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-load-") as name:
        folder = Path(name).resolve()
        make_model(folder / "model", content)
        turns = [turn(folder / "model") for _ in range(options.repeats)]
        facts["file_system"] = machine.file_system(folder)
    for row in rows_of(turns, num_bytes(tensors)):
        yield {**facts, **row}


def rows_of(turns: Sequence[Turn], model_bytes: int) -> Iterator[Row]:
    for way, state in turns[0]:
        of_turns = [turn[way, state] for turn in turns]
        kept = of_turns[0].get("kept", model_bytes)
        row: Row = {"way": f"{way}, {state}", "seconds": median(numbers["seconds"] for numbers in of_turns)}
        row |= {"peak": max(numbers["peak"] for numbers in of_turns)}
        row |= {"requested": of_turns[0].get("requested", kept) / kept}
        if state == COLD:
            row["touched"] = of_turns[0]["touched"] / kept
        if way == WHOLE:
            for name, other in (("ratio", SUM), ("ratio_of_copy", COPY)):
                row[name] = median(turn[way, state]["seconds"] / turn[other, state]["seconds"] for turn in turns)
        yield row


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    for row in rows:
        name = f"{row['case']}, {row['way']}"
        if "ratio" in row:
            key, other = ("ratio", "sum") if row["way"].endswith(COLD) else ("ratio_of_copy", "copy")
            yield Bar(name=f"{name}: seconds, compared with load_file and a {other}", value=row[key], bound=SLOWEST)
        if not row["way"].startswith("load_file"):
            yield Bar(name=f"{name}: bytes requested, of those kept", value=row["requested"], bound=MOST_REQUESTED)
            name = f"{name}: bytes beyond the parameters, at most twice the largest tensor"
            yield Bar(name=name, value=row["peak"], bound=2 * row["largest"])


def validate(options: argparse.Namespace) -> None:
    if options.repeats < 1 or not options.gib > 0:
        raise ValueError(f"--repeats {options.repeats} must be at least 1, and --gib {options.gib} above 0")
    if options.folder and not options.folder.is_dir():
        raise ValueError(f"--folder {options.folder} is not a folder")


SUBJECT = Subject(
    measure=measure,
    columns=[
        Column("seconds", "seconds", ".3f"),
        Column("ratio", "times sum", ".2f"),
        Column("ratio_of_copy", "times copy", ".2f"),
        Column("peak", "peak MiB", ",.0f", 2**20),
        Column("requested", "requested", ".3f"),
        Column("touched", "touched", ".2f"),
    ],
    cases=["llama-3.2-1b"],
    tiny_cases=["tiny"],
    read=one_of(*SHAPES),
    options={
        "gib": Option(1.0, 0.001, "size limit of the model; it has at least one layer"),
        "repeats": Option(3, 1, "number of times that all rows are measured"),
        "folder": Option(None, help="folder in which a temporary folder is made", read=Path),
    },
    validate=validate,
    bars=bars,
)
