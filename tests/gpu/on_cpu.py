"""A plugin of pytest: tests of kernels run on a CPU, so that on a GPU only their numbers can be wrong.

    python -m pytest -p tests.gpu.on_cpu tests/gpu/test_kernels.py

"cuda" becomes "cpu", and torch's flash operators become `plain` and `plain_backward`, which compute what the operators
are documented to compute.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sft.mcore.attention import flash_kernel


def plain(
    query: Tensor, keys: Tensor, values: Tensor, *boundaries: Any, scale: float, num_before: int = -1
) -> tuple[Tensor, Tensor]:
    outs, sums = [], []
    for own, seen in _sequences(boundaries):
        scores = _scores(query[own], keys[seen], scale, num_before)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), _for_each_head(values[seen], query)))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs).to(query.dtype), torch.cat(sums, dim=1)


def plain_backward(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    *boundaries: Any,
    scale: float,
    num_before: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """By the equations of the paper (arXiv:2307.08691), from the given `out` and `lse`: sinks have changed both."""
    dquery, dkeys, dvalues = (torch.zeros_like(x, dtype=torch.float32) for x in (query, keys, values))
    for own, seen in _sequences(boundaries):
        dout, key, value = grad[own].float(), _for_each_head(keys[seen], query), _for_each_head(values[seen], query)
        weights = torch.exp(_scores(query[own], keys[seen], scale, num_before) - lse[:, own, None])
        delta = (dout * out[own].float()).sum(-1).t()[:, :, None]
        dscores = weights * (torch.einsum("qhd,khd->hqk", dout, value) - delta) * scale
        dquery[own] = torch.einsum("hqk,khd->qhd", dscores, key)
        dkeys[seen] = _of_groups(torch.einsum("hqk,qhd->khd", dscores, query[own].float()), keys)
        dvalues[seen] = _of_groups(torch.einsum("hqk,qhd->khd", weights, dout), keys)
    return dquery.to(query.dtype), dkeys.to(keys.dtype), dvalues.to(values.dtype)


def _sequences(boundaries: tuple[Any, ...]) -> list[tuple[slice, slice]]:
    """The queries and the keys of each sequence."""
    queries, keys = (x.tolist() for x in boundaries[:2])
    return [(slice(*queries[i : i + 2]), slice(*keys[i : i + 2])) for i in range(len(queries) - 1)]


def _scores(query: Tensor, keys: Tensor, scale: float, num_before: int) -> Tensor:
    """[heads, queries, keys] of one sequence: causal from the bottom right."""
    distance = torch.arange(len(keys) - len(query), len(keys))[:, None] - torch.arange(len(keys))
    hidden = (distance < 0) | (distance > (num_before if num_before >= 0 else len(keys)))
    scores = torch.einsum("qhd,khd->hqk", query.float(), _for_each_head(keys, query)) * scale
    return scores.masked_fill(hidden, -torch.inf)


def _for_each_head(x: Tensor, query: Tensor) -> Tensor:
    return x.float().repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _of_groups(x: Tensor, keys: Tensor) -> Tensor:
    return x.unflatten(1, (keys.shape[1], -1)).sum(2)


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cuda:
            return args[0]
        named = dict(kwargs or {})
        if named.get("device") == "cuda":
            named["device"] = "cpu"
        return func(*args, **named)


@pytest.fixture(autouse=True)
def _redirected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flash_kernel, "TORCH", flash_kernel.Operators(plain, plain_backward))
    with _OnCpu():
        yield
