"""What the four benchmarks of whole steps share: their options and their columns."""

import argparse

from tools.bench.harness import Column, Row
from tools.bench.steps.loop import StepOptions

GIB = 2**30
STEP_COLUMNS = [
    Column(key="steps", title="steps"),
    Column(key="step_s", title="s/step", spec=".3f"),
    Column(key="tokens_per_s", title="tokens/s", spec=",.0f"),
    Column(key="tflops", title="TFLOP/s", spec=".1f"),
    Column(key="mfu", title="MFU", spec=".1%"),
    Column(key="peak_bytes", title="GiB", spec=".1f", unit=GIB),
    Column(key="by_equations", title="by eq.", spec=".1f", unit=GIB),
    Column(key="host_bytes", title="host", spec=".1f", unit=GIB),
    Column(key="of_keep", title="of keep", spec=".1%"),
    Column(key="of_full", title="of full", spec=".1%"),
]
TINY = {"steps": 1, "seconds": 5.0}


def arguments(parser: argparse.ArgumentParser) -> None:
    defaults, add = StepOptions(), parser.add_argument
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a recipe key, of all cases")
    add("--steps", type=int, default=defaults.steps, metavar="N", help="timed steps at most")
    add("--seconds", type=float, default=defaults.seconds, help="no further step is timed after so many")
    add("--limit", type=float, default=400.0, metavar="SECONDS", help="of one case")
    add("--kernels", default=",".join(defaults.kernels), help="of attention, whose best rates the floors take")
    add("--peak-tflops", type=float, default=defaults.peak_tflops, help="of the device, dense bf16")
    add("--memory", type=float, metavar="GIB", help="that torch may take of the device; all by default")
    add("--host-gib", type=float, metavar="GIB", help="memory of the host; what the machine has by default")
    add("--try-all", action="store_true", help="also cases that by arithmetic cannot fit")


def validate(options: argparse.Namespace) -> None:
    """Raises ValueError.  `work` of the options is what a case's own process gets."""
    defaults, kernels = StepOptions(), tuple(options.kernels.split(","))
    if unknown := sorted({*kernels} - {*defaults.kernels}):
        raise ValueError(f"--kernels {', '.join(unknown)}: of {', '.join(defaults.kernels)}")
    if options.steps < 1 or not options.seconds > 0:
        raise ValueError("--steps and --seconds: nothing to measure")
    options.work = StepOptions(
        device="cpu" if options.device == "cpu" else "cuda", steps=options.steps, seconds=options.seconds,
        overrides=tuple(options.set), kernels=kernels, peak_tflops=options.peak_tflops, memory_gib=options.memory,
    )  # fmt: skip


def with_notes(row: Row) -> Row:
    """The row with seconds a step, and its constants and shares as text."""
    if "constants" not in row or "seconds" not in row:
        return row
    constants = row["constants"]
    rates = [f"{n} {r['forward'] / 1e12:.0f} / {r['backward'] / 1e12:.0f}" for n, r in constants["attention"].items()]
    notes = [row["backend"], f"product {constants['gemm'] / 1e12:.0f} TFLOP/s; attention {', '.join(rates)}"]
    notes += [f"{n} {constants[n] / 1e9:,.0f} GB/s" for n in ("copy", "to device", "to host") if n in constants]
    notes += [f"no {name} ({why})" for name, why in constants["attention not run"].items()]
    shares = ", ".join(f"{name} {share:.1%}" for name, share in row["shares"].items())
    return {**row, "step_s": row["seconds"] / row["steps"], "notes": ["; ".join(notes), *filter(None, [shares])]}
