"""What the metrics of a step cost: time beside the whole step of the demo's model, and bytes a rank sends.

    python tools/bench_metrics.py             one process, 12,288 tokens a step in chats of about 1,000
    python tools/bench_metrics.py --check     and exit 1 above SHARE_BAR of the step's time or BYTES_BAR

Steps and tallies of the same microbatch take turns; medians.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch

from sft.batch import Microbatch, Sample
from sft.config import Config
from sft.data.collate import local_part
from sft.data.packing.pack import add_filler, make_pack
from sft.mcore import device, process_groups
from sft.mcore.engine import Engine
from sft.metrics.accumulator import Accumulator, Place, Schema
from sft.parallel.layout import Layout
from sft.recipe.load import load_recipe

SHARE_BAR = 0.01
BYTES_BAR = 64 << 10
REPEATS = 7
ROOT = Path(__file__).resolve().parents[1]


def microbatch(config: Config, documents: int) -> Microbatch:
    """Random chats that fill a pack, the last 40% of each supervised."""
    rng = np.random.default_rng(0)
    length = config.data.seq_length // documents - config.data.doc_multiple
    samples = [
        Sample(
            sample_id=i,
            tokens=rng.integers(0, 256, size=length, dtype=np.int32),
            weights=(np.arange(length) >= 0.6 * length).astype(np.float32),
        )
        for i in range(documents)
    ]
    multiple = config.data.doc_multiple
    pack = add_filler(
        make_pack(samples, doc_multiple=multiple, pad_id=0), multiple=multiple, doc_multiple=multiple, pad_id=0
    )
    return local_part(pack, np.arange(len(pack.tokens)), doc_multiple=multiple)


def tally(config: Config, place: Place, mb: Microbatch) -> None:
    """All that a step does for its metrics once the schedule is over."""
    made = Accumulator(Schema(position_edges=tuple(config.log.position_edges), sources=("train",)), (1.0, 1.0))
    made.packs([mb])
    logprob = np.full(mb.num_tokens, -1.0, dtype=np.float32)
    made.tokens([mb], 0, objective=1.0, denominator=1.0, logprob=logprob, entropy=None, correct=logprob)
    made.reduce(place)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=12, metavar="N", help="chats in the pack")
    parser.add_argument("--check", action="store_true", help=f"exit 1 above {SHARE_BAR:.0%} or {BYTES_BAR >> 10} KiB")
    arguments = parser.parse_args()

    config = load_recipe(str(ROOT / "recipes" / "demo.yaml"), ["parallel.cp=1", "run.device=cpu"]).config
    layout = Layout.resolve(config, 1)
    place = process_groups.start(layout, device.start("cpu"), seed=1, timeout_s=60)
    engine = Engine(config, layout, place, vocab_size=259, num_steps=100)
    mb = microbatch(config, arguments.documents)
    telling = Place(tells_tokens=True, tells_packs=True, cp=place.cp, device=torch.device("cpu"))
    steps, tallies = [], []
    for turn in range(REPEATS + 1):
        step, metrics = seconds(lambda: engine.train_step([mb])), seconds(lambda: tally(config, telling, mb))
        if turn:  # the first warms up
            steps.append(step)
            tallies.append(metrics)
    share = median(tallies) / median(steps)
    sent = Accumulator.bytes_sent(len(config.log.position_edges) + 1, 1, len(mb.lengths))
    print(f"step {median(steps) * 1e3:.1f} ms, of which metrics {median(tallies) * 1e3:.3f} ms: {share:.3%}")
    print(f"sent by a rank: {sent:,} bytes ({arguments.documents} documents of its packs, cp above 1)")
    process_groups.stop()
    return 1 if arguments.check and (share > SHARE_BAR or sent > BYTES_BAR) else 0


if __name__ == "__main__":
    sys.exit(main())
