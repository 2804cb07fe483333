"""How long a checkpoint holds training up, and how long loading one takes, beside torch.save and torch.load.

    python tools/bench_checkpoint.py                       two processes, 1 GiB of weights and moments, CPU
    python tools/bench_checkpoint.py --folder /mnt/nfs     on the file system that matters
    python tools/bench_checkpoint.py --check               and exit 1 where an async save stalls for more than STALL_BAR

Rows take turns; medians, of the slowest rank each time.  Every row moves the same bytes; each rank gives torch.save one
file, and the disk has it before the clock stops.  What is read was just written, and comes from memory.  `peak` is by
how much a process grew at most.  `work` is a product of matrices with its two gradients.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sft.atomic_files import flush
from sft.checkpoint import folders, resume
from sft.checkpoint.saver import Saver
from sft.checkpoint.train_state import Conditions, TrainState
from sft.config import CheckpointConfig, Config
from sft.console import QUIET, size
from sft.mcore import device, process_groups
from sft.mcore.checkpoint_io import engine_state, optimizer_shards
from sft.mcore.engine import Engine
from sft.parallel.collectives import all_gather_objects
from sft.parallel.layout import Layout
from sft.recipe.load import parse_recipe

STALL_BAR = 0.15  # of a sync save
VOCAB, HEAD, UNITS = 4096, 64, 20
BYTES = {"bf16": 14, "fp32": 16}  # of a parameter: weight, the optimizer's own in fp32, and two moments
SYNC, FIRST, STALL, BESIDE = "sync save", "async save: first stall", "async save: stall", "work beside an async save"
ROWS = {  # and what each is compared with
    "torch.save": None,
    SYNC: "torch.save",
    FIRST: SYNC,
    STALL: SYNC,
    "async save: published": SYNC,
    "work alone": None,
    BESIDE: "work alone",
    "torch.load": None,
    "load, verify full": "torch.load",
    "load, verify size": "torch.load",
    "load, verify off": "torch.load",
}


class Took(NamedTuple):
    seconds: float
    peak: int = 0  # bytes


def fit(num_parameters: float) -> tuple[int, int]:
    """(layers, hidden size) of a model of about that size, one layer for every 64 of its width, or fewer."""
    hidden = HEAD
    while VOCAB * hidden + 13 * hidden**2 * (hidden // HEAD) < num_parameters:
        hidden += HEAD
    return max(1, round((num_parameters - VOCAB * hidden) / (13 * hidden**2))), hidden


def config_of(options: argparse.Namespace) -> Config:
    layers, hidden = fit(options.mib * 2**20 / BYTES[options.precision])
    text = f"""
run: {{dir: unused, device: cpu, precision: {options.precision}}}
model: {{num_layers: {layers}, hidden_size: {hidden}, ffn_hidden_size: {3 * hidden},
        num_attention_heads: {hidden // HEAD}, tie_embeddings: true}}
data: {{train: unused, seq_length: 256}}
train: {{num_steps: 100, global_batch_size: {options.ranks}}}
optim: {{lr: 1e-3}}
"""
    return parse_recipe(text, "bench_checkpoint", []).config


def timed(call: Callable[[], object]) -> Took:
    """One call, started by all ranks at once."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # what was used at most is from now on
    before = peak()
    dist.barrier()
    start = time.perf_counter()
    call()
    return Took(time.perf_counter() - start, peak() - before)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Bench:
    """One rank.  Each method measures a few rows, and removes what was written for them."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder, self.step = engine, folder, 0
        now = Conditions(plan={}, recipe={}, layout={}, versions={})
        self.sync, self.background = (
            Saver(CheckpointConfig(async_save=is_async), folder, now, engine.groups, QUIET, lambda: True)
            for is_async in (False, True)
        )
        self.a, self.b, self.c = (torch.randn(768, 768) for _ in range(3))
        for one in optimizer_shards.held(engine.optimizer):
            for name in optimizer_shards.MOMENTS:
                one.tensors[name].normal_()  # zeros that nobody wrote have no memory yet

    def sync_save(self) -> dict[str, Took]:
        found = {SYNC: timed(lambda: self._save(self.sync))}
        path = self.folder / folders.name_of(self.step)
        for verify in ("full", "size", "off"):
            found[f"load, verify {verify}"] = timed(lambda: self._load(path, verify))
        self._remove(path)
        return found

    def async_save(self) -> dict[str, Took]:
        name = STALL if self.background.published else FIRST
        alone = timed(lambda: self._work(UNITS))
        stall = timed(lambda: self._save(self.background))
        start, units, grown = time.perf_counter(), 0, peak()
        while not units or f"saving step {self.step}" in (thread.name for thread in threading.enumerate()):
            self._work(1)
            units += 1
        beside = time.perf_counter() - start
        self.background.drain(must=True)
        self._remove(self.folder / folders.name_of(self.step))
        return {
            name: stall,
            "async save: published": Took(self.background.took_s or 0.0, stall.peak + peak() - grown),
            "work alone": Took(alone.seconds / UNITS),
            BESIDE: Took(beside / units),
        }

    def torch_save(self) -> dict[str, Took]:
        """Of copies, as torch.save writes the whole of a buffer that a tensor is a part of."""
        path = self.folder / f"rank{dist.get_rank()}.pt"
        tensors = [shard.data.clone() for shard in engine_state.snapshot(self.engine, {}).part.shards]
        saved = timed(lambda: (torch.save(tensors, path), flush(path)))  # type: ignore[func-returns-value]
        tensors.clear()
        loaded = timed(lambda: torch.load(path))
        path.unlink()
        return {"torch.save": saved, "torch.load": loaded}

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


def slowest(ranks: Sequence[dict[str, Took]]) -> dict[str, Took]:
    return {name: Took(*(max(pair) for pair in zip(*(one[name] for one in ranks)))) for name in ranks[0]}


def table(rounds: Mapping[str, Sequence[Took]], num_bytes: int) -> list[str]:
    """GB/s of all ranks together."""
    seconds = {name: median(took.seconds for took in rounds[name]) for name in ROWS}
    lines = [f"{'':<26}{'seconds':>9}{'GB/s':>7}{'peak MiB':>10}{'ratio':>8}"]
    for name, other in ROWS.items():
        speed = "" if name.startswith("work") else f"{num_bytes / 1e9 / seconds[name]:.2f}"
        grew = f"{max(took.peak for took in rounds[name]) / 2**20:,.0f}" if speed else ""
        ratio = f"{seconds[name] / seconds[other]:8.3f} of {other}" if other else ""
        lines.append(f"{name:<26}{seconds[name]:>9.3f}{speed:>7}{grew:>10}{ratio}".rstrip())
    return lines


def on_rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Rank 0 prints, and its exit status is that of the tool."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(options.ranks))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    store = dist.FileStore(f"{folder}/meeting", options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    config, layout = config_of(options), Layout.resolve(config_of(options), options.ranks)
    place = process_groups.start(layout, device.start("cpu"), seed=1, timeout_s=600)
    bench = Bench(Engine(config, layout, place, vocab_size=VOCAB, num_steps=100), Path(folder))
    num_bytes = sum(all_gather_objects(lambda: engine_state.snapshot(bench.engine, {}).part.num_bytes, place.control))
    if rank == 0:
        where = subprocess.check_output(["df", "--output=fstype", folder], text=True).split()[-1]
        shape = f"{config.model.num_layers} layers, {config.model.hidden_size} hidden, {options.precision}"
        print(
            f"torch {torch.__version__}, {options.ranks} ranks of {torch.get_num_threads()} threads, {shape}: ", end=""
        )
        print(f"{size(num_bytes)}, {where}, median of {options.repeats}", flush=True)
    rounds: dict[str, list[Took]] = {name: [] for name in ROWS}
    for turn in range(options.repeats + 1):
        for measure in (bench.torch_save, bench.sync_save, bench.async_save):
            mine = measure()
            for name, took in slowest(all_gather_objects(lambda: mine, place.control)).items():
                if turn or name == FIRST:  # the first turn warms up
                    rounds[name].append(took)
    process_groups.stop()
    sys.exit(report(rounds, num_bytes, check=options.check) if rank == 0 else 0)


def report(rounds: Mapping[str, Sequence[Took]], num_bytes: int, *, check: bool) -> int:
    """The exit status."""
    print("\n".join(table(rounds, num_bytes)))
    share = median(took.seconds for took in rounds[STALL]) / median(took.seconds for took in rounds[SYNC])
    met = share <= STALL_BAR
    told = f"{share:.1%} of a sync save (bar {STALL_BAR:.0%}, {'met' if met else 'MISSED'})"
    print(f"bench_checkpoint: an async save stalls for {told}", flush=True)
    return 1 if check and not met else 0


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return int(text)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=positive, default=2, metavar="N", help="data-parallel processes")
    parser.add_argument("--mib", type=positive, default=1024, metavar="N", help="about this much state in all")
    parser.add_argument("--precision", choices=list(BYTES), default="bf16")
    parser.add_argument("--folder", type=Path, help="where to make a temporary folder to write into")
    parser.add_argument("--repeats", type=positive, default=5, metavar="N")
    parser.add_argument("--check", action="store_true", help=f"exit 1 where a stall is above {STALL_BAR:.0%}%")
    options = parser.parse_args(argv)
    if options.folder and not options.folder.is_dir():
        parser.error(f"--folder {options.folder} is not a folder")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench_checkpoint-") as folder:
        try:
            mp.spawn(on_rank, (options, os.path.realpath(folder)), nprocs=options.ranks)
        except mp.ProcessExitedException as ended:
            return ended.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
