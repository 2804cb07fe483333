"""Sorts tokens by expert and back without atomic additions, for runs without Transformer Engine's fused permutation.

    sort      row r of the sorted tokens is a copy of its token
    combine   a token's output is the sum of its rows, one row for each of its experts

The backward pass of each operation is the other operation, on gradients.  On CUDA, core sums the rows of a token by
atomic additions in bf16: the order is random, and each addition rounds.  Here, each token has a list of its rows, by
increasing number of the expert.  So the sum has a fixed order.  It is in fp32, and is rounded once.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.jit import jit_fuser
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from sft.mcore.wide import wide_dtype


class Dispatcher(MoEAlltoAllTokenDispatcher):
    """megatron-core's dispatcher with the permutation of this module.

    `reversed_local_input_permutation_mapping`, core's name, holds the `Permutation` of the current microbatch.
    """

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Sort tokens: hidden_states [t, 1, h], routing_map bool [t, experts], probs [t, experts]
        -> rows [n, h], weights [n].
        """
        self.hidden_shape, self.probs, self.routing_map = hidden_states.shape, probs, routing_map
        tokens = hidden_states.view(-1, self.hidden_shape[-1])
        self.tokens_per_expert = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", self.tokens_per_expert)
        self.hidden_shape_before_permute = tokens.shape
        permutation = Permutation.of(routing_map, self.config.moe_router_topk, int(self.num_out_tokens))
        self.reversed_local_input_permutation_mapping = permutation
        return _Sort.apply(tokens, permutation), permutation.weights(probs)

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Sum the rows of each token: [n, h] -> [t, 1, h]."""
        permutation = self.reversed_local_input_permutation_mapping
        output: Tensor = _Combine.apply(permutated_local_input_tokens, permutation)
        return output.view(self.hidden_shape)


@dataclass(frozen=True)
class Permutation:
    """The positions of the copies of t tokens among n rows that are sorted by expert.

    rows      int64 [k, t], the rows of each token's copies, by increasing number of the expert; -1 after the last copy
    elements  int64 [n], for each row: token * number of experts + expert
    """

    rows: Tensor
    elements: Tensor
    num_experts: int

    @classmethod
    def of(cls, routing_map: Tensor, top_k: int, num_rows: int) -> "Permutation":
        """The permutation of a microbatch.

        routing_map: bool [t, experts], whether a token is sent to an expert; top_k: the most experts of a token
        num_rows: n, the number of true elements of routing_map
        """
        t, num_experts = routing_map.shape
        number = routing_map.T.reshape(-1).cumsum(0).view(-1, t).T  # 1 + the row of each true element
        experts = routing_map.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :top_k]
        rows = torch.where(routing_map, number - 1, -1).gather(1, experts).T.contiguous()
        targets = torch.where(rows < 0, num_rows, rows).view(-1)
        elements = experts.T + num_experts * torch.arange(t, device=rows.device)
        by_row = targets.new_empty(num_rows + 1).scatter_(0, targets, elements.reshape(-1))
        return cls(rows, by_row[:num_rows], num_experts)

    @property
    def source(self) -> Tensor:
        """The token of each row, int64 [n]."""
        return self.elements // self.num_experts

    def weights(self, probs: Tensor) -> Tensor:
        """probs [t, experts] -> the weight of each row, [n]"""
        return probs.reshape(-1).index_select(0, self.elements)


def sums_of_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [n, h], rows int64 [k, t] -> [t, h], the sum of each token's rows in fp32, or in float64 for float64 inputs."""
    if not len(x):
        return x.new_zeros(rows.shape[1], x.shape[1])
    output: Tensor = (_compiled_sums if x.is_cuda else _sums)(x, rows)
    return output


def _sums(x: Tensor, rows: Tensor) -> Tensor:
    total = torch.zeros(rows.shape[1], x.shape[1], dtype=wide_dtype(x.dtype), device=x.device)
    for of_choice in rows.unbind():
        total = total + torch.where(of_choice[:, None] >= 0, x[of_choice.clamp(min=0)], 0.0)
    return total.to(x.dtype)


_compiled_sums = jit_fuser(_sums)


class _Sort(torch.autograd.Function):
    """tokens [t, h] -> [n, h]"""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, permutation: Permutation) -> Tensor:
        ctx.save_for_backward(permutation.rows)
        return tokens.index_select(0, permutation.source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return sums_of_rows(grad, rows), None


class _Combine(torch.autograd.Function):
    """[n, h] -> [t, h].  Saves only `elements`, which `Permutation.weights` saves as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, permutation: Permutation) -> Tensor:
        ctx.save_for_backward(permutation.elements)
        ctx.num_experts = permutation.num_experts
        return sums_of_rows(x, permutation.rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (elements,) = ctx.saved_tensors
        return grad.index_select(0, elements // ctx.num_experts), None
