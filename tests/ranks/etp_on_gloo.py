"""Lets etp split experts on the CPU.

The token dispatcher gathers and sums parts of unequal size over etp, which gloo cannot do.  This module sends the parts
one after another.  All other code is megatron-core's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from sft.mcore import process_groups


def run(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), on a rank that can have etp above 1.  Recipes need run.device = auto."""
    with allowed():
        return function(*args)


@contextmanager
def allowed() -> Iterator[None]:
    with (
        mock.patch.object(process_groups, "check_etp", lambda layout, device: None),
        mock.patch.object(dist, "all_gather", _all_gather),
        mock.patch.object(dist, "reduce_scatter", _reduce_scatter),
    ):
        yield


def _all_gather(parts: list[Tensor], own: Tensor, group: Any = None) -> None:
    for source, part in enumerate(parts):
        if source == dist.get_rank(group):
            part.copy_(own)
        dist.broadcast(part, dist.get_global_rank(group, source), group=group)


def _reduce_scatter(own: Tensor, parts: list[Tensor], group: Any = None) -> None:
    for target, part in enumerate(parts):
        total = part.clone()
        dist.all_reduce(total, group=group)
        if target == dist.get_rank(group):
            own.copy_(total)
