"""`sft plan`: searches for the fastest layouts of a recipe or a model that fit, and prints their memory and time."""

import json
import os
from argparse import Namespace
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

from sft.commands.arguments import count
from sft.commands.output import need_matplotlib, picture_file, print_group, progress
from sft.errors import ConfigError
from sft.estimate.gpus import HOST_GIB

_TOP = 5
# Options that --calibrate does not read.
_OF_PLANS = "model gpus seq_length lengths global_batch_size tokens_per_step tokens price write picture".split()


def add(commands: Any) -> None:
    command = commands.add_parser("plan", help="find the fastest layout that fits, on any machine, without a GPU")
    command.set_defaults(action=plan, parser=command)
    command.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help="settings of the recipe")
    command.add_argument("--model", metavar="M", help="a recipe, a folder, or a name on the hub")
    command.add_argument("--gpus", metavar="N[,N]", help="numbers of GPUs; each is planned")
    command.add_argument("--gpu", metavar="NAME", default="h100", help="type of GPU, such as h200 (default h100)")
    command.add_argument("--gpus-per-node", metavar="N", type=int, default=8, help="GPUs of a node (default 8)")
    about = "network between nodes: ib400 (default), roce200, ..., or the GB/s that a GPU receives"
    command.add_argument("--fabric", metavar="NAME", default="ib400", help=about)
    about = f"memory of a node's host for offloading (default {HOST_GIB:.0f})"
    command.add_argument("--host-gib", metavar="GIB", type=float, default=HOST_GIB, help=about)
    command.add_argument("--seq-length", metavar="N", type=count, help="tokens of a pack; default: those of the recipe")
    about = "lengths of documents: data (those of the recipe), or LENGTH:SHARE,...; default: as long as packs"
    command.add_argument("--lengths", metavar="L", help=about)
    command.add_argument("--lora", action="store_true", help="train LoRA adapters of rank 16")
    batch = command.add_mutually_exclusive_group()
    batch.add_argument("--global-batch-size", metavar="N", type=int, help="packs of a step")
    batch.add_argument("--tokens-per-step", metavar="N", type=int, help="instead; default for a model 1048576")
    about = "tokens of the whole run, such as 2e9, for GPU hours; with --lengths data those of the data"
    command.add_argument("--tokens", metavar="N", type=float, help=about)
    about = "price of an hour of a GPU, such as 2.50, for the cost of a billion tokens and of the run"
    command.add_argument("--price", metavar="P", type=float, help=about)
    command.add_argument("--top", metavar="N", type=int, default=_TOP, help=f"proposals to show (default {_TOP})")
    command.add_argument("--write", metavar="FILE", type=Path, help="write the best proposal as a recipe")
    command.add_argument("--json", action="store_true", help="print one JSON object (docs/how-to/plan.md)")
    command.add_argument(
        "--picture", metavar="FILE", type=Path, help="draw memory and time of the proposals: .png, .svg"
    )
    about = "measure the constants of predictions on this device, a minute; alone or under torchrun"
    command.add_argument("--calibrate", action="store_true", help=about)


def plan(arguments: Namespace) -> int:
    """Run `sft plan`.  Returns 2 if nothing fits on the last number of GPUs, else 0."""
    if arguments.calibrate:
        return _calibrate(arguments)
    counts = _counts(arguments)
    _check_outputs(arguments, counts)

    from sft.api.plans import PlanOptions
    from sft.api.plans import plan as search

    options = PlanOptions(**{field.name: getattr(arguments, field.name) for field in fields(PlanOptions)})
    result = search(arguments.model, counts, options, arguments.overrides)
    reports = result.reports
    if arguments.json:
        print(json.dumps({"version": 1, "numbers_of_gpus": [report.json() for report in reports]}, indent=1))
    else:
        for report in reports:
            for name, lines in report.lines(datetime.now()).items():
                print_group(name, lines)
    if arguments.picture is not None:
        from sft.planner.picture import draw

        with picture_file("--picture", arguments.picture) as temporary:
            draw(reports, temporary)
        progress().say(f"picture {arguments.picture}")
    if arguments.write is not None and reports[0].proposals:
        result.write(arguments.write)
        check = f"sft check {arguments.write} --world-size {counts[0]} --gpu {arguments.gpu}"
        progress().say(f"recipe {arguments.write}; `{check}` shows what it does")
    return 0 if reports[-1].proposals else 2


def _counts(arguments: Namespace) -> list[int]:
    for name in ("model", "gpus"):
        if getattr(arguments, name) is None:
            arguments.parser.error(f"the following arguments are required: --{name}")
    words = arguments.gpus.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"--gpus {arguments.gpus} is no list of numbers of GPUs.  Write --gpus 8 or --gpus 8,64.")
    return [int(word) for word in words]


def _check_outputs(arguments: Namespace, counts: list[int]) -> None:
    """Raise ConfigError if a file cannot be made, before anything is computed."""
    if arguments.write is not None and len(counts) > 1:
        raise ConfigError(f"--write writes one recipe, but --gpus {arguments.gpus} names several sizes.  Give one.")
    if arguments.picture is not None:
        if arguments.picture.suffix not in (".png", ".svg"):
            raise ConfigError(f"--picture {arguments.picture} does not end in .png or .svg.")
        need_matplotlib("--picture")


def _calibrate(arguments: Namespace) -> int:
    """Run `sft plan --calibrate`.  Under torchrun every rank measures, and rank 0 writes and prints."""
    named = [f"--{name.replace('_', '-')}" for name in _OF_PLANS if getattr(arguments, name) is not None]
    if named or arguments.overrides:
        raise ConfigError(
            "--calibrate measures this device for all models, and does not read "
            f"{', '.join([*named, *arguments.overrides])}.  Run sft plan --calibrate first, and then plan."
        )

    from sft.calibration.session import calibrate
    from sft.estimate.constants import path_of, write
    from sft.mcore.device import choose

    calibration = calibrate(choose("auto"))
    if os.environ.get("RANK", "0") == "0":
        path = path_of(calibration.constants.gpu)
        write(calibration.constants, path)
        print_group("measured", [*calibration.describe(), f"kept in {path}"])
    return 0
