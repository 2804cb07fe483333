"""Options of the benchmarks `step` and `longest`."""

import argparse

from tools.bench.harness import Option
from tools.bench.steps.loop import StepOptions

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
