"""One rank of the checkpoint benchmark: measures saves, loads and matrix products in turns."""

import resource
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
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
from tools.bench import machine
from tools.bench.results import Row

UNITS = 20  # number of units of work that are timed without a concurrent save
SYNC, FIRST, STALL = "sync save", "async save: first stall", "async save: stall"
WORK, BESIDE = "work alone", "work beside an async save"


@message
class Took(NamedTuple):
    seconds: float
    peak: int = 0  # largest growth of the process in bytes


def turns_of(config: Config, vocab_size: int, folder: str, repeats: int) -> list[Row]:
    """Runs on every rank.  Returns the times of all turns of all rows; each is the time of the slowest rank."""
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
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the process
    before = peak()
    dist.barrier()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()  # does nothing in a CPU run (sft/mcore/device.py)
    return Took(time.perf_counter() - start, peak() - before)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class RankBench:
    """Each public method measures a few rows, and removes the files that it wrote."""

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
            for name in optimizer_shards.MOMENTS:
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
        start, units, before = time.perf_counter(), 0, peak()
        while not units or f"saving step {self.step}" in (thread.name for thread in threading.enumerate()):
            self._work(1)
            torch.cuda.synchronize()
            units += 1
        beside = time.perf_counter() - start
        self.background.drain(must_succeed=True)
        self._remove(self.folder / folders.name_of(self.step))
        return {
            name: stall,
            "async save: published": Took(self.saved_s.get(self.step, 0.0), stall.peak + peak() - before),
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
