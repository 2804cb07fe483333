"""Packing, balance and collation at scale: fill, level and time beside simpler ways to pack.

    python tools/bench_packing.py                   three distributions of 1,000,000 lengths; some minutes
    python tools/bench_packing.py --check           and exit 1 where a bar is missed
    python tools/bench_packing.py --samples 100000  the same, smaller

chat is log-normal with median 600, longmix 98% of that and 2% log-uniform from 8K to 128K, agent log-normal with
median 16K, all clipped to seq_length.  Efficiencies are percent, min / median over batches; `bound` is what no
assignment of full packs exceeds (`sft/data/packing/bounds.py`).
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from sft.config import DataConfig
from sft.data.cache.corpus import Corpus
from sft.data.cache.encoder import Block
from sft.data.cache.row_report import LINE
from sft.data.cache.store import open_store, write_store
from sft.data.loader import Loader
from sft.data.packing.balance import assign, costs, efficiency
from sft.data.packing.bounds import bounds
from sft.data.packing.plan import Plan, plan_epoch, plan_of
from sft.data.packing.shuffle import shuffled
from sft.parallel.alignment import aligned
from sft.parallel.layout import Layout

MULTIPLE = 32
DISTRIBUTIONS = {"chat": 32768, "longmix": 131072, "agent": 131072}  # seq_length
CROSSOVERS = {"Llama-8B": 57_000.0, "Qwen3-30B-A3B": 15_400.0}
SHAPES = [(8, 4), (8, 16), (32, 1), (32, 4)]  # dp, microbatches of a rank
BATCHES = 20
FILL_BAR, PLAN_BAR_S, COLLATE_BAR, ASSIGN_BAR_S = 0.994, 1.0, 5e6, 0.15
# Median efficiency per step, where the bound allows it; of the bound elsewhere; and per microbatch at 16 of a rank.
STEP_BAR, LIMITED_BAR, MICROBATCH_BAR = 0.99, 0.98, 0.95


def lengths_of(name: str, n: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    chat = rng.lognormal(math.log(600), 1.1, n)
    drawn = {
        "chat": chat,
        "longmix": np.where(rng.random(n) < 0.02, 8192 * 16 ** rng.random(n), chat),
        "agent": rng.lognormal(math.log(16384), 0.9, n),
    }[name]
    return np.clip(drawn.astype(np.int64), 1, DISTRIBUTIONS[name])


def next_fit(lengths: np.ndarray, seq_length: int) -> Plan:
    """In order, a new pack where the last one is full."""
    counts, room = [0], seq_length
    for size in aligned(lengths, MULTIPLE).tolist():
        if size > room:
            counts.append(0)
            room = seq_length
        counts[-1] += 1
        room -= size
    return plan_of(np.arange(len(lengths)), np.array(counts), lengths, seq_length, MULTIPLE)


def decreasing(lengths: np.ndarray, seq_length: int) -> Plan:
    """Longest first, each into the fullest pack that takes it, any pack open: as full as first-fit decreasing."""
    order = np.argsort(-lengths, kind="stable")
    with_room: list[list[int]] = [[] for _ in range(seq_length // MULTIPLE + 1)]
    rooms, opened, pack_of = 0, 0, []  # bit r of `rooms`: with_room[r] is not empty
    for size in (aligned(lengths[order], MULTIPLE) // MULTIPLE).tolist():
        if fitting := rooms >> size:
            room = size + (fitting & -fitting).bit_length() - 1
            pack = with_room[room].pop()
            rooms ^= 0 if with_room[room] else 1 << room
        else:
            room, pack, opened = seq_length // MULTIPLE, opened, opened + 1
        pack_of.append(pack)
        with_room[room - size].append(pack)
        rooms |= 1 << (room - size)
    packs = shuffled(opened, 0, 0)[np.array(pack_of)]  # in the order made, all packs of a batch would be alike
    return plan_of(order[np.argsort(packs, kind="stable")], np.bincount(packs), lengths, seq_length, MULTIPLE)


def whole(cu_seqlens: np.ndarray) -> np.ndarray:
    return np.arange(cu_seqlens[-1])


def timed(call: Callable[[], Plan], repeats: int = 1) -> tuple[Plan, float]:
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        plan = call()
        seconds.append(time.process_time() - start)
    return plan, min(seconds)


def spread(values: Sequence[float] | np.ndarray) -> str:
    return f"{100 * min(values):5.1f}/{100 * float(np.median(values)):5.1f}"


def pack(name: str, lengths: np.ndarray, missed: list[str]) -> list[Plan]:
    """Prints fill and time of every way to pack; the plans, ours first."""
    seq_length = DISTRIBUTIONS[name]
    ours, seconds = timed(
        lambda: plan_epoch(lengths, capacity=seq_length, doc_multiple=MULTIPLE, seed=0, epoch=0, shuffle=True), 3
    )
    made = {"ours": (ours, seconds)}
    made["next-fit in order"] = timed(lambda: next_fit(lengths, seq_length))
    made["best-fit decreasing"] = timed(lambda: decreasing(lengths, seq_length))
    print(f"\n{name}: {len(lengths):,} lengths, mean {lengths.mean():,.0f}, seq_length {seq_length:,}")
    for way, (plan, took) in made.items():
        print(f"  {way:20} {len(plan):>8,} packs  fill {plan.fill:8.3%}  {took:5.2f} s")
    if ours.fill < FILL_BAR or seconds > PLAN_BAR_S * len(lengths) / 1e6:
        missed.append(f"{name}: fill {ours.fill:.2%}, {seconds:.2f} s")
    return [plan for plan, _ in made.values()]


def balance(name: str, lengths: np.ndarray, plans: list[Plan], missed: list[str]) -> None:
    """Prints how level our assignment is beside the packs of each plan dealt out in turn."""
    print("  percent of ideal, medians     | per step                                 | per microbatch")
    print("  of 20 batches (ours, bound:   | next-   decrea-                          | next-   decrea-")
    print(
        "  min / median)                 | fit sing random    ours         bound    | fit sing random    ours  ", end=""
    )
    print("       bound    | ms max, median")
    for model, crossover in CROSSOVERS.items():
        work = costs(lengths, doc_multiple=MULTIPLE, crossover=crossover)
        for dp, microbatches in SHAPES:
            size = dp * microbatches
            seq_length = DISTRIBUTIONS[name]
            share = partial(assign, dp=dp, seq_length=seq_length, doc_multiple=MULTIPLE, crossover=crossover)
            limit_of = partial(bounds, dp=dp, num_microbatches=microbatches, seq_length=seq_length)
            level: list[list[tuple[float, float]]] = [[], [], [], []]
            limits, seconds = [], []
            for step in np.linspace(0, min(map(len, plans)) // size - 1, BATCHES).astype(int).tolist():
                batches = [plan.batch(step, size) for plan in plans]
                start = time.process_time()
                slots = share(batches[0], lengths)
                seconds.append(time.process_time() - start)
                ids = [i for ids in batches[0] for i in ids]
                limits.append(limit_of(lengths[ids], doc_multiple=MULTIPLE, crossover=crossover))
                dealt = [[batch[rank::dp] for rank in range(dp)] for batch in (*batches[1:], batches[0])]
                for column, ranks in zip(level, [*dealt, slots]):
                    column.append(efficiency(np.array([[work[list(i)].sum() for i in rank] for rank in ranks])))
            cells, ours = [], np.array(level[3])  # [batches, 2]
            for kind, limit in ((0, [x.full for x in limits]), (1, [x.microbatch for x in limits])):
                others = " ".join(f"{100 * np.median([x[kind] for x in column]):4.0f}" for column in level[:3])
                cells.append(f"{others}  {spread(ours[:, kind])} {spread(limit)}")
            times = f"{max(seconds) * 1e3:4.0f} {np.median(seconds) * 1e3:4.0f}"
            print(f"  {model:14} dp{dp:3} x{microbatches:3} mb | {' | '.join(cells)} | {times}")
            full, rows = np.array([(x.full, x.microbatch) for x in limits]).T
            below = np.median(ours[:, 0] / full) < (STEP_BAR if np.median(full) > STEP_BAR else LIMITED_BAR)
            apart = microbatches >= 16 and np.median(ours[:, 1]) < min(MICROBATCH_BAR, np.median(rows))
            for what, is_missed in (("step", below), ("microbatch", apart), ("time", max(seconds) > ASSIGN_BAR_S)):
                if is_missed:
                    missed.append(f"{name}, {model}, dp {dp} x {microbatches}: {what}")


def collate(missed: list[str]) -> None:
    """Prints tokens per second that one core turns from mapped files into microbatches."""
    layout = Layout(
        world_size=1, tp=1, cp=1, pp=1, dp=1, virtual_stages=1, sequence_parallel=False, global_batch_size=4,
        num_microbatches=4, doc_multiple=MULTIPLE, pack_multiple=MULTIPLE,
    )  # fmt: skip
    for name, n in (("chat", 20_000), ("agent", 1000)):
        lengths, data = lengths_of(name, n), DataConfig(train=["a"], seq_length=DISTRIBUTIONS[name])
        lines, palette = np.ones(n, dtype=LINE), np.array([0, 1], dtype=np.float32)
        lines["row"], lines["tokens"] = np.arange(n) + 1, lengths
        with tempfile.TemporaryDirectory() as folder:
            ones = np.ones(int(lengths.sum()), dtype=np.uint8)
            write_store(Path(folder) / "a", [Block(ones.astype(np.int32), ones, palette, lines, ())], palette)
            store = open_store(Path(folder) / "a")
            assert store is not None
            corpus = Corpus([Path("a")], [store])
            loader = Loader(
                corpus, data=data, layout=layout, seed=0, dp_rank=0, pad_id=0, local_indices=whole
            )  # fmt: skip
            loader.steps_per_epoch(0)  # planned before the clock starts
            start = time.process_time()
            steps = range(loader.steps_per_epoch(0))
            count = sum(mb.num_real_tokens for step in steps for mb in loader.microbatches(step))
            rate = count / (time.process_time() - start)
        print(f"collate {name}: {rate / 1e6:.1f}M tokens/s/core, {count:,} tokens")
        if rate < COLLATE_BAR:
            missed.append(f"collate {name}: {rate:.2g} tokens/s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000, metavar="N", help="lengths of each distribution")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bar is missed")
    arguments = parser.parse_args()
    missed: list[str] = []
    collate(missed)
    for name in DISTRIBUTIONS:
        lengths = lengths_of(name, arguments.samples)
        balance(name, lengths, pack(name, lengths, missed), missed)
    print("\n" + ("missed:\n  " + "\n  ".join(missed) if missed else "all bars are met"))
    return 1 if arguments.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
