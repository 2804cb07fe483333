"""Measures curves, steps or adapters on all ranks that torchrun starts.  Rank 0 writes and prints the rows.

    torchrun --standalone --nproc-per-node 8 -m tools.gpu_hour.ranks curves layouts --json FILE
    torchrun --standalone --nproc-per-node 8 -m tools.gpu_hour.ranks speed 8b:64k:one --set parallel.cp=8 --json FILE
    torchrun --standalone --nproc-per-node 1 -m tools.gpu_hour.ranks adapters 8b:16k:one:none+lora16 --json FILE

curves    losses and gradient norms of a group of curves.py, one curve after the other, on random tokens in documents
          of the mix `chat`; a difference is relative to the first curve of the kind, and is the largest over all steps
speed     time and memory of steps of a case (tools/bench/steps/case.py) on the layout of --set, beside the estimate
adapters  time of each linear layer of a case with adapters, beside the layer without its adapter
"""

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path

from sft.errors import ConfigError
from sft.parallel.layout import Layout
from sft.run import environment
from tools.bench.harness import Column, Table, append
from tools.bench.steps.case import StepCase
from tools.gpu_hour import curves

CURVE_COLUMNS = [
    Column("loss", "last loss", ".6f"),
    Column("loss_error", "losses", ".1e"),
    Column("norm_error", "norms", ".1e"),
]
SPEED_COLUMNS = [
    Column("steps", "steps"),
    Column("step_s", "s/step", ".3f"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("tflops", "TFLOP/s each", ".1f"),
    Column("mfu", "MFU", ".1%"),
    Column("peak_bytes", "GiB", ".1f", 2**30),
    Column("by_equations", "by eq.", ".1f", 2**30),
]


ADAPTER_COLUMNS = [
    Column("base_fwd", "fwd ms", ".3f", 1e-3),
    Column("base_both", "both ms", ".3f", 1e-3),
    Column("fwd_ratio", "with adapter, fwd", ".3f"),
    Column("ratio", "with adapter, both", ".3f"),
]


def prepare(options: argparse.Namespace) -> None:
    """Sets the environment variables of a run on this layout.

    All curves of a group run in the same processes, with the environment of the curve with the largest tp x cp.
    """
    world_size = int(os.environ["WORLD_SIZE"])
    if options.subject != "curves":
        configs = [StepCase.read(options.case).config(options.device, also=options.set)]
    else:
        configs = []
        for name in curves.GROUPS[options.case][world_size]:
            with suppress(ConfigError):  # a curve that this machine cannot compute is no row of the group
                configs.append(curves.config(curves.overrides(name), options.device))
    config = max(configs, key=lambda config: config.parallel.tp * config.parallel.cp)
    environment.prepare(config, Layout.resolve(config, world_size))


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools.gpu_hour.ranks", description=__doc__)
    parser.add_argument("subject", choices=["curves", "speed", "adapters"])
    parser.add_argument("case", help=f"of curves: {', '.join(curves.GROUPS)}; of the others: a case of steps")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the recipe")
    parser.add_argument("--tiny", action="store_true", help="curves of toy sizes")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="append every row to this file")
    options = parser.parse_args()
    prepare(options)

    from tools.gpu_hour import measured  # may start CUDA

    if options.subject == "curves":
        sizes = curves.TINY_SIZES if options.tiny else ()
        columns, rows = CURVE_COLUMNS, measured.curve_rows(options.case, options.device, sizes)
    elif options.subject == "adapters":
        columns, rows = ADAPTER_COLUMNS, measured.adapter_rows(options.case, options.device)
    else:
        columns, rows = SPEED_COLUMNS, measured.speed_rows(options.case, options.set, options.device)
    table, is_first, failed = Table(columns, [options.case]), os.environ["RANK"] == "0", False
    if is_first:
        print(table.head(), flush=True)
    for row in rows:
        failed = failed or row["status"].startswith("failed")
        if is_first:
            append(options.json, row)
            print(table.line(row), flush=True)
    if failed:
        sys.exit("some rows failed")


if __name__ == "__main__":
    main()
