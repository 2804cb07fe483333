"""The mixture of experts: routing, the losses that balance the load of experts, and statistics of the load.

megatron-core selects experts, sends tokens to them and computes their outputs.  This module computes the balancing
losses, because core's losses depend on the layout: core averages over a microbatch, and every number of data-parallel
ranks has other microbatches.  Up to core 0.16, context parallelism also lowers the weight of core's losses.  Here, a
loss is an average over a document on all ranks, so the gradient of a document does not depend on its pack:

    aux  of a document and a layer: E * sum over experts of (share of choices) * (mean probability); balanced: 1
    z    of a token and a layer: the squared log-sum-exp of the token's scores

    added to the mean loss  aux_loss_coef * sum over layers of the mean over real tokens of their document's aux
                          + z_loss_coef * sum over layers of the mean of z over real tokens

Padding tokens would all choose the same experts, so they go to all experts in turn, with weight 0.  With a capacity,
padding tokens are not sent.  Statistics leave out padding, evaluation, and the first forward pass of recomputed layers.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.extensions.transformer_engine import te_checkpoint
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping, topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from sft.mcore.activations.recompute import recomputed
from sft.mcore.gated_activation import GatedActivation
from sft.mcore.grouped_experts import layer_by_layer
from sft.metrics.totals import ExpertLoad

_AUX, _Z, _DROPPED, _TOKENS = range(4)  # columns of `Router.totals`, after one column per expert
_BLOCK = 1 << 14  # tokens whose probabilities are converted to float64 at a time: 16 MiB for 128 experts


class ExpertLayer(MoELayer):
    """Core's layer, with the document of each token passed to its router.

    padding_mask holds document numbers, int32 [1, t], -1 for padding: it is the only per-token argument that core
    passes to experts through pipeline stages, sequence parallelism and recomputation.  Core's own `forward` would
    convert the numbers to booleans.

    recompute: backward recomputes the experts from the tokens that they have received.  The tokens are not sent again,
    and the host does not wait again for the number of tokens of each expert.
    activation: arguments of GatedActivation; empty: core's SwiGLU
    """

    experts: Any

    def __init__(
        self, *args: Any, recompute: bool = False, activation: Mapping[str, Any] = MappingProxyType({}), **core: Any
    ) -> None:
        super().__init__(*args, **core)
        self._recompute = recompute
        if activation:
            self.experts = layer_by_layer(self.experts, GatedActivation(**activation))

    @property
    def _recomputes(self) -> bool:
        return self._recompute and self.training

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """[t, 1, h] -> [t, 1, h], and no bias."""
        assert padding_mask is not None and intermediate_tensors is None
        shared = None if self.shared_experts is None else self._compute_shared(hidden_states)
        weights, chosen = self.router(hidden_states, padding_mask)
        sent, weights = self.preprocess(hidden_states, weights, chosen)
        tokens, counts, weights = self.token_dispatcher.dispatch_postprocess(*self.dispatch(sent, weights))
        output = self.token_dispatcher.combine_preprocess(self._compute(tokens, counts, weights))
        combined: Tensor = self.postprocess(self.combine(output), shared)
        return combined, None

    def _compute_shared(self, tokens: Tensor) -> Tensor:
        """The output of the shared expert, [t, 1, h] -> [t, 1, h].  It is a dense MLP, which tp splits."""
        output: Tensor
        shared = self.shared_experts
        if not self._recomputes:
            output = shared(tokens)
        elif self.config.fp8:
            output = te_checkpoint(shared, False, tensor_parallel.random.get_cuda_rng_tracker, self.tp_group, tokens)
        else:
            output = recomputed(shared, tokens, shared.parameters())
        return output

    def _compute(self, tokens: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        """tokens [n, h] that this rank has received, sorted by expert; counts [experts]; weights [n] -> [n, h]"""
        output: Tensor
        if not self._recomputes:
            output, _ = self.experts(tokens, counts, weights)
        elif self.config.fp8:  # Transformer Engine's checkpoint restores the first pass's scales
            tracker = tensor_parallel.random.get_cuda_rng_tracker
            output, _ = te_checkpoint(self.experts, False, tracker, self.tp_group, tokens, counts, weights)
        else:
            parameters = self.experts.parameters()
            output = recomputed(lambda rows: self.experts(rows, counts, weights)[0], tokens, [weights, *parameters])
        return output


class Router(TopKRouter):
    """Computes scores and weights in fp32, selects `moe_router_topk` experts, and adds the balancing losses."""

    has_bias: ClassVar[bool] = False  # a bias on the scores

    def __init__(self, config: TransformerConfig, **core: Any) -> None:
        super().__init__(config=config, **core)
        if self.has_bias:
            self.bias = torch.nn.Parameter(self.weight.new_zeros(self.num_experts))
            self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.loss_scale = 1.0  # argument of `begin` for the current step
        self.pack: tuple[int, dist.ProcessGroup | None] = (0, None)  # set by the layer, see `Layer.forward`
        self.totals: Tensor | None = None  # float64 [experts + 4], of this rank and step

    def forward(self, input: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        """input [t, 1, h], documents int32 [1, t], -1 for padding -> weights and choices of local tokens.

        Both are [t, experts].  An expert that a token has not chosen has weight 0.
        """
        logits: Tensor = _Scores.apply(input.view(-1, input.shape[-1]), self.weight, self.bias)
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
        """bool [tokens, experts]: the first token chooses the first top_k experts, the second the next top_k, ..."""
        first = torch.arange(num_tokens, device=device)[:, None] * self.topk
        experts = torch.arange(self.num_experts, device=device)[None, :]
        return (experts - first) % self.num_experts < self.topk

    def _balanced(self, weights: Tensor, logits: Tensor, chosen: Tensor, documents: Tensor) -> Tensor:
        """`weights`, to which the balancing losses with a coefficient are attached for backward."""
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
        num_documents, cp_members = self.pack
        rows = documents + 1  # row of each token in the table; row 0 collects padding and is ignored
        table = probabilities.new_zeros(num_documents + 1, self.num_experts)
        choices = table.index_add(0, rows, chosen.to(table.dtype))  # exact up to 2^24 tokens of a document
        for group in (self.tp_group, cp_members):  # sequence parallelism and cp split documents over ranks
            if group is not None and group.size() > 1:
                dist.all_reduce(choices, group=group)
        share = choices / choices.sum(1, keepdim=True).clamp(min=1.0)
        probability: Tensor = _SumOfRows.apply(probabilities, rows, len(table))
        return self.num_experts * (share * probability)[1:].sum()

    def _add(self, where: int | slice, value: Tensor) -> None:
        if self.totals is None:
            self.totals = torch.zeros(self.num_experts + 4, dtype=torch.float64, device=value.device)
        self.totals[self.num_experts + where if isinstance(where, int) else where] += value.detach()


class BiasedRouter(Router):
    has_bias = True


class _Scores(torch.autograd.Function):
    """Tokens [t, h], router's weight [experts, h] and bias [experts] -> scores [t, experts], in fp32 or float64.

    Saves tokens and weight in their own dtype.  Autograd would save an fp32 copy of the tokens in every layer.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        wide = torch.promote_types(tokens.dtype, torch.float32)
        scores = tokens.to(wide) @ weight.to(wide).T
        return scores if bias is None else scores + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        tokens, weight = ctx.saved_tensors
        _, trains_weight, trains_bias = ctx.needs_input_grad
        dweight = (grad.T @ tokens.to(grad.dtype)).to(weight.dtype) if trains_weight else None
        dbias = grad.sum(0).to(ctx.bias_dtype) if trains_bias else None
        return (grad @ weight.to(grad.dtype)).to(tokens.dtype), dweight, dbias


class _SumOfRows(torch.autograd.Function):
    """Numbers [t, experts] -> float64 [rows, experts]: row i is the sum of the rows whose `index` [t] is i.

    index_add adds the tokens of a document one after another.  In fp32 the sum over 131,072 tokens is 2e-5 off, and the
    sum over a million tokens 9e-4.
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
    """Returns `through`.  In backward, `loss` is a term of the objective with weight `scale`."""

    @staticmethod
    def forward(ctx: Any, through: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.of_loss = torch.full_like(loss, scale)
        return through.view_as(through)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.of_loss, None


def reduce_apart(chunk: torch.nn.Module) -> None:
    """Mark experts' weights, so that core reduces their gradients over the ranks that hold copies of them.

    Core marks experts only if ep is above 1.  With ep 1, core treats experts like dense weights, whose tp ranks see the
    same tokens.  The tp ranks of an expert see different tokens, so each rank would keep only a part of the gradient.
    """
    for name, param in chunk.named_parameters():
        if ".experts." in name:  # not in .shared_experts., which tp splits like a dense MLP
            param.allreduce = False  # type: ignore[attr-defined]


def begin(chunks: Iterable[torch.nn.Module], *, loss_scale: float) -> None:
    """Prepare the routers for a step.

    loss_scale: weight of a sum over real tokens in the objective, before the engine divides the gradients
    """
    for router in _routers(chunks):
        router.loss_scale, router.totals = loss_scale, None


def load(chunks: Iterable[torch.nn.Module], num_layers: int, num_experts: int, device: torch.device) -> ExpertLoad:
    """Statistics of all ranks since `begin`.  Collective over all: one all-reduce of layers x (experts + 4) numbers."""
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
