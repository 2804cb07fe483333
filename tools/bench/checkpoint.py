"""Time that a save stalls training, and time of a load, compared with torch.save and torch.load.

    python -m tools.bench checkpoint --device cpu          two processes, 1 GiB of weights and moments
    python -m tools.bench checkpoint --folder /mnt/nfs     on a given file system

A case is the precision of the weights.  Rows are measured in turns; a time is the median over the turns of the slowest
rank.  Every row moves the same bytes.  With torch.save, each rank writes one file.  Writes are flushed to the disk
before the clock stops; loads read files that were just written, so the page cache provides the bytes.  GB/s is the sum
over all ranks.  `peak` is the largest growth of a process.  `work` is a matrix product with its two gradients.
`ratio` is the time / the time of the row in column `of`.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from sft.config import Config
from sft.recipe.load import parse_recipe
from tools.bench import ranks
from tools.bench.checkpoint_rank import BESIDE, FIRST, STALL, SYNC, WORK, Took, turns_of
from tools.bench.harness import Option, Subject, one_of
from tools.bench.results import Bar, Column, Row

STALL_BAR = 0.15  # share of the time of a sync save
VOCAB, HEAD = 4096, 64
BYTES = {"bf16": 14, "fp32": 16}  # per parameter: weight, main parameter in fp32, two moments
COMPARED_WITH = {
    "torch.save": None,
    SYNC: "torch.save",
    FIRST: SYNC,
    STALL: SYNC,
    "async save: published": SYNC,
    WORK: None,
    BESIDE: WORK,
    "torch.load": None,
    "load, verify full": "torch.load",
    "load, verify size": "torch.load",
    "load, verify off": "torch.load",
}


def sizes_for(num_parameters: float) -> tuple[int, int]:
    """(layers, hidden size) of a model with about this many parameters, and at most one layer per 64 of hidden size."""
    hidden = HEAD
    while VOCAB * hidden + 13 * hidden**2 * (hidden // HEAD) < num_parameters:
        hidden += HEAD
    return max(1, round((num_parameters - VOCAB * hidden) / (13 * hidden**2))), hidden


def config_of(precision: str, mib: int, num_ranks: int, device: str = "cpu") -> Config:
    layers, hidden = sizes_for(mib * 2**20 / BYTES[precision])
    text = f"""
run: {{dir: unused, device: {device}, precision: {precision}}}
model: {{num_layers: {layers}, hidden_size: {hidden}, ffn_hidden_size: {3 * hidden},
        num_attention_heads: {hidden // HEAD}, tie_embeddings: true, init_from: random}}
data: {{train: unused, seq_length: 256}}
train: {{num_steps: 100, global_batch_size: {num_ranks}}}
optim: {{lr: 1e-3}}
"""
    return parse_recipe(text, "bench checkpoint", []).config


def measure(precision: str, options: argparse.Namespace) -> Iterator[Row]:
    device = options.device.type
    config = config_of(precision, options.mib, options.ranks, device)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-checkpoint-") as folder:
        work = (config, VOCAB, str(Path(folder).resolve()), options.repeats)
        (measured,) = ranks.rows_of_rank0(options.ranks, turns_of, *work, device_type=device)
    turns = {name: [Took(*took) for took in samples] for name, samples in measured["turns"].items()}
    facts = {key: measured[key] for key in ("bytes", "file_system", "layers", "hidden")}
    for row in rows_of(turns, measured["bytes"]):
        yield {**facts, **row}


def rows_of(turns: Mapping[str, Sequence[Took]], num_bytes: int) -> Iterator[Row]:
    seconds = {name: median(took.seconds for took in turns[name]) for name in COMPARED_WITH}
    for name, reference in COMPARED_WITH.items():
        row: Row = {"way": name, "seconds": seconds[name]}
        if not name.startswith("work"):
            row |= {"bytes_per_s": num_bytes / seconds[name], "peak": max(took.peak for took in turns[name])}
        if reference:
            row |= {"ratio": seconds[name] / seconds[reference], "compared_with": reference}
        yield row


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    """The bar of the stall.  The first async save is left out, because it allocates memory."""
    for row in rows:
        if row["way"] == STALL:
            yield Bar(
                name=f"{row['case']}, stall of an async save / time of a sync save", value=row["ratio"], bound=STALL_BAR
            )


def validate(options: argparse.Namespace) -> None:
    if min(options.ranks, options.mib, options.repeats) < 1:
        raise ValueError("--ranks, --mib and --repeats must be at least 1")
    if options.folder and not options.folder.is_dir():
        raise ValueError(f"--folder {options.folder} is not a folder")


SUBJECT = Subject(
    measure=measure,
    columns=[
        Column("seconds", "seconds", ".3f"),
        Column("bytes_per_s", "GB/s", ".2f", 1e9),
        Column("peak", "peak MiB", ",.0f", 2**20),
        Column("ratio", "ratio", ".3f"),
        Column("compared_with", "of"),
    ],
    cases=["bf16"],
    tiny_cases=["bf16"],
    read=one_of(*BYTES),
    options={
        "ranks": Option(2, help="number of data-parallel processes"),
        "mib": Option(1024, 4, "MiB of weights and optimizer states, approximately"),
        "repeats": Option(5, 1, "timed repetitions"),
        "folder": Option(None, help="folder in which a temporary folder is made", read=Path),
    },
    validate=validate,
    bars=bars,
    device="any",
)
