"""Implements routers: they choose the experts and weights of a token, balance the load by losses, and count it.

With softmax scores, megatron-core's function chooses the experts.  With sigmoid scores, this module chooses them, with
a correction bias and groups (DeepSeek-V3, arXiv:2412.19437):

    score   = sigmoid(logit)
    chosen  = the top_k experts by score + correction bias, among those of the best groups
    weight  = scaling_factor * score / (sum of the scores of chosen experts), without the bias

A step adds bias_update_rate * sign(mean - count) to the correction bias of each expert, where count is the number of
real tokens of the global batch that chose the expert.  Counts are whole numbers, so the bias is the same, bit for bit,
on every layout.

Core's balancing losses depend on the layout: core averages over a microbatch, and another number of data-parallel ranks
gives other microbatches.  Up to core 0.16, context parallelism also lowers the weight of these losses.  Here, a loss is
an average over a document on all ranks, so the gradient of a document does not depend on its pack.  In a pack with
trees, each text is a document:

    aux  of a document in a layer: E * sum over the E experts of (share of choices) * (mean probability); balanced: 1
    z    of a token in a layer: the squared log-sum-exp of the token's logits

    added to the mean loss  aux_loss_coef * sum over layers of the mean over real tokens of their document's aux
                          + z_loss_coef * sum over layers of the mean of z over real tokens

With sigmoid scores, a probability is a score divided by the sum of the token's scores, and aux counts the experts with
the top_k scores, without bias and groups.  Shared experts are not chosen and take no part in aux.

Padding tokens would all choose the same experts, so they go to all experts in turn, with weight 0.  With a capacity
(`moe.capacity_factor`) or DeepEP, padding tokens are not sent.  Statistics do not count padding and evaluation.  They
count recomputed layers once.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping, topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from sft.config import ModelConfig, MoeConfig
from sft.mcore.experts.documents import TokenDocuments
from sft.mcore.wide import wide, wide_dtype
from sft.metrics.totals import ExpertLoad

_AUX, _Z, _DROPPED, _TOKENS = range(4)  # columns of `Router.totals`, after one column per expert
_LEAST_SUM = 1e-20  # keeps the weights of scores that are all 0 finite, as in transformers
_BLOCK = 1 << 14  # tokens whose probabilities are converted to float64 at a time: 16 MiB for 128 experts


class Router(TopKRouter):
    """Computes scores and weights in fp32, selects `moe.top_k` experts, and adds the balancing losses."""

    expert_bias: Tensor | None  # the correction bias, a buffer [experts] in fp32; None: the model has none

    def __init__(self, config: TransformerConfig, *, moe: MoeConfig, **core: Any) -> None:
        super().__init__(config=config, **core)
        self._moe = moe
        if moe.router_bias:
            self.bias = torch.nn.Parameter(self.weight.new_zeros(self.num_experts))
            self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if moe.correction_bias:
            del self.expert_bias  # core's name, under which checkpoints hold it
            self.register_buffer("expert_bias", self.weight.new_zeros(self.num_experts, dtype=torch.float32))
        self.adapter: Any = None  # `RouterAdapter`, if LoRA adapts this router
        self.loss_scale = 1.0  # argument of `begin` for the current step
        self.totals: Tensor | None = None  # float64 [experts + 4], statistics of this rank in this step

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move and convert the module as torch does, but keep the correction bias in fp32."""
        bias = self.expert_bias
        super()._apply(*args, **kwargs)
        if bias is not None:
            self.expert_bias = bias.to(self.weight.device)
        return self

    def forward(self, input: Tensor, documents: TokenDocuments) -> tuple[Tensor, Tensor]:
        """Route this rank's tokens: input [t, 1, h] -> weights [t, experts], and bool [t, experts].

        The second result says which tokens are sent to which experts.  An expert that a token has not chosen has weight
        0.
        """
        logits = self._logits(input.view(-1, input.shape[-1]))
        routing = self._scaled(Routing.of(logits, self._moe, self.expert_bias))
        real = documents.is_real[:, None]
        weights, chosen = routing.weights * real, routing.chosen & real
        if self.config.moe_expert_capacity_factor is not None:
            weights, sent = apply_router_token_dropping(
                weights, chosen, self.topk, self.config.moe_expert_capacity_factor
            )
        else:
            sent = chosen | self._in_turn(len(real), chosen.device) & ~real
        if self.training and torch.is_grad_enabled():
            self._add(slice(self.num_experts), documents.count_of(chosen))
            self._add(_DROPPED, documents.count_of(chosen & ~sent).sum())
            self._add(_TOKENS, documents.count_of(real).sum())
            weights = self._balanced(weights, logits, routing, documents)
        return weights, sent

    def _logits(self, tokens: Tensor, scale: Tensor | None = None) -> Tensor:
        """The scores before softmax or sigmoid: [t, h] -> [t, experts].  scale: [h], factors of the tokens; None: 1"""
        # Scaled columns of the weight spare backward a scaled copy of the tokens.
        weight = self.weight if scale is None else self.weight.to(scale.dtype) * scale
        logits: Tensor = _Logits.apply(tokens, weight, self.bias)
        return logits if self.adapter is None else logits + self.adapter(tokens, scale)

    def _scaled(self, routing: "Routing") -> "Routing":
        """Return the routing unchanged; `NormedRouter` scales the weights of experts here."""
        return routing

    def _in_turn(self, num_tokens: int, device: torch.device) -> Tensor:
        """bool [tokens, experts]: the first token chooses the first top_k experts, the second the next top_k, ..."""
        first = torch.arange(num_tokens, device=device)[:, None] * self.topk
        experts = torch.arange(self.num_experts, device=device)[None, :]
        return (experts - first) % self.num_experts < self.topk

    def _balanced(self, weights: Tensor, logits: Tensor, routing: "Routing", documents: TokenDocuments) -> Tensor:
        """Return `weights`; in backward, the balancing losses with a coefficient are terms of the objective."""
        aux_coef, z_coef = self.config.moe_aux_loss_coeff, self.config.moe_z_loss_coeff
        with torch.set_grad_enabled(bool(z_coef)):
            z = (torch.logsumexp(logits, -1).square() * documents.times()).sum()
        self._add(_Z, z)
        if z_coef:
            weights = _Attach.apply(weights, z, z_coef * self.loss_scale)
        if aux_coef:
            aux = self._aux(*routing.balanced(logits, self._moe), documents)
            self._add(_AUX, aux)
            weights = _Attach.apply(weights, aux, aux_coef * self.loss_scale)
        return weights

    def _aux(self, probabilities: Tensor, chosen: Tensor, documents: TokenDocuments) -> Tensor:
        rows = documents.numbers + 1  # row of each token in the table; row 0 collects padding and is ignored
        table = probabilities.new_zeros(documents.count + 1, self.num_experts)
        choices = table.index_add(0, rows, chosen.to(table.dtype))  # exact up to 2^24 tokens of a document
        for group in (self.tp_group, documents.cp_members):  # sequence parallelism and cp split documents over ranks
            if group is not None and group.size() > 1:
                dist.all_reduce(choices, group=group)
        choices = documents.by_text(choices[1:])
        share = choices / choices.sum(1, keepdim=True).clamp(min=1.0)
        probability: Tensor = _SumOfRows.apply(probabilities, rows, len(table))
        return self.num_experts * (share * documents.by_text(probability[1:])).sum()

    def _add(self, where: int | slice, value: Tensor) -> None:
        if self.totals is None:
            self.totals = torch.zeros(self.num_experts + 4, dtype=torch.float64, device=value.device)
        self.totals[self.num_experts + where if isinstance(where, int) else where] += value.detach()


@dataclass(frozen=True)
class Routing:
    """The routing of t tokens.

    weights  [t, experts], 0 for experts that are not chosen
    chosen   bool [t, experts]
    """

    weights: Tensor
    chosen: Tensor

    @staticmethod
    def of(logits: Tensor, moe: MoeConfig, bias: Tensor | None) -> "Routing":
        """Choose experts by logits [t, experts] and the correction bias [experts].

        softmax, logits 2, 1, 0, top_k 2 -> weights 0.731, 0.269, 0; without normalize_top_k 0.665, 0.245, 0
        """
        if moe.score_function == "sigmoid" or bias is not None:
            return _by_scores(logits, moe, bias)
        weights, chosen = topk_routing_with_score_function(
            logits, moe.top_k, use_pre_softmax=not moe.normalize_top_k, scaling_factor=moe.scaling_factor
        )
        return Routing(weights, chosen)

    def balanced(self, logits: Tensor, moe: MoeConfig) -> tuple[Tensor, Tensor]:
        """The probabilities and the choices that enter the loss `aux`, both [t, experts]."""
        if moe.score_function == "softmax":
            return logits.softmax(-1), self.chosen
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True), _among_largest(scores.detach(), moe.top_k)


def _by_scores(logits: Tensor, moe: MoeConfig, bias: Tensor | None) -> Routing:
    """Choose the experts with the largest scores plus `bias`.  The weights are the scores of the chosen experts.

    Scores 0.6, 0.5, 0.2, bias 0, 0, 0.4, top_k 2 -> weights 0.75, 0, 0.25; without normalize_top_k 0.6, 0, 0.2"""
    scores = logits.sigmoid() if moe.score_function == "sigmoid" else logits.softmax(-1)
    ranked = scores.detach() if bias is None else scores.detach() + bias
    if moe.num_groups > 1:
        ranked = _within_best_groups(ranked, moe)
    chosen = _among_largest(ranked, moe.top_k)
    weights = torch.where(chosen, scores, 0.0)
    if moe.normalize_top_k:
        weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM)
    return Routing(weights * moe.scaling_factor, chosen)


def _within_best_groups(ranked: Tensor, moe: MoeConfig) -> Tensor:
    """Set the scores [t, experts] of all but the best groups to -inf.  A group's score is the sum of its two best.

    0.9 0.1 | 0.6 0.5 | 0.3 0.2, top_groups 1 -> -inf -inf | 0.6 0.5 | -inf -inf, because 0.6 + 0.5 is the largest sum
    """
    groups = ranked.unflatten(-1, (moe.num_groups, -1))
    best = _among_largest(groups.topk(2, dim=-1).values.sum(-1), moe.top_groups)
    return torch.where(best[..., None], groups, -torch.inf).flatten(-2)


def _among_largest(numbers: Tensor, count: int | None) -> Tensor:
    """bool [t, n]: whether a number is one of the `count` largest of its row."""
    assert count is not None
    return torch.zeros_like(numbers, dtype=torch.bool).scatter(-1, numbers.topk(count, dim=-1).indices, True)


class _Logits(torch.autograd.Function):
    """Tokens [t, h], router's weight [experts, h] and bias [experts] -> logits [t, experts], in fp32 or float64.

    Saves tokens and weight in their own dtype.  Autograd would save an fp32 copy of the tokens in every layer.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        logits = wide(tokens) @ weight.to(wide_dtype(tokens.dtype)).T
        return logits if bias is None else logits + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        tokens, weight = ctx.saved_tensors
        _, trains_weight, trains_bias = ctx.needs_input_grad
        dweight = (grad.T @ tokens.to(grad.dtype)).to(weight.dtype) if trains_weight else None
        dbias = grad.sum(0).to(ctx.bias_dtype) if trains_bias else None
        return (grad @ weight.to(grad.dtype)).to(tokens.dtype), dweight, dbias


class _SumOfRows(torch.autograd.Function):
    """numbers [t, experts] -> float64 [rows, experts]: row i is the sum of the rows whose `index` [t] is i.

    index_add adds the tokens of a document one after another.  In fp32, the sum over 131,072 tokens would have a
    relative error of 2e-5, and the sum over a million tokens a relative error of 9e-4.
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
        ctx.dloss = torch.full_like(loss, scale)
        return through.view_as(through)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.dloss, None


def begin(chunks: Iterable[torch.nn.Module], *, loss_scale: float) -> None:
    """Prepare the routers for a step.

    loss_scale: factor on a sum over real tokens when it is added to the objective
    """
    for router in _routers(chunks):
        router.loss_scale, router.totals = loss_scale, None


def load(chunks: Iterable[torch.nn.Module], model: ModelConfig, device: torch.device) -> ExpertLoad:
    """The statistics of all ranks since `begin`.  Collective over all ranks: one all-reduce of a small table."""
    num_experts, layers = model.moe.num_experts or 0, _layers_with_routers(model)
    table = torch.zeros(len(layers), num_experts + 4, dtype=torch.float64, device=device)
    for router in _routers(chunks):
        if router.totals is not None:
            table[layers.index(router.layer_number - 1)] = router.totals
    dist.all_reduce(table)
    totals = table.cpu().numpy()
    chosen, rest = totals[:, :num_experts], totals[:, num_experts:]
    tokens = np.maximum(rest[:, _TOKENS], 1.0)
    aux, z = rest[:, _AUX] / tokens, rest[:, _Z] / tokens
    return ExpertLoad(chosen=chosen, dropped=rest[:, _DROPPED], aux=aux, z=z, layers=layers)


def _layers_with_routers(model: ModelConfig) -> list[int]:
    """The numbers of the layers with experts, from 0.  The block for multi-token prediction is one more layer."""
    last = model.num_layers + model.has_mtp
    return [number - 1 for number in range(1, last + 1) if model.has_experts(number)]


def update_biases(chunks: Iterable[torch.nn.Module], load: ExpertLoad, rate: float) -> None:
    """Change the correction bias of each expert: + rate if it has fewer tokens than the mean, - rate if it has more.

    load: the load of the step, over all ranks

    token counts of three experts 6, 2, 4, rate 0.001 -> changes -0.001, +0.001, 0
    """
    for router in _routers(chunks):
        assert router.expert_bias is not None
        row = router.layer_number - 1 if load.layers is None else load.layers.index(router.layer_number - 1)
        counts = load.chosen[row]  # whole numbers, exact in float64
        signs = np.sign(counts.sum() - len(counts) * counts)
        router.expert_bias += torch.from_numpy(np.float32(rate) * signs.astype(np.float32)).to(router.expert_bias)


def _routers(chunks: Iterable[torch.nn.Module]) -> Iterator[Router]:
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, Router))
