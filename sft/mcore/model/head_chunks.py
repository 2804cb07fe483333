"""Computes projections and softmax attention for one chunk of heads at a time (train.head_chunks).

A chunk is some of a rank's key heads, with the query heads that use them:

    queries, keys, values = rotation(norms(rows of linear_qkv x normed input))
    columns of the output = attention(queries, keys, values)

Autograd saves the normed input, the output of all heads, and its log-sum-exp.  Backward projects a chunk again.  So
queries, keys, values and their gradients exist for one chunk at a time.  Only the normed input, the output, and the
gradients of these two exist for all heads.  UPipe (arXiv:2602.21196) published the idea for all-to-alls.

Each chunk has its own rows of linear_qkv, and writes its rows of the weight's gradient.  Autograd gets the whole
gradient.  The gradient of the normed input is a sum over chunks, which is rounded to its dtype after each chunk.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import ModuleSpec
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from sft.mcore.activations.kept_calls import sources_of
from sft.mcore.attention.packed_attention import AttentionSetting, attend, attend_backward
from sft.mcore.backend import PackedDocuments
from sft.mcore.lora.adapted import Adapted
from sft.mcore.lora.products import OutputSlice, added, projected
from sft.mcore.wide import wide

_NORMS = ("q_layernorm", "k_layernorm")  # their weights serve all chunks; the other weights are divided among chunks


def with_head_chunks(spec: ModuleSpec, num_chunks: int) -> ModuleSpec:
    """Let the attention of the layer `spec`, on the portable backend, compute in chunks, and return the spec."""
    attention = spec.submodules.self_attention
    attention.module = type("HeadChunks", (HeadChunks, attention.module), {"num_chunks": num_chunks})
    return spec


class HeadChunks:
    """Overrides the forward pass of core's SelfAttention or of a subclass.

    num_chunks: number of chunks; it must divide the number of key heads of a rank
    """

    num_chunks: int

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: None, *, packed_seq_params: PackedDocuments, **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The output of attention: hidden_states [t, 1, h], normed -> [t, 1, h].

        Also returns the bias of linear_proj, which the caller adds.
        """
        linear, inputs, adapters = self.linear_qkv, {"hidden": hidden_states}, None
        if isinstance(linear, Adapted):
            hidden, inner = projected(hidden_states, torch.cat([factors.a for factors in linear.factors]))
            inputs = {"hidden": hidden, "inner": linear.split.for_outputs(inner)}
            factors = [matrix for factors in linear.factors for matrix in factors.b]
            slices = [part._replace(groups=part.groups // self.num_chunks) for part in linear.output_slices]
            adapters, linear = _Adapters(factors, slices, linear.scale), linear.base
        weights = {
            **{"weight": linear.weight, "bias": linear.bias, "sinks": self.core_attention.softmax_offset},
            **{name: getattr(getattr(self, name), "weight", None) for name in _NORMS},  # core has norms without weights
            **{f"factor {number}": factor for number, factor in enumerate(adapters.factors if adapters else ())},
        }
        # A missing bias is None in core, and empty in Transformer Engine.
        weights = {name: weight for name, weight in weights.items() if weight is not None and weight.numel()}
        plan = _Plan(
            num_chunks=self.num_chunks,
            heads=self._heads_of_chunk(),
            num_heads=self.num_attention_heads_per_partition,
            setting=self.core_attention.setting(packed_seq_params),
            tp_group=self.pg_collection.tp,
            sequence_parallel=self.config.sequence_parallel,
            names=(*inputs, *weights),
            adapters=adapters,
        )

        def function(*tensors: Tensor) -> Tensor:
            out: Tensor = _Chunks.apply(plan, *tensors)
            return out

        out = packed_seq_params.attend(self, function, [*inputs.values()], [*weights.values()])
        projection: tuple[Tensor, Tensor | None] = self.linear_proj(out.flatten(1).unsqueeze(1))
        return projection

    def _heads_of_chunk(self: Any) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        """A function that makes queries, keys and values of a chunk from its rows of linear_qkv's output, with norms.

        It is core's method, bound to a copy of this module that has the heads of one chunk.
        """
        part = copy.copy(self)
        part.__dict__["_modules"] = {**self._modules, "linear_qkv": _ChunkProjection()}
        part.num_attention_heads_per_partition //= self.num_chunks
        part.num_query_groups_per_partition //= self.num_chunks
        method: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] = part.get_query_key_value_tensors
        return method


class _ChunkProjection(torch.nn.Module):
    """Replaces linear_qkv in the copy of the module, whose input is the output of linear_qkv already."""

    def forward(self, mixed: Tensor) -> tuple[Tensor, None]:
        return mixed, None


@dataclass(frozen=True)
class _Adapters:
    """The adapters of linear_qkv: the factors B, and for each the rows of a chunk's projection to which it is added."""

    factors: Sequence[Tensor]
    slices: Sequence[OutputSlice]
    scale: float


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """The arguments of `_Chunks` that have no gradient.

    heads      see `HeadChunks._heads_of_chunk`
    num_heads  query heads of all chunks
    names      the names of the tensors that `_Chunks` gets, inputs first
    """

    num_chunks: int
    heads: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    num_heads: int
    setting: AttentionSetting
    tp_group: Any
    sequence_parallel: bool
    names: Sequence[str]
    adapters: _Adapters | None

    def whole(self, hidden: Tensor) -> Tensor:
        """The normed input of all tokens for which this rank computes its heads: [t, 1, h]"""
        if self.sequence_parallel and self.tp_group.size() > 1:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        return hidden

    def summed(self, dhidden: Tensor) -> Tensor:
        """The sum over tp of the gradient of `whole`, for the tokens of this rank."""
        if self.tp_group.size() == 1:
            return dhidden
        reduce = reduce_scatter_to_sequence_parallel_region if self.sequence_parallel else None
        result: Tensor = (reduce or reduce_from_tensor_model_parallel_region)(dhidden, group=self.tp_group)
        return result

    def heads_of(self, part: Mapping[str, Tensor], mixed: Tensor, inner: Tensor | None) -> list[Tensor]:
        """Queries, keys and values [t, heads of the chunk, d].

        part: weights of the chunk; mixed: product of the input and the chunk's rows of linear_qkv; inner: A x of the
        adapters, or None
        """
        if self.adapters is not None and inner is not None:
            factors = [part[f"factor {number}"] for number in range(len(self.adapters.factors))]
            mixed = added(mixed, inner, factors, self.adapters.slices, self.adapters.scale)
        return [x.squeeze(1) for x in self.heads(mixed)]

    def parts(self, weights: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The weights of each chunk."""
        count = self.num_chunks
        divided = {name: [x] * count if name in _NORMS else x.chunk(count) for name, x in weights.items()}
        return [{name: divided[name][chunk] for name in weights} for chunk in range(count)]


class _Chunks(torch.autograd.Function):
    """hidden [t, 1, h] and weights of all chunks -> the output of attention [t, heads, d]"""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Tensor) -> Tensor:
        weights = dict(zip(plan.names, tensors))
        hidden, inner = weights.pop("hidden"), weights.pop("inner", None)
        whole, out, sums = plan.whole(hidden), None, list[Tensor]()
        for number, part in enumerate(plan.parts(weights)):
            mixed = torch.nn.functional.linear(whole, part["weight"], part.get("bias"))
            query, key, value = (x.contiguous() for x in plan.heads_of(part, mixed, inner))
            del mixed
            if out is None:
                out = query.new_empty((len(query), plan.num_heads, value.shape[-1]))
            own = out.chunk(plan.num_chunks, dim=1)[number]
            sums += attend(query, key, value, part.get("sinks"), plan.setting, own)
            del query, key, value
        assert out is not None
        ctx.plan, ctx.weights = plan, weights
        ctx.save_for_backward(hidden, inner, out, *sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan, weights = ctx.plan, ctx.weights
        hidden, inner, out, *sums = ctx.saved_tensors
        needed = {name for name, needs in zip(plan.names, ctx.needs_input_grad[1:]) if needs}
        whole, dhidden, totals = plan.whole(hidden).flatten(0, 1), None, dict[str, Tensor]()
        divided = {name: torch.empty_like(x) for name, x in weights.items() if name in needed and name not in _NORMS}
        by_chunk = (x.chunk(plan.num_chunks, dim=1) for x in (out, grads[0]))
        groups = len(sums) // plan.num_chunks
        for part, own, *saved in zip(plan.parts(weights), plan.parts(divided), *by_chunk):
            dmixed, gradients = _chunk_backward(plan, part, whole[:, None], inner, [*saved, sums[:groups]], needed)
            sums = sums[groups:]
            if "hidden" in needed:
                weight = part["weight"]
                dhidden = dmixed @ weight if dhidden is None else dhidden.addmm_(dmixed, weight)
            if "weight" in needed:
                torch.mm(dmixed.t(), whole, out=own["weight"])
            if "bias" in needed:
                own["bias"].copy_(dmixed.sum(0))
            del dmixed
            for name, gradient in gradients.items():
                if name in divided:
                    own[name].copy_(gradient)
                else:
                    term = wide(gradient)
                    totals[name] = totals[name].add_(term) if name in totals else term
        results = {**divided, **{name: total.to(out.dtype) for name, total in totals.items()}}
        if dhidden is not None:
            results["hidden"] = plan.summed(dhidden[:, None])
        return None, *(results.get(name) for name in plan.names)


def _chunk_backward(
    plan: _Plan, part: Mapping[str, Tensor], whole: Tensor, inner: Tensor | None, saved: Sequence[Any], needed: set[str]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradient of a chunk's projection [t, rows of the chunk], and the gradients of other tensors, by name.

    part: weights of the chunk; whole: the normed input; inner: A x of the adapters, or None
    saved: the chunk's output, its gradient, and the log-sum-exp of its head groups
    needed: names of the tensors that need a gradient
    """
    out, grad, sums = saved
    mixed = torch.nn.functional.linear(whole, part["weight"], part.get("bias"))
    names = [name for name in part if name.startswith("factor")]
    with torch.enable_grad():
        (source, *others), (edge, *edges) = sources_of(
            mixed, *(part[name] for name in names), *([] if inner is None else [inner])
        )
        projections = plan.heads_of({**part, **dict(zip(names, others))}, source, None if inner is None else others[-1])
        ends = [get_gradient_edge(x) for x in projections]
    heads = [x.detach().contiguous() for x in projections]
    del mixed, source, others, projections
    *gradients, dsinks = attend_backward([*heads, part.get("sinks"), out, *sums], grad, plan.setting)
    del heads
    norms = {name: get_gradient_edge(part[name]) for name in _NORMS if name in needed}
    wanted = {name: x for name, x in zip([*names, "inner"], edges) if name in needed} | norms
    dmixed, *results = torch.autograd.grad(ends, [edge, *wanted.values()], gradients)
    by_name = dict(zip(wanted, results))
    if dsinks is not None and "sinks" in needed:
        by_name["sinks"] = dsinks
    return dmixed.flatten(0, 1), by_name
