"""Time, memory and bytes of reading weights straight from a Hugging Face folder, on one process without a GPU.

    python -m tools.bench load_hf                                    1 GiB of Llama-3.2-1B's layers
    python -m tools.bench load_hf --cases llama-3-8b --gib 2.9
    python -m tools.bench load_hf --folder /mnt/nfs                  on a given file system

Rows take turns, each in a new process.  The first two rows are load_file of safetensors and one pass over every byte: a
sum, or a copy.  Times are medians; ratios are to the sum and to the copy of the same turn.  A sum writes nothing, so
the bar of weights that the page cache holds is against the copy.  `from disk` means that the page cache held none of
the files.  `peak` is the growth of the process beyond its parameters and imports.  `requested` are the bytes that were
requested from the files, and `touched` those that the kernel read, in sizes of the parameters.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from sft.console import QUIET
from sft.hf.family import TensorMapping
from sft.hf.source import open_source
from sft.weights.load import fill
from tools.bench import fresh_process, hf_model, machine, page_cache
from tools.bench.harness import Option, Subject, one_of
from tools.bench.results import Bar, Column, Row

SLOWEST, TP = 1.5, 8
MOST_REQUESTED = 1.05
CACHED, COLD = "cached", "from disk"
SUM, COPY, WHOLE, PART = "load_file, sum", "load_file, copy", "read and place", f"read and place, tp {TP}"
BY_ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_fc1.weight")
BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
Turn = Mapping[tuple[str, str], Mapping[str, float]]  # by way and state of the page cache


def parts_of(mapping: TensorMapping, rank: int, tp: int) -> Iterator[Any]:
    """The parts of our tensor that one tensor-parallel rank holds, as Megatron makes them, with touched memory."""
    whole = mapping.shape(mapping.num_rows)
    axes, matrices = len(mapping.stack), 2 if mapping.key.endswith("linear_fc1.weight") else 1
    axis = 0 if mapping.key.endswith(BY_ROWS) else 1 if mapping.key.endswith(BY_COLUMNS) else None
    for number in range(matrices):
        shape, offset = list(whole[axes:]), [0] * (len(whole) - axes)
        shape[0] //= matrices
        offset[0] = number * shape[0]
        if axis is not None:
            shape[axis] //= tp
            offset[axis] += rank * shape[axis]
        yield SimpleNamespace(
            key=mapping.key,
            data=torch.zeros(shape, dtype=torch.bfloat16).fill_(torch.nan),
            global_shape=whole,
            global_offset=(*mapping.stack_index, *offset),
            prepend_axis_num=axes,
        )


def read_files() -> int:
    """A command that maps every file and reads every byte of it once: sums it, or with 1 as the last word copies it."""
    folder, result, copies = sys.argv[1:]
    files = sorted(Path(folder).glob("*.safetensors"))
    target = torch.zeros(max(map(os.path.getsize, files)), dtype=torch.uint8).fill_(1)

    def read() -> None:
        for file in files:
            for tensor in load_file(file).values():
                numbers = tensor.reshape(-1).view(torch.uint8)
                target[: len(numbers)].copy_(numbers) if copies == "1" else numbers.view(torch.int64).sum().item()

    Path(result).write_text(json.dumps(fresh_process.growth(read)))
    return 0


def fill_parameters() -> int:
    """A command that fills the parameters of rank 0 of `tp` ranks."""
    folder, result, tp = sys.argv[1:]
    source = open_source(Path(folder))
    parts = [part for mapping in source.mappings for part in parts_of(mapping, 0, int(tp))]
    numbers = fresh_process.growth(lambda: fill(parts, source, QUIET))
    kept = sum(part.data.nbytes for part in parts)
    Path(result).write_text(json.dumps({**numbers, "kept": kept, "requested": source.stored.requested_bytes}))
    return 0


def turn(folder: Path) -> Turn:
    """Measures every row once."""
    model, result = folder / "model", folder / "result.json"
    files, numbers = sorted(model.glob("*.safetensors")), {}
    for state in (CACHED, COLD):
        for way, command, tp in (
            (SUM, "read_files", 0),
            (COPY, "read_files", 1),
            (WHOLE, "fill_parameters", 1),
            (PART, "fill_parameters", TP),
        ):
            (page_cache.forget if state == COLD else page_cache.fill)(files)
            fresh_process.run(f"{__name__}:{command}", model, result, tp)
            numbers[way, state] = {**json.loads(result.read_text()), "touched": page_cache.num_bytes(files)}
    return numbers


def measure(shape: str, options: argparse.Namespace) -> Iterator[Row]:
    num_layers = hf_model.num_layers_for(shape, options.gib * 2**30)
    tensors = hf_model.tensors_of(content := hf_model.config_of(shape, num_layers))
    facts: Row = {"layers": num_layers, "largest": max(tensor.nbytes for tensor in tensors.values())}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-load-") as name:
        folder = Path(name).resolve()
        hf_model.make(folder / "model", content)
        turns = [turn(folder) for _ in range(options.repeats)]
        facts["file_system"] = machine.file_system(folder)
    for row in rows_of(turns, hf_model.num_bytes(tensors)):
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
    read=one_of(*hf_model.SHAPES),
    options={
        "gib": Option(1.0, 0.001, "size limit of the model; it has at least one layer"),
        "repeats": Option(3, 1, "number of times that all rows are measured"),
        "folder": Option(None, help="folder in which a temporary folder is made", read=Path),
    },
    validate=validate,
    bars=bars,
)
