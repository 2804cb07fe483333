"""Causal attention over packed documents whose tokens are split over the context-parallel group.

A token attends to itself and to earlier tokens of its document.  With a sliding window of w tokens, it attends to
itself and to the w - 1 tokens before it.  Queries stay on their rank.  A KeySource (key_source.py) gets keys and values
of other ranks: by an all-gather over the group, one head group at a time, or with a window by an exchange of halos.
While a kernel computes one head group, the next one is transferred.  Keys of other ranks are not saved.  Backward gets
them again, and returns their gradients.

A head group is at least 1/4 of the key/value heads, with the query heads that use them (`num_head_groups`).  The kernel
is flash_kernel.py (a flash kernel of a library, on CUDA in bf16) or torch_kernel.py (plain torch, everywhere).

A sink is a learned score of a query head that takes part in the softmax and has no value (gpt-oss, arXiv:2508.10925).
A kernel computes attention without sinks, and this module corrects the result.  The correction is exact:

    share = sigmoid(lse - sink)    out' = out * share    lse' = logaddexp(lse, sink)    d sink = -sum(p (dout . out'))

with p = exp(sink - lse').  The kernel's backward gets out' and lse' instead of out and lse; its equations still hold.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sft.mcore.attention.key_source import KeySource, Transfer
from sft.mcore.attention.rope import Rotation

SINK_TOKENS = 4096  # tokens whose outputs and gradients are converted to fp32 at a time


class AttentionKernel(Protocol):
    """Attention of this rank's queries in one microbatch to the keys that `key_source` gets."""

    @property
    def key_source(self) -> KeySource: ...

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attention of one head group: query [t, heads, d], keys and values [k, key heads, d]
        -> out [t, heads, d], log-sum-exp [heads, t].

        Values may have another width than keys; `out` is as wide as values.
        """

    def backward(
        self, grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, keys and values.  Only this rank's queries contribute to those of keys and values."""


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: AttentionKernel,
    scale: float,
    cp_group: Any,
    rotation: Rotation | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's tokens: query [t, heads, d], key and value [t, key heads, d] -> [t, heads, d].

    Values may have another width than keys; the result is as wide as values.  Collective over cp.
    rotation: applied to queries and keys first; None: no rotation
    sinks: [heads], scores of the sinks; None: no sinks
    """
    out: Tensor = _PackedAttention.apply(query, key, value, sinks, AttentionSetting(kernel, scale, cp_group, rotation))
    return out


class AttentionSetting(NamedTuple):
    """The arguments of attention that have no gradient."""

    kernel: AttentionKernel
    scale: float
    cp_group: Any
    rotation: Rotation | None


class _PackedAttention(torch.autograd.Function):
    """Saves queries and keys before rotation, because a norm may recompute them (`saved_tensors.py`)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        setting: AttentionSetting,
    ) -> Tensor:
        # Copies, because a view would keep the whole output of the projection in memory.
        query, key, value = (x.contiguous() for x in (query, key, value))
        out = query.new_empty((*query.shape[:2], value.shape[-1]))
        ctx.save_for_backward(query, key, value, sinks, out, *attend(query, key, value, sinks, setting, out))
        ctx.setting = setting
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *attend_backward(ctx.saved_tensors, grads[0], ctx.setting), None


def attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, setting: AttentionSetting, out: Tensor
) -> list[Tensor]:
    """Write attention's output to `out` [t, heads, d], and return the log-sum-exp [heads of the group, t] of each head
    group.

    Autograd records nothing; `attend_backward` computes the gradients.  Collective over cp.
    query, key, value, sinks: as in `packed_attention`
    """
    kernel, rotation, sums = setting.kernel, setting.rotation, list[Tensor]()
    num_groups = kernel.key_source.num_groups(key.shape[1])
    gathered = _gathered(_rotated_keys(key, rotation), value, kernel, setting.cp_group, num_groups)
    by_group = (x.chunk(num_groups, dim=1) for x in (_rotated_queries(query, rotation), out))
    for group_query, group_out, group_sinks, (keys, values) in zip(*by_group, _chunks(sinks, num_groups), gathered):
        result, lse = kernel.forward(group_query, keys, values, setting.scale)
        if group_sinks is not None:
            result, lse = _with_sinks(result, lse, group_sinks)
        group_out.copy_(result)
        sums.append(lse)
    return sums


def attend_backward(
    saved: Sequence[Any], grad: Tensor, setting: AttentionSetting
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of query, key, value and sinks; None: there are no sinks.

    saved: query, key, value, sinks, out, and the results of `attend`; grad: the gradient of out
    """
    query, key, value, sinks, out, *sums = saved
    rotation, num_groups = setting.rotation, len(sums)
    dquery = torch.empty_like(query)
    returns, dsinks = _backward_by_group(saved, grad, dquery, setting)
    if rotation is not None:
        dquery = rotation.query_gradient(dquery)
    dkey, dvalue = torch.empty_like(key), torch.empty_like(value)
    for transfer, group_dkey, group_dvalue in zip(returns, dkey.chunk(num_groups, 1), dvalue.chunk(num_groups, 1)):
        dkeys, dvalues = transfer.result()
        group_dkey.copy_(dkeys if rotation is None else rotation.undo(dkeys))
        group_dvalue.copy_(dvalues)
    return dquery, dkey, dvalue, torch.cat(dsinks) if dsinks else None


def _backward_by_group(
    saved: Sequence[Tensor], grad: Tensor, dquery: Tensor, setting: AttentionSetting
) -> tuple[list[Transfer], list[Tensor]]:
    """Compute the gradients of one head group after the other, and write the gradients of queries to `dquery`.

    Returns for each head group the transfer of the gradients of keys and values, and the gradients of sinks.  Gathered
    keys are freed when the function returns.
    """
    query, key, value, sinks, out, *sums = saved
    kernel, rotation, num_groups = setting.kernel, setting.rotation, len(sums)
    returns, dsinks = list[Transfer](), list[Tensor]()
    gathered = _gathered(_rotated_keys(key, rotation), value, kernel, setting.cp_group, num_groups)
    by_group = (x.chunk(num_groups, dim=1) for x in (_rotated_queries(query, rotation), grad, out, dquery))
    for group_query, group_grad, group_out, group_dquery, lse, group_sinks, (keys, values) in zip(
        *by_group, sums, _chunks(sinks, num_groups), gathered
    ):
        result, dkeys, dvalues = kernel.backward(group_grad, group_query, keys, values, group_out, lse, setting.scale)
        group_dquery.copy_(result)
        if group_sinks is not None:
            dsinks.append(_gradient_of_sinks(group_sinks, group_grad, group_out, lse))
        del result, keys, values
        if returns:  # one transfer at a time, because each holds fp32 sums for every token of the pack
            returns[-1].wait()
        returns.append(kernel.key_source.start_return(dkeys, dvalues, len(key), setting.cp_group))
        del dkeys, dvalues  # these tensors are as long as the pack
    return returns, dsinks


def rotated(query: Tensor, key: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Rotated query and key [t, heads, d], for norms between rotation and attention.  Autograd saves nothing."""
    return _Rotated.apply(query, rotation, True), _Rotated.apply(key, rotation, False)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rotation: Rotation, is_query: bool) -> Tensor:
        ctx.undo = rotation.query_gradient if is_query else rotation.undo
        return rotation.apply_to_query(x) if is_query else rotation.apply(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.undo(grads[0]), None, None


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add sinks [heads] to the result of a kernel: out [t, heads, d] and lse [heads, t] -> corrected out and lse."""
    scores = sinks.to(lse.dtype)[:, None]
    share = torch.sigmoid(lse - scores)
    return (out * share.t()[:, :, None]).to(out.dtype), torch.logaddexp(lse, scores)


def _gradient_of_sinks(sinks: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """The gradient of the sinks, [heads], from grad and out [t, heads, d] and lse [heads, t].

    `out` and `lse` include the sinks.  SINK_TOKENS tokens at a time are converted to fp32.
    """
    weights = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    parts = zip(grad.split(SINK_TOKENS), out.split(SINK_TOKENS))
    products = torch.cat([(x.to(lse.dtype) * y.to(lse.dtype)).sum(-1) for x, y in parts])  # [t, heads]
    return -(weights * products.t()).sum(-1).to(sinks.dtype)


def _chunks(sinks: Tensor | None, num_groups: int) -> Sequence[Tensor | None]:
    return [None] * num_groups if sinks is None else sinks.chunk(num_groups)


def _rotated_queries(query: Tensor, rotation: Rotation | None) -> Tensor:
    return query if rotation is None else rotation.apply_to_query(query)


def _rotated_keys(key: Tensor, rotation: Rotation | None) -> Tensor:
    return key if rotation is None else rotation.apply(key)


def _gathered(
    key: Tensor, value: Tensor, kernel: AttentionKernel, cp_group: Any, num_groups: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield keys and values [k, key heads / num_groups, d] in the kernel's order, one head group after the other.

    Collective over cp.  The call starts the first transfer.  When a head group is yielded, the next one is in transfer.
    """
    groups = list(zip(key.chunk(num_groups, dim=1), value.chunk(num_groups, dim=1)))
    first = kernel.key_source.start(*groups[0], cp_group)

    def results(transfer: Transfer) -> Iterator[tuple[Tensor, Tensor]]:
        for group in groups[1:]:
            following = kernel.key_source.start(*group, cp_group)
            yield transfer.result()
            transfer = following
        yield transfer.result()

    return results(first)
