"""Compares every attention implementation with sdpa, and replaces the communication of ranks by copies in memory."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from sft.mcore.attention import key_source
from sft.parallel import context_parallel
from tools.bench import attention_ways as ways
from tools.bench.attention_ways import Pack, Way
from tools.bench.clock import check_close

TOLERANCE = 2e-2  # share of the norm; both results are bf16


@contextmanager
def in_memory_group(p: Pack, cp_size: int) -> Iterator[None]:
    """Collectives of a cp group, replaced by copies in the memory of this device."""
    order = np.concatenate([context_parallel.local_indices(p.boundaries, cp_size, rank) for rank in range(cp_size)])
    both = torch.cat([x.detach() for x in p.tensors[1:3]], dim=-1)[torch.from_numpy(order).to(p.device)]
    work, num_gathers = SimpleNamespace(wait=lambda: None), itertools.count()

    def all_gather_into_tensor(out: Tensor, local: Tensor, group: Any, async_op: bool) -> Any:
        num_heads = local.shape[1]  # heads of a head group; forward and backward gather the groups in order
        first = next(num_gathers) * num_heads % both.shape[1]
        out.copy_(both[:, first : first + num_heads])
        return work

    def reduce_scatter_tensor(local: Tensor, total: Tensor, group: Any, async_op: bool) -> Any:
        local.copy_(total[group.rank() * len(local) : (group.rank() + 1) * len(local)])
        return work

    collectives = SimpleNamespace(
        all_gather_into_tensor=all_gather_into_tensor, reduce_scatter_tensor=reduce_scatter_tensor
    )
    with mock.patch.object(key_source, "dist", collectives):
        yield


def forward(way: Way) -> None:
    with torch.no_grad():
        way()


def backward(way: Way) -> None:
    out, gradient = way()
    out.backward(gradient)


def check(p: Pack, cp_sizes: Sequence[int], names: Sequence[str]) -> dict[str, str]:
    """The ways that cannot compute these documents, with reasons.  Raises Refused if a result differs from sdpa's."""
    expected = list(_results(ways.by_sdpa(p), p.tensors).values())
    refusals: dict[str, str] = {}
    for name in names:
        if name in ("flash", "sdpa"):
            continue
        try:
            check_close(name, _results(ways.whole(p, name), p.tensors), expected, TOLERANCE)
        except ways.REFUSALS as error:
            if not ways.is_refusal(name, error):
                raise
            refusals[name] = ways.reason(error)
            for x in p.tensors[:3]:
                x.grad = None
    for cp_size in cp_sizes if "flash" in names else ():
        with in_memory_group(p, cp_size):
            for rank in range(cp_size):
                way, inputs, indices = ways.by_flash(p, cp_size, rank)
                share = [x[torch.from_numpy(indices).to(p.device)] for x in expected]
                check_close(f"flash, cp {cp_size}, rank {rank}", _results(way, inputs), share, TOLERANCE)
    return refusals


def _results(way: Way, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """The output and the gradient of the queries.  Clears all gradients."""
    out, gradient = way()
    out.backward(gradient)
    dquery = inputs[0].grad
    assert dquery is not None
    for x in inputs[:3]:
        x.grad = None
    return {"the output": out.detach(), "the gradient of the queries": dquery}
