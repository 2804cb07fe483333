"""Runs training steps of one rank on the stand-in, and prints memory and counters as a line of JSON.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.standin.steps 4b:64k:one '["parallel.cp=2"]'
"""

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from sft.mcore import device as devices
from sft.mcore import process_groups
from sft.parallel.layout import Layout
from sft.run.signals import leave_with_parent
from tests.standin import answers
from tests.standin.calls import Counts, counted
from tools.bench.steps import trainer
from tools.bench.steps.case import StepCase

NUM_STEPS = 2  # the first allocates optimizer states and compiles kernels; counters are those of the second
FREE = "SFT_STANDIN_FREE"  # environment variable: forward and backward of the last step must not wait for the GPU


def main(name: str, also: Sequence[str]) -> None:
    leave_with_parent()  # the test kills torchrun at its time limit
    answers.give()
    case = StepCase.read(name)
    seq_length, multiple, _ = trainer.documents_of(case, 1)
    config = case.config("cuda", seq_length=seq_length, multiple=multiple, also=also)
    layout = Layout.resolve(config, int(os.environ["WORLD_SIZE"]))
    place = process_groups.start(layout, devices.start("cuda"), seed=config.run.seed, timeout_s=300)
    engine, loader = trainer.engine_and_loader(case, config, layout, place, num_steps=NUM_STEPS)
    within: list[Counts] = []
    engine._schedule = partial(_watched, engine._schedule, within)  # type: ignore[method-assign]
    peak, steps = 0.0, []
    for step in range(NUM_STEPS):
        microbatches = loader.microbatches(step)
        before = counted()
        totals = engine.train_step(microbatches)
        steps.append(counted().since(before))
        peak = max(peak, totals.memory_allocated.value, torch.cuda.max_memory_allocated())
    found = {
        "rank": int(os.environ["RANK"]),
        "peak_bytes": peak,
        "host_bytes": counted().most_host_bytes,
        "step": asdict(steps[-1]),
        "passes": asdict(within[-1]),
    }
    os.write(sys.stdout.fileno(), (json.dumps(found) + "\n").encode())  # in one write, because ranks share a pipe
    process_groups.stop()


def _watched(schedule: Callable[..., Any], within: list[Counts], *given: Any, **how: Any) -> Any:
    """Runs forward and backward of all microbatches, and appends the counters of this call to `within`."""
    is_last = len(within) == NUM_STEPS - 1
    before = counted()
    if is_last and FREE in os.environ:
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        return schedule(*given, **how)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        within.append(counted().since(before))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
