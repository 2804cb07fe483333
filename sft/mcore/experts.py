"""The mixture of experts: routing, the losses that balance the load of experts, and statistics of the load.

megatron-core selects experts, sends tokens and computes.  The balancing losses are ours, because core's depend on the
layout: they are taken over the tokens of a microbatch, which packing composes differently for every number of
data-parallel ranks, and up to core 0.16 their weight is too low under context parallelism.  Here each document is
balanced by itself, on whichever ranks its tokens are, so no document's gradient depends on what it is packed with:

    aux  of a document and a layer: E * sum over experts of (share of choices) * (mean probability); 1 is even
    z    of a token and a layer: the squared log-sum-exp of its scores

    the mean loss gets  aux_loss_coef * sum over layers of the mean over real tokens of their document's aux
                      + z_loss_coef * sum over layers of the mean of z over real tokens

Padding tokens are all alike, so they are sent to all experts in turn, with a weight of 0, and are not counted; with a
capacity they are not sent.  Evaluation, and the first forward pass of recomputed layers, are not counted.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping, topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from sft.metrics.totals import ExpertLoad

_AUX, _Z, _DROPPED, _TOKENS = range(4)  # columns of `Router.totals`, behind one for each expert
_BLOCK = 1 << 14  # tokens whose probabilities are float64 at once: 16 MiB for 128 experts


class ExpertLayer(MoELayer):
    """Core's layer, with the document of each token passed to its router.

    padding_mask is the only per-token argument that core passes to experts through pipeline stages, sequence
    parallelism and recomputation.  Here it holds document numbers, int32 [1, t], -1 for padding; core's own `forward`
    would convert them to booleans.
    """

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """[t, 1, h] -> [t, 1, h], and no bias."""
        assert padding_mask is not None and intermediate_tensors is None
        weights, chosen = self.router(hidden_states, padding_mask)
        sent, weights = self.preprocess(hidden_states, weights, chosen)
        output, _ = self.routed_experts_compute(*self.dispatch(sent, weights))
        combined: Tensor = self.postprocess(self.combine(output), None)
        return combined, None


class Router(TopKRouter):
    """Computes scores and weights in fp32, selects `moe_router_topk` experts, and adds the balancing losses."""

    def __init__(self, config: TransformerConfig, **core: Any) -> None:
        super().__init__(config=config, **core)
        self.loss_scale, self.max_documents = 1.0, 0  # of the step, see `begin`
        self.totals: Tensor | None = None  # float64 [experts + 4], of this rank and step

    def forward(self, input: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        """input [t, 1, h], documents int32 [1, t], -1 for padding -> weight of each expert for each local token, 0 for
        those not chosen; and which are chosen; both [t, experts]."""
        logits: Tensor = _Scores.apply(input.view(-1, input.shape[-1]), self.weight)
        weights, chosen = topk_routing_with_score_function(
            logits, self.topk, use_pre_softmax=self.config.moe_router_pre_softmax
        )
        documents = documents.view(-1)
        real = (documents >= 0)[:, None]
        weights, chosen = weights * real, chosen & real
        if self.config.moe_expert_capacity_factor is not None:
            weights, sent = apply_router_token_dropping(
                weights, chosen, self.topk, self.config.moe_expert_capacity_factor
            )
        else:
            sent = chosen | self._in_turn(len(documents), chosen.device) & ~real
        if self.training and torch.is_grad_enabled():
            self._add(slice(self.num_experts), chosen.sum(0))
            self._add(_DROPPED, (chosen & ~sent).sum())
            self._add(_TOKENS, real.sum())
            weights = self._balanced(weights, logits, chosen, documents)
        return weights, sent

    def _in_turn(self, num_tokens: int, device: torch.device) -> Tensor:
        """bool [tokens, experts]: the first token to the first experts, the second to the next."""
        first = torch.arange(num_tokens, device=device)[:, None] * self.topk
        experts = torch.arange(self.num_experts, device=device)[None, :]
        return (experts - first) % self.num_experts < self.topk

    def _balanced(self, weights: Tensor, logits: Tensor, chosen: Tensor, documents: Tensor) -> Tensor:
        """`weights`, with the gradients of those balancing losses that have a coefficient attached."""
        aux_coef, z_coef = self.config.moe_aux_loss_coeff, self.config.moe_z_loss_coeff
        with torch.set_grad_enabled(bool(z_coef)):
            z = (torch.logsumexp(logits, -1).square() * (documents >= 0)).sum()
        self._add(_Z, z)
        if z_coef:
            weights = _Attach.apply(weights, z, z_coef * self.loss_scale)
        if aux_coef:
            aux = self._aux(logits.softmax(-1), chosen, documents)
            self._add(_AUX, aux)
            weights = _Attach.apply(weights, aux, aux_coef * self.loss_scale)
        return weights

    def _aux(self, probabilities: Tensor, chosen: Tensor, documents: Tensor) -> Tensor:
        rows = documents + 1  # of the table; row 0 is padding, which is left out
        table = probabilities.new_zeros(self.max_documents + 1, self.num_experts)
        choices = table.index_add(0, rows, chosen.to(table.dtype))  # exact up to 2^24 tokens of a document
        dist.all_reduce(choices, group=self.tp_cp_group)  # cp and sequence parallelism cut documents
        share = choices / choices.sum(1, keepdim=True).clamp(min=1.0)
        probability: Tensor = _SumOfRows.apply(probabilities, rows, len(table))
        return self.num_experts * (share * probability)[1:].sum()

    def _add(self, where: int | slice, value: Tensor) -> None:
        if self.totals is None:
            self.totals = torch.zeros(self.num_experts + 4, dtype=torch.float64, device=value.device)
        self.totals[self.num_experts + where if isinstance(where, int) else where] += value.detach()


class _Scores(torch.autograd.Function):
    """Tokens [t, h] and router's weight [experts, h] -> scores [t, experts] in fp32 at least.

    Saves both in their own type: autograd would save an fp32 copy of the tokens in every layer.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        wide = torch.promote_types(tokens.dtype, torch.float32)
        return tokens.to(wide) @ weight.to(wide).T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        tokens, weight = ctx.saved_tensors
        return (grad @ weight.to(grad.dtype)).to(tokens.dtype), (grad.T @ tokens.to(grad.dtype)).to(weight.dtype)


class _SumOfRows(torch.autograd.Function):
    """Numbers [t, experts] -> float64 [rows, experts]: row i is the sum of those whose `index` [t] is i.

    index_add takes the tokens of a document one after another: in fp32 the sum of 131,072 is 2e-5 off, that of a
    million 9e-4.
    """

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, index: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.dtype = numbers.dtype
        total = numbers.new_zeros(num_rows, numbers.shape[1], dtype=torch.float64)
        for part, rows in zip(numbers.split(_BLOCK), index.split(_BLOCK)):
            total.index_add_(0, rows, part.double())
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return grad.to(ctx.dtype)[index], None, None


class _Attach(torch.autograd.Function):
    """Returns `through`; in backward `loss` counts as part of the objective, with weight `scale`."""

    @staticmethod
    def forward(ctx: Any, through: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.of_loss = torch.full_like(loss, scale)
        return through.view_as(through)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.of_loss, None


def begin(chunks: Iterable[torch.nn.Module], *, loss_scale: float, max_documents: int) -> None:
    """Before each step.  max_documents: most of any pack; the same on the ranks that share a pack

    loss_scale: weight of a sum over real tokens in the objective, which is a sum that will be divided
    """
    for router in _routers(chunks):
        router.loss_scale, router.max_documents, router.totals = loss_scale, max_documents, None


def load(chunks: Iterable[torch.nn.Module], num_layers: int, num_experts: int, device: torch.device) -> ExpertLoad:
    """What all ranks saw since `begin`.  Collective over all: one exchange of layers x (experts + 4) numbers."""
    table = torch.zeros(num_layers, num_experts + 4, dtype=torch.float64, device=device)
    for router in _routers(chunks):
        if router.totals is not None:
            table[router.layer_number - 1] = router.totals
    dist.all_reduce(table)
    totals = table.cpu().numpy()
    chosen, rest = totals[:, :num_experts], totals[:, num_experts:]
    tokens = np.maximum(rest[:, _TOKENS], 1.0)
    return ExpertLoad(chosen=chosen, dropped=rest[:, _DROPPED], aux=rest[:, _AUX] / tokens, z=rest[:, _Z] / tokens)


def _routers(chunks: Iterable[torch.nn.Module]) -> Iterator[Router]:
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, Router))
