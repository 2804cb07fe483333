"""Measures the time that a save stalls training, and the time of a load, compared with torch.save and torch.load.

    python -m tools.bench checkpoint --device cpu          two processes, 1 GiB of weights and moments
    python -m tools.bench checkpoint --folder /mnt/nfs     on a given file system

A case is the precision of the weights.  Rows are measured in turns; a time is that of the slowest rank, as the median
over the turns.  Saves and loads all move the same bytes.  With torch.save, each rank writes one file.  Writes are
flushed to the disk before the clock stops.  Loads read files that were just written, so the bytes come from the page
cache.  GB/s is the sum over all ranks.  `peak` is the largest memory growth of a process.  `work` is a matrix product
with its two gradients.  `ratio` is the time / the time of the row that column `of` names.
"""

import argparse
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from sft.checkpoint import folders, resume
from sft.checkpoint.saver import Saver
from sft.checkpoint.train_state import Conditions, TrainState
from sft.config import CheckpointConfig, Config
from sft.console import QUIET
from sft.files.atomic_files import flush
from sft.mcore import device, process_groups
from sft.mcore.checkpoint_io import engine_state, optimizer_shards
from sft.mcore.engine import Engine
from sft.mcore.initial_weights import initialise
from sft.parallel.collectives import all_gather_objects
from sft.parallel.layout import Layout
from sft.parallel.messages import message
from sft.recipe.load import parse_recipe
from tools.bench import machine, ranks
from tools.bench.clock import growth, memory
from tools.bench.harness import Bar, Column, Option, Row, Subject, one_of

UNITS = 20  # number of units of work that are timed without a concurrent save
SYNC, FIRST, STALL = "sync save", "async save: first stall", "async save: stall"
WORK, BESIDE = "work alone", "work beside an async save"
STALL_BAR = 0.15  # stall of an async save / time of a sync save
VOCAB, HEAD = 4096, 64
BYTES = {"bf16": 14, "fp32": 16}  # per parameter: weight (2 or 4 bytes), fp32 main parameter, two moments
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


@message
class Took(NamedTuple):
    seconds: float
    peak: int = 0  # largest growth of the process in bytes


def sizes_for(num_parameters: float) -> tuple[int, int]:
    """The number of layers and the hidden size of a model with about this many parameters, and layers = hidden / 64."""
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


def turns_of(config: Config, vocab_size: int, folder: str, repeats: int) -> list[Row]:
    """Measures on every rank.  Returns facts of the model, and for each row the time and memory of every turn.

    Each value is the largest over the ranks.
    """
    layout = Layout.resolve(config, dist.get_world_size())
    groups = process_groups.start(layout, device.start(config.run.device), seed=1, timeout_s=600)
    engine = Engine(config, layout, groups, vocab_size=vocab_size, num_steps=100)
    initialise(engine)
    bench = RankBench(engine, Path(folder))
    num_bytes = all_gather_objects(lambda: engine_state.snapshot(bench.engine, {}).num_bytes, groups.control)
    turns: dict[str, list[Took]] = {}
    for turn in range(repeats + 1):
        for measure in (bench.torch_save, bench.sync_save, bench.async_save):
            local = measure()
            for name, took in slowest(all_gather_objects(lambda: local, groups.control)).items():
                if turn or name == FIRST:  # the first turn warms up
                    turns.setdefault(name, []).append(took)
    process_groups.stop()
    model = config.model
    facts = {"layers": model.num_layers, "hidden": model.hidden_size, "file_system": machine.file_system(Path(folder))}
    return [{**facts, "bytes": sum(num_bytes), "turns": turns}]


def slowest(ranks: Sequence[dict[str, Took]]) -> dict[str, Took]:
    return {name: Took(*(max(pair) for pair in zip(*(rank[name] for rank in ranks)))) for name in ranks[0]}


def timed(call: Callable[[], object]) -> Took:
    """Seconds and memory of one call, which all ranks start at the same time."""

    def finished() -> None:
        call()
        torch.cuda.synchronize()  # does nothing in a CPU run (sft/mcore/device.py)

    dist.barrier()
    return Took(*growth(finished))


class RankBench:
    """Measures saves and loads on a rank.  Each public method measures some rows, and removes its files."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder, self.step = engine, folder, 0
        conditions = Conditions(plan={}, recipe={}, layout={}, versions={})
        self.saved_s: dict[int, float] = {}  # seconds of each save by step; only on rank 0
        note = self.saved_s.__setitem__
        self.sync, self.background = (
            Saver(CheckpointConfig(async_save=is_async), folder, conditions, engine.groups, QUIET, lambda: True, note)
            for is_async in (False, True)
        )
        self.is_first = True
        self.a, self.b, self.c = (torch.randn(768, 768, device=engine.groups.device) for _ in range(3))
        for state in optimizer_shards.optimizer_slices(engine.optimizer):
            for name in state.tensors.keys() - {optimizer_shards.MAIN}:
                state.tensors[name].normal_()  # zeros that were never written have no memory yet

    def torch_save(self) -> dict[str, Took]:
        """Saves copies, because torch.save of a view writes the whole buffer that the view belongs to."""
        path = self.folder / f"rank{dist.get_rank()}.pt"
        tensors = [shard.data.clone() for shard in engine_state.snapshot(self.engine, {}).shards]

        def save() -> None:
            torch.save(tensors, path)
            flush(path)

        saved = timed(save)
        tensors.clear()
        loaded = timed(lambda: torch.load(path))
        path.unlink()
        return {"torch.save": saved, "torch.load": loaded}

    def sync_save(self) -> dict[str, Took]:
        turn = {SYNC: timed(lambda: self._save(self.sync))}
        path = self.folder / folders.name_of(self.step)
        for verify in ("full", "size", "off"):
            turn[f"load, verify {verify}"] = timed(lambda: self._load(path, verify))
        self._remove(path)
        return turn

    def async_save(self) -> dict[str, Took]:
        name, self.is_first = (FIRST if self.is_first else STALL), False
        alone = timed(lambda: self._work(UNITS))
        stall = timed(lambda: self._save(self.background))
        start, units, before = time.perf_counter(), 0, memory()[1]
        while not units or f"saving step {self.step}" in (thread.name for thread in threading.enumerate()):
            self._work(1)
            torch.cuda.synchronize()
            units += 1
        beside = time.perf_counter() - start
        self.background.drain(must_succeed=True)
        self._remove(self.folder / folders.name_of(self.step))
        return {
            name: stall,
            "async save: published": Took(self.saved_s.get(self.step, 0.0), stall.peak + memory()[1] - before),
            WORK: Took(alone.seconds / UNITS),
            BESIDE: Took(beside / units),
        }

    def _save(self, saver: Saver) -> None:
        self.step += 1
        saver.save(self.engine, TrainState(step=self.step), wait=False)

    def _load(self, path: Path, verify: resume.Verify) -> None:
        resume.verified(path, verify, self.engine.groups)
        engine_state.load(self.engine, path)

    def _work(self, units: int) -> None:
        for _ in range(units):
            torch.mm(self.a, self.b, out=self.c)
            torch.mm(self.c, self.b.T)
            torch.mm(self.a.T, self.c)

    def _remove(self, path: Path) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)


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
    """The bar of the stall.  The first async save does not count, because it allocates memory."""
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
