"""What the four benchmarks of whole steps share: their options and their columns."""

import argparse

from tools.bench.harness import Option
from tools.bench.results import Column
from tools.bench.steps.loop import StepOptions

GIB = 2**30
STEP_COLUMNS = [
    Column("steps", "steps"),
    Column("step_s", "s/step", ".3f"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("tflops", "TFLOP/s", ".1f"),
    Column("mfu", "MFU", ".1%"),
    Column("peak_bytes", "GiB", ".1f", GIB),
    Column("by_equations", "by eq.", ".1f", GIB),
    Column("host_bytes", "host", ".1f", GIB),
    Column("of_keep", "of keep", ".1%"),
    Column("of_full", "of full", ".1%"),
]
DEFAULTS = StepOptions()
OPTIONS = {
    "set": Option([], help="KEY=VALUE of the recipe, of all cases"),
    "steps": Option(DEFAULTS.steps, 1, "timed at most"),
    "seconds": Option(DEFAULTS.seconds, 5.0, "no further step is timed after so many"),
    "limit": Option(400.0, help="seconds of one case"),
    "kernels": Option(",".join(DEFAULTS.kernels), help="of attention, whose best rates the floors take"),
    "peak_tflops": Option(DEFAULTS.peak_tflops, help="of the device, dense bf16"),
    "memory": Option(None, help="GiB that torch may take of the device; all by default", read=float),
    "host_gib": Option(None, help="memory of the host; what the machine has by default", read=float),
    "try_all": Option(False, help="also cases that by arithmetic cannot fit"),
}


def validate(options: argparse.Namespace) -> None:
    """Raises ValueError.  `work` of the options is what a case's own process gets."""
    kernels = tuple(options.kernels.split(","))
    if unknown := sorted({*kernels} - {*DEFAULTS.kernels}):
        raise ValueError(f"--kernels {', '.join(unknown)}: of {', '.join(DEFAULTS.kernels)}")
    if options.steps < 1 or not options.seconds > 0:
        raise ValueError("--steps and --seconds: nothing to measure")
    options.work = StepOptions(
        device="cpu" if options.device == "cpu" else "cuda", steps=options.steps, seconds=options.seconds,
        overrides=tuple(options.set), kernels=kernels, peak_tflops=options.peak_tflops, memory_gib=options.memory,
    )  # fmt: skip
