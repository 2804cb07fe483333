"""Steps with fixed and with dynamic CP in turns, on several ranks; the measurement of the subject dynamic_cp_step.

It is a process of its own, because a network namespace begins with a process:

    python -m tools.bench.dynamic_cp_rank WORK FILE

WORK is `Work` as JSON.  The process starts the ranks and writes what they measured to FILE.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from sft.config import Config
from sft.data.loader import make_loader
from sft.data.packing.cp_cost import CpCost
from sft.data.packing.cp_prediction import Prediction, predict
from sft.layers.flops import ASSUMED_SHARE, TrainFlops
from sft.mcore import device, process_groups
from sft.mcore.engine import Engine
from sft.mcore.initial_weights import initialise
from sft.parallel.alignment import aligned
from sft.parallel.layout import Layout
from sft.recipe.load import parse_recipe
from tools.bench import ranks
from tools.bench.cp_traffic import KeyTraffic, bandwidth, loopback_bytes, slowest_rank, sum_over_ranks
from tools.bench.harness import Refused
from tools.bench.results import Row
from tools.bench.steps.trainer import RandomCorpus

VOCAB, MULTIPLE = 512, 32
FIXED, DYNAMIC = "fixed", "dynamic"
CLOSE = 1e-4  # relative difference of losses after up to `batches` updates: fp32 sums in another order
NUM_STEPS = 1000  # of the schedule; fewer are taken


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is trained.  batches: global batches, in turn; rounds: times that each is timed

    tflops: TFLOP/s of a rank that need no communication; None: those of this measurement
    """

    num_ranks: int
    hidden: int
    layers: int
    seq_length: int
    packs: int
    batches: int
    rounds: int
    tflops: float | None = None

    def config(self, is_dynamic: bool, tflops: float = 1.0, gb_s: float = 1.0) -> Config:
        """The recipe.  gb_s: bytes per second that a rank receives"""
        text = f"""
run: {{dir: unused, device: cpu, precision: fp32, seed: 0}}
model: {{num_layers: {self.layers}, hidden_size: {self.hidden}, ffn_hidden_size: {3 * self.hidden},
        num_attention_heads: {self.hidden // 32}, init_from: random}}
data: {{train: unused, seq_length: {self.seq_length}, doc_multiple: {MULTIPLE}}}
parallel: {{cp: {self.num_ranks}, dynamic_cp: {str(is_dynamic).lower()}, distributed_optimizer: false,
           gpus_per_node: {self.num_ranks}, intra_node_gb_s: {gb_s:.9f}, inter_node_gb_s: {gb_s:.9f}}}
train: {{num_steps: {NUM_STEPS}, global_batch_size: {self.packs}}}
optim: {{lr: 1.0e-4, schedule: constant}}
log: {{peak_tflops: {tflops / ASSUMED_SHARE:.9f}}}
"""
        return parse_recipe(text, "bench dynamic_cp_step", []).config

    def lengths(self) -> np.ndarray:
        """Chat, log-normal with median seq_length / 55; 6% of the documents, log-uniform from seq_length / 8 on.

        Long documents have 44% of the tokens, as in the mix `longmix` of tools/bench/mixes.py with seq_length 131,072.
        """
        rng, number, longest = np.random.default_rng(0), 30 * (self.batches * self.packs + 1), self.seq_length
        long, chat = longest / 8 * 8 ** rng.random(number), rng.lognormal(np.log(longest / 55), 1.1, number)
        return np.clip(np.where(rng.random(number) < 0.06, long, chat).astype(np.int64), 1, longest)


class Side:
    """Steps of one recipe, with fixed or with dynamic CP."""

    def __init__(self, work: Work, config: Config, groups: process_groups.ProcessGroups) -> None:
        layout, lengths = Layout.resolve(config, work.num_ranks), work.lengths()
        corpus: Any = RandomCorpus(lengths, VOCAB)
        loader = make_loader(config, layout, corpus, pad_id=0, dp_rank=groups.dp_rank, cp_rank=groups.cp_rank)
        self.engine = Engine(config, layout, groups, vocab_size=VOCAB, num_steps=NUM_STEPS)
        initialise(self.engine)
        self._groups = [groups.cp_group(size).members for size in layout.cp_sizes or (layout.cp,)]
        self._lengths, self._grids = lengths, [loader.grid(batch) for batch in range(work.batches)]
        self._batches = [loader.microbatches_of(grid) for grid in self._grids]

    def step(self, batch: int) -> tuple[float, float]:
        """Seconds until the slowest rank has taken the step, and the loss."""
        sum_over_ranks(0)  # all ranks start together
        start = time.perf_counter()
        totals = self.engine.train_step(self._batches[batch])
        return slowest_rank(time.perf_counter() - start), totals.objective / totals.num_tokens

    def counted_step(self, batch: int) -> dict[str, float]:
        """A step, and bytes that all ranks together send: of keys, values and their gradients, and on the loopback."""
        traffic, before = KeyTraffic(self._groups), loopback_bytes()
        with traffic.counted():
            seconds, loss = self.step(batch)
        loopback = loopback_bytes() - before
        return {"seconds": seconds, "loss": loss, "sent": sum_over_ranks(traffic.num_bytes), "loopback": loopback}

    def prediction(self, batch: int, cost: CpCost) -> Prediction:
        return predict(self._grids[batch], self._lengths, doc_multiple=MULTIPLE, cost=cost)

    def flops(self, batch: int) -> float:
        """FLOPs of all layers in a step."""
        flops = TrainFlops.of(self.engine.config.model, 0)
        ids = {i for slots in self._grids[batch] for slot in slots for i in slot.samples}
        lengths = self._lengths[sorted(ids)]
        return flops.per_token * float(aligned(lengths, MULTIPLE).sum()) + flops.attention(lengths)


def turns(work: Work) -> list[Row]:
    """Runs on every rank.  One row: seconds of each step, and facts of each batch, by side."""
    layout, batches = Layout.resolve(work.config(True), work.num_ranks), range(work.batches)
    groups = process_groups.start(layout, device.start("cpu"), seed=0, timeout_s=600)
    gb_s = bandwidth(groups.cp_group(work.num_ranks).members)
    sides = {FIXED: Side(work, work.config(False), groups)}
    facts: dict[str, list[dict[str, Any]]] = {FIXED: [sides[FIXED].counted_step(batch) for batch in batches]}
    speeds = [sides[FIXED].flops(batch) / facts[FIXED][batch]["seconds"] for batch in batches]
    tflops = work.tflops or median(speeds) / work.num_ranks / 1e12
    config = work.config(True, tflops, gb_s)
    sides[DYNAMIC] = Side(work, config, groups)
    facts[DYNAMIC] = [sides[DYNAMIC].counted_step(batch) for batch in batches]
    for name, side in sides.items():
        for batch in batches:
            facts[name][batch]["plan"] = asdict(side.prediction(batch, CpCost.of(config)))
            loss, expected = facts[name][batch]["loss"], facts[FIXED][batch]["loss"]
            if abs(loss - expected) > CLOSE * expected:
                raise Refused(f"batch {batch}: the loss with {name} CP is {loss}; expected {expected}")
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(work.rounds * work.batches):
        for name in (FIXED, DYNAMIC) if turn % 2 else (DYNAMIC, FIXED):
            seconds[name].append(sides[name].step(turn % work.batches)[0])
    process_groups.stop()
    return [{"seconds": seconds, "facts": facts, "gb_s": gb_s, "tflops": tflops}]


def main(work: str, result: str) -> int:
    settings = Work(**json.loads(work))
    try:
        rows = ranks.rows_of_rank0(settings.num_ranks, turns, settings)
    except Refused as error:
        print(error, file=sys.stderr)
        return 2
    Path(result).write_text(json.dumps(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
