"""`sft plan --calibrate`: measures the constants of predictions, and keeps them in a file for this type of device."""

import os
from argparse import Namespace

from sft.commands.output import print_group
from sft.errors import ConfigError

_ALONE = (
    "model",
    "gpus",
    "seq_length",
    "lengths",
    "global_batch_size",
    "tokens_per_step",
    "tokens",
    "write",
    "picture",
)


def calibrate(arguments: Namespace) -> int:
    """Run `sft plan --calibrate`.  Under torchrun every rank measures, and rank 0 writes and prints."""
    named = [f"--{name.replace('_', '-')}" for name in _ALONE if getattr(arguments, name) is not None]
    if named or arguments.overrides:
        raise ConfigError(
            "--calibrate measures this device for all models, and does not read "
            f"{', '.join([*named, *arguments.overrides])}.  Run sft plan --calibrate first, and then plan."
        )

    from sft.calibration.session import calibrate as measure
    from sft.estimate.constants import path_of, write
    from sft.mcore.device import choose

    calibration = measure(choose("auto"))
    if os.environ.get("RANK", "0") == "0":
        path = path_of(calibration.constants.gpu)
        write(calibration.constants, path)
        print_group("measured", [*calibration.describe(), f"kept in {path}"])
    return 0
