"""Measures a training step in a new process, so that even a crash becomes a row.

It also declares the options of the benchmarks `step` and `longest`.

The process is `python -m tools.bench.steps.process CASE RESULT OPTIONS`; RESULT is a file, and OPTIONS is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import torch

from sft.estimate.memory import Memory
from sft.parallel.layout import Layout
from sft.run import environment
from tools.bench.harness import DONE, Option, Row
from tools.bench.steps.case import StepCase
from tools.bench.steps.loop import StepOptions
from tools.bench.steps.roofline import shares, with_notes, with_rates

ROOT = Path(__file__).resolve().parents[3]
GRACE_S = 90  # seconds that the last case may run after --minutes have passed
HOST = 0.9  # largest predicted use of host memory / host memory; larger cases are skipped

DEFAULTS = StepOptions()
OPTIONS = {
    "set": Option([], help="KEY=VALUE of the recipe, for all cases"),
    "steps": Option(DEFAULTS.steps, 1, "largest number of timed steps"),
    "seconds": Option(DEFAULTS.seconds, 5.0, "no step begins after this many seconds"),
    "limit": Option(400.0, help="time limit of a case in seconds"),
    "kernels": Option(",".join(DEFAULTS.kernels), help="attention kernels; the roofline uses their best rates"),
    "peak_tflops": Option(DEFAULTS.peak_tflops, help="peak TFLOP/s of the device, dense bf16"),
    "memory": Option(None, help="GiB that torch may allocate on the device; default: all", read=float),
    "host_gib": Option(None, help="host memory in GiB; default: that of the machine", read=float),
    "try_all": Option(False, help="also run cases that are predicted not to fit"),
}


def validate(options: argparse.Namespace) -> None:
    """Checks the options, and sets `work`, the options that the process of a case receives.  Raises ValueError."""
    kernels = tuple(options.kernels.split(","))
    if unknown := sorted({*kernels} - {*DEFAULTS.kernels}):
        raise ValueError(f"--kernels {', '.join(unknown)}: expected some of {', '.join(DEFAULTS.kernels)}")
    if options.steps < 1 or not options.seconds > 0:
        raise ValueError("--steps must be at least 1, and --seconds above 0")
    options.work = StepOptions(
        device="cpu" if options.device == "cpu" else "cuda", steps=options.steps, seconds=options.seconds,
        overrides=tuple(options.set), kernels=kernels, peak_tflops=options.peak_tflops, memory_gib=options.memory,
    )  # fmt: skip


def measured(case: StepCase, options: argparse.Namespace, *, only_fits: bool = False) -> Row:
    """The row of a case.  If nothing was measured, its status gives the reason."""
    work: StepOptions = replace(options.work, only_fits=only_fits)
    row: Row = {"step": str(case)}
    seconds_left = options.ends_at - time.monotonic()
    if seconds_left < 0:
        return {**row, "status": f"not started: {options.minutes:g} minutes have passed"}
    if case.recompute != "peer":
        estimate = case.estimate(work.device, also=work.overrides)
        row |= {"by_equations": estimate.device, "host_by_equations": estimate.host}
        if not options.try_all and not only_fits and (lack := _lack(estimate, options)):
            return {**row, "status": f"skipped: {lack}; --try-all runs it"}
    limit_s = min(options.limit, seconds_left + GRACE_S)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    with tempfile.TemporaryDirectory(prefix="bench-step-") as folder:
        result = Path(folder) / "row.json"
        command = [sys.executable, "-m", "tools.bench.steps.process", str(case), str(result), json.dumps(asdict(work))]
        try:
            process = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {**row, "status": f"stopped after {limit_s:.0f} s"}
        if process.returncode or not result.exists():
            lines = process.stderr.strip().splitlines() or ["no message"]
            return {**row, "status": f"failed: {lines[-1]}", "error": process.stderr[-4000:]}
        return {**row, **json.loads(result.read_text(encoding="utf-8"))}


def memory_of(options: argparse.Namespace) -> tuple[float, float]:
    """GiB of the device (0: unknown) and of the host.  --memory and --host-gib override the sizes of the machine."""
    device_gib = options.memory or 0.0
    if not device_gib and options.device.type == "cuda":
        device_gib = torch.cuda.get_device_properties(options.device).total_memory / 2**30
    return device_gib, options.host_gib or psutil.virtual_memory().total / 2**30


def _lack(estimate: Memory, options: argparse.Namespace) -> str | None:
    """The memory that a case is predicted to lack; None if it may fit."""
    device_gib, host_gib = memory_of(options)
    least = estimate.static + estimate.layers  # every step needs these
    if device_gib and least > device_gib * 2**30:
        return f"needs at least {least / 2**30:.0f} GiB, and the device has {device_gib:.0f} GiB"
    if estimate.host > HOST * host_gib * 2**30:  # pinned memory cannot be swapped out
        return f"needs {estimate.host / 2**30:.0f} GiB of host memory, and the host has {host_gib:.0f} GiB"
    return None


def child(case: StepCase, work: StepOptions) -> Row:
    """Runs in the new process.  Returns the row that it measures."""
    start = time.monotonic()
    config = case.using().config(work.device, also=work.overrides)
    environment.prepare(config, Layout.resolve(config, 1))  # before the next import, which may start CUDA

    from tools.bench.steps import trainer, transformers_peer

    try:
        _limit_memory(case, work)
        row = (transformers_peer if case.recompute == "peer" else trainer).measure(case, work)
        row |= {"status": DONE, "device": work.device}
        if work.only_fits:
            return row
        row["shares"] = shares(row.pop("events"), row["profiled_s"])
        if row["shares"]:
            row["shares"]["data"] = row["data_wait_s"] / row["seconds"]
        return with_notes(with_rates(case, row, work.peak_tflops))
    except torch.OutOfMemoryError as error:
        gib = torch.cuda.max_memory_allocated() / 2**30
        seconds = time.monotonic() - start
        return {"status": f"out of memory at {gib:.1f} GiB, after {seconds:.0f} s", "error": str(error)}


def _limit_memory(case: StepCase, work: StepOptions) -> None:
    """Limits the memory to --memory.  On a CPU, raises an out-of-memory error if the predicted memory is larger."""
    if work.memory_gib is None:
        return
    if work.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, work.memory_gib * 2**30 / total))
    elif case.estimate("cpu", also=work.overrides).device > work.memory_gib * 2**30:
        raise torch.OutOfMemoryError(f"--memory {work.memory_gib:g}")


def main(name: str, result: str, options: str) -> None:
    values = json.loads(options)
    work = StepOptions(**{**values, "overrides": tuple(values["overrides"]), "kernels": tuple(values["kernels"])})
    Path(result).write_text(json.dumps(child(StepCase.read(name), work)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
