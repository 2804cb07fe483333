"""Runs training steps of one rank on the stand-in, and prints memory and counters as a line of JSON.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.standin.steps 4b:64k:one '["parallel.cp=2"]' 2
"""

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sft.mcore import device as devices
from sft.mcore import process_groups
from sft.parallel.layout import Layout
from sft.run import environment
from sft.run.signals import leave_with_parent
from tests.standin import answers, replay
from tests.standin.calls import Counts, counted
from tools.bench.steps import trainer
from tools.bench.steps.case import StepCase

FLA = "SFT_STANDIN_FLA"  # environment variable: linear attention calls a function of the shapes of FLA's
# Environment variables about forward and backward of the last step.
FREE = "SFT_STANDIN_FREE"  # they must not wait for the GPU
RECORD = "SFT_STANDIN_RECORD"  # folder: a file for each rank, named by its number, gets their work (replay.py)


def main(name: str, also: Sequence[str], num_steps: int) -> None:
    leave_with_parent()  # the test kills torchrun at its time limit
    answers.give()
    if FLA in os.environ:
        answers.give_fla()
    case = StepCase.read(name)
    seq_length, multiple, _ = trainer.documents_of(case, 1)
    config = case.config("cuda", seq_length=seq_length, multiple=multiple, also=also)
    layout = Layout.resolve(config, int(os.environ["WORLD_SIZE"]))
    environment.prepare(config, layout)
    place = process_groups.start(layout, devices.start("cuda"), seed=config.run.seed, timeout_s=300)
    engine, loader = trainer.engine_and_loader(case, config, layout, place, num_steps=num_steps)
    within: list[Counts] = []
    engine._schedule = partial(_watched, engine._schedule, within, num_steps)  # type: ignore[method-assign]
    peak, reserved, steps = 0.0, 0.0, []
    for step in range(num_steps):
        microbatches = loader.microbatches(step)
        before = counted()
        totals = engine.train_step(microbatches)
        steps.append(counted().since(before))
        peak = max(peak, totals.memory_allocated.value, torch.cuda.max_memory_allocated())
        reserved = max(reserved, totals.memory_reserved.value, torch.cuda.max_memory_reserved())
    found = {
        "rank": int(os.environ["RANK"]),
        "peak_bytes": peak,
        "reserved_bytes": reserved,
        "host_bytes": counted().most_host_bytes,
        "step": asdict(steps[-1]),
        "passes": asdict(within[-1]),
        "backend": str(engine.backend),
    }
    os.write(sys.stdout.fileno(), (json.dumps(found) + "\n").encode())  # in one write, because ranks share a pipe
    process_groups.stop()


def _watched(schedule: Callable[..., Any], within: list[Counts], num_steps: int, *given: Any, **how: Any) -> Any:
    """Runs forward and backward of all microbatches, and appends the counters of this call to `within`."""
    is_last = len(within) == num_steps - 1
    before = counted()
    if is_last and FREE in os.environ:
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    is_recorded = is_last and RECORD in os.environ
    try:
        with replay.recorded(Path(os.environ[RECORD], os.environ["RANK"])) if is_recorded else nullcontext():
            return schedule(*given, **how)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        within.append(counted().since(before))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
