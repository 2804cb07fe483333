"""Times steps: one warm-up step, then the timed steps, and a trace of one step."""

import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tools.bench.clock import wall_on
from tools.bench.steps.roofline import RANGE

# Runs the step of this number, and returns its facts: tokens, labels, attention_flops, data_wait_s, peak_bytes, ...
Step = Callable[[int], dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How a case is measured.  Holds plain values, because another process receives the options as JSON.

    steps        largest number of timed steps; no step begins after `seconds`
    overrides    KEY=VALUE of the recipe
    kernels      attention kernels; the roofline uses the best rates among them
    memory_gib   device memory that torch may allocate; None: all
    only_fits    measure only the peak memory of two steps
    """

    device: str = "cuda"
    steps: int = 5
    seconds: float = 15.0
    overrides: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ("flash", "sdpa", "te", "cudnn")
    peak_tflops: float = 989.0
    memory_gib: float | None = None
    only_fits: bool = False


def measured(step: Step, options: StepOptions, ranges: Mapping[str, Any]) -> dict[str, Any]:
    """The sums over the timed steps, and the trace of one step.

    ranges  name -> (object, name of its function): calls of the function are marked with the name in the trace
    """
    device, totals = torch.device(options.device), dict[str, float]()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    warm_s, facts = timed(step, 0, device)
    peak, is_long = facts["peak_bytes"], warm_s > options.seconds
    reserved = facts.get("reserved_bytes", 0.0)
    seconds, count, profiled_s = 0.0, 0, 0.0
    events: list[dict[str, Any]] = []
    while count < (1 if is_long else options.steps) and seconds < options.seconds:
        if is_long:
            events, taken, facts = profiled(step, 1, device, ranges)
            profiled_s = taken
        else:
            taken, facts = timed(step, 1 + count, device)
        seconds, count, peak = seconds + taken, count + 1, max(peak, facts["peak_bytes"])
        reserved = max(reserved, facts.get("reserved_bytes", 0.0))
        for name in ("tokens", "labels", "attention_flops", "data_wait_s"):
            totals[name] = totals.get(name, 0.0) + facts[name]
    if not is_long:
        events, profiled_s, _ = profiled(step, 1 + count, device, ranges)
    return {
        **totals, "seconds": seconds, "steps": count, "events": events, "profiled_s": profiled_s,
        "timed_while_profiled": is_long, "first_step_s": warm_s, "peak_bytes": peak or None,
        "reserved_bytes": reserved or None, "loss": facts["loss"],
    }  # fmt: skip


def most_memory(step: Step, device: torch.device) -> dict[str, Any]:
    """The peak memory of two steps.  The first allocates the optimizer's states; the second runs with them."""
    facts = [timed(step, index, device)[1] for index in range(2)]
    return {"peak_bytes": max(step_facts["peak_bytes"] for step_facts in facts) or None, "tokens": facts[-1]["tokens"]}


def timed(step: Step, index: int, device: torch.device) -> tuple[float, dict[str, float]]:
    """Wall time of a step in seconds, until all its work on the device has finished, and the facts of the step."""
    facts: list[dict[str, float]] = []
    return wall_on(device)(lambda: facts.append(step(index))), facts[0]


def profiled(
    step: Step, index: int, device: torch.device, ranges: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], float, dict[str, float]]:
    """The trace events of a step in Chrome's format, the seconds of the step, and its facts."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    with ExitStack() as patches:
        for name, (owner, attribute) in ranges.items():
            function = _in_range(RANGE + name, getattr(owner, attribute))
            patches.enter_context(mock.patch.object(owner, attribute, function))
        with torch.profiler.profile(activities=activities) as profile:
            taken, facts = timed(step, index, device)
    with tempfile.TemporaryDirectory(prefix="bench-step-") as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8"))["traceEvents"], taken, facts


def _in_range(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(name):
            return function(*args, **kwargs)

    return call
