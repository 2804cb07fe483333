"""A plain attention that replaces Transformer Engine's: it accepts exactly the arguments of core's class, in both
versions of megatron-core.

It gathers keys and values over cp, and computes one document after the other with a matrix of scores.
"""

import ast
import inspect
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import extensions
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from sft.mcore.backends.portable import Portable
from sft.mcore.latent_attention.core_attention import ExpandedKeys


def with_plain_attention(run: Callable[..., Any], *given: Any) -> Any:
    """Runs `run` with the core attention of the te backend, and with the other modules of the portable backend."""
    core_attention = partial(ExpandedKeys, attention=PlainAttention)
    with mock.patch.object(Portable, "latent_attention", core_attention):
        return run(*given)


@cache
def _signature(method: str) -> inspect.Signature:
    """The signature of a method of core's class, read from its source, because an import of the class needs Transformer
    Engine."""
    (folder,) = extensions.__path__
    tree = ast.parse(Path(folder, "transformer_engine.py").read_text())
    (cls,) = (x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == "TEDotProductAttention")
    (function,) = (x for x in cls.body if isinstance(x, ast.FunctionDef) and x.name == method)
    kind, args = inspect.Parameter.POSITIONAL_OR_KEYWORD, function.args
    required = len(args.args) - len(args.defaults)
    assert not (args.kwonlyargs or args.vararg or args.kwarg)
    parameters = [
        inspect.Parameter(arg.arg, kind, default=inspect.Parameter.empty if number < required else None)
        for number, arg in enumerate(args.args)
    ]
    return inspect.Signature(parameters)


class PlainAttention(torch.nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        given = _signature("__init__").bind(self, *args, **kwargs).arguments
        assert given["attn_mask_type"] is AttnMaskType.causal and given["attention_type"] == "self"
        self.widths, self.scale = (given["k_channels"], given["v_channels"]), given["softmax_scale"]
        self.group = given["pg_collection"].cp

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = _signature("forward").bind(self, *args, **kwargs).arguments
        query, key, value, documents = (given[name] for name in ("query", "key", "value", "packed_seq_params"))
        assert given["attention_mask"] is None and given["attn_mask_type"] is AttnMaskType.causal
        assert documents.qkv_format == "thd" and all(x.is_contiguous() for x in (query, key, value))
        assert query.shape == key.shape == (*value.shape[:2], self.widths[0]) and value.shape[-1] == self.widths[1]
        group = documents.cp_group or self.group
        size, rank = (1, 0) if documents.local_cp_size == 1 else (group.size(), group.rank())
        boundaries = documents.cu_seqlens_q.tolist()
        places = torch.cat([_places(boundaries, size, other) for other in range(size)])
        own = _places(boundaries, size, rank)
        if size > 1:
            key, value = (_Gathered.apply(x, group) for x in (key, value))
        key, value = (torch.zeros_like(x).index_copy(0, places, x) for x in (key, value))
        outs = [query.new_zeros(0, *value.shape[1:])]
        for start, end in zip(boundaries, boundaries[1:]):
            is_own = (own >= start) & (own < end)
            scores = torch.einsum("qhd,khd->hqk", query[is_own], key[start:end]) * self.scale
            hidden = own[is_own][:, None] < torch.arange(start, end)[None, :]
            shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", shares, value[start:end]))
        return torch.cat(outs).flatten(1)

    def sharded_state_dict(self, *args: Any) -> dict[str, Any]:
        return {}


def _places(boundaries: list[int], size: int, rank: int) -> Tensor:
    """The positions in the pack of a rank's tokens: for each document two of 2 * size chunks.

    [0, 8], 2, 1 -> 2, 3, 4, 5
    """
    places = []
    for start, end in zip(boundaries, boundaries[1:]):
        chunk = (end - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            places.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
    return torch.cat(places)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        gathered = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(gathered, x.contiguous(), group=group)
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None
