"""Computes experts layer by layer instead of one by one.  Tokens are rows sorted by expert (rows.py)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from torch import Tensor

from sft.mcore.experts.rows import RowsOfExperts, StoredMatrix, has_kernel
from sft.mcore.modules.activation import Activation
from sft.mcore.modules.biases import submodules_of
from sft.mcore.modules.unrepeated import Unrepeated, unrepeated
from sft.mcore.wide import wide_dtype


class GroupedExperts(TEGroupedMLP):
    """Transformer Engine's experts with a gated activation that core's class does not know.

    The weights of tokens are factors of the activation, in the same kernel, and of the second bias.
    """

    def __init__(self, *args: Any, activation: Mapping[str, Any], **core: Any) -> None:
        """activation: arguments of Activation"""
        super().__init__(*args, **core)
        self.gated = Activation(**activation)

    def forward(self, tokens: Tensor, counts: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Like `LayerByLayer.forward`.  FP8 needs more rows for each expert, which are zeros."""
        rows = unpadded = counts.tolist()
        if self.config.fp8:
            tokens, rows = self.quantization_padding(tokens, unpadded)
            weights = self.quantization_padding(weights[:, None], unpadded)[0].squeeze(1)
        gate_up, _ = self.linear_fc1(tokens, rows)  # with its bias
        output, biases = self.linear_fc2(self.gated(gate_up, None, weights), rows)
        output = add_biases(output, biases, rows, weights)
        return self.quantization_unpadding(output, unpadded) if self.config.fp8 else output, None


def with_own_activation(experts: Any, activation: Mapping[str, Any]) -> Any:
    """Core's spec of Transformer Engine's experts -> a spec of `GroupedExperts`."""
    parts = replace(submodules_of(experts), activation_func=None)
    if isinstance(experts, ModuleSpec):  # up to core 0.18
        return ModuleSpec(GroupedExperts, params={"activation": activation}, submodules=parts)
    return partial(GroupedExperts, submodules=parts, activation=activation)


def add_biases(output: Tensor, biases: Sequence[Tensor] | None, counts: list[int], weights: Tensor | None) -> Tensor:
    """Add each expert's bias [columns] to its rows of `output` [n, columns].  Unlike autograd, it saves no output.

    counts: rows of each expert; weights: [n], factors on the biases; None: 1
    """
    if biases is None:
        return output
    result: Tensor = _AddBiases.apply(output, weights, counts, *biases)
    return result


class _AddBiases(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, weights: Tensor | None, counts: list[int], *biases: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *biases)
        ctx.counts, result = counts, torch.empty_like(output)
        factors = [None] * len(counts) if weights is None else weights[:, None].split(counts)
        for out, rows, bias, factor in zip(result.split(counts), output.split(counts), biases, factors):
            torch.add(rows, bias if factor is None else (bias * factor).to(rows.dtype), out=out)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, *biases = ctx.saved_tensors
        dtype, dbiases, dweights = wide_dtype(grad.dtype), [], []
        factors = [None] * len(biases) if weights is None else weights.split(ctx.counts)
        for rows, bias, factor in zip(grad.split(ctx.counts), biases, factors):
            if factor is None:
                dbiases.append(rows.sum(0, dtype=dtype).to(bias.dtype))
                continue
            rows = rows.to(dtype)
            dbiases.append((rows * factor[:, None]).sum(0).to(bias.dtype))
            dweights.append((rows * bias.to(dtype)).sum(1))
        return grad, None if weights is None else torch.cat(dweights).to(weights.dtype), None, *dbiases


def computes_at_once(core: Any) -> bool:
    """Whether one kernel can compute a layer of all experts, so that core's experts are faster layer by layer.

    core: a TransformerConfig
    """
    is_on_gpu = torch.cuda.is_available() and not core.use_cpu_initialization
    return is_on_gpu and core.bf16 and has_kernel(torch.device("cuda"))


def layer_by_layer(experts: Any, activation: Activation | None = None) -> Any:
    """Wrap core's `experts`, so that linear_fc1 and linear_fc2 are each called once for all experts.

    Transformer Engine's experts are returned unchanged, because they do this already.
    activation: the gated activation; None: core's SwiGLU
    """
    return LayerByLayer(experts, activation) if isinstance(experts, SequentialMLP) else experts


class LayerByLayer(torch.nn.Module):
    """Wraps core's SequentialMLP: computes linear_fc1 of all experts first, then linear_fc2 of all experts.

    Core computes one expert after another.
    """

    def __init__(self, base: SequentialMLP, activation: Activation | None) -> None:
        super().__init__()
        self.base, self._gated = base, activation
        self.linear_fc1 = EachExpert(expert.linear_fc1 for expert in base.local_experts)
        outputs = [expert.linear_fc2 for expert in base.local_experts]
        is_left_out = isinstance(outputs[0], Unrepeated)
        self.linear_fc2 = (unrepeated(EachExpert) if is_left_out else EachExpert)(outputs)

    def forward(self, tokens: Tensor, counts: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """The outputs of experts, and None as bias: tokens [n, h], sorted by expert -> [n, h].

        counts: [experts], number of tokens of each expert; weights: [n], factor on each token's output
        """
        rows = counts.tolist()
        gate_up, biases = self.linear_fc1(tokens, rows)
        gate_up = add_biases(gate_up, biases, rows, None)
        output, biases = self.linear_fc2(self._activation(gate_up, weights), rows)
        return add_biases(output, biases, rows, weights), None

    def _activation(self, gate_up: Tensor, weights: Tensor) -> Tensor:
        """SwiGLU as core's MLP computes it, or another gated activation."""
        output: Tensor
        if self._gated is not None:
            output = self._gated(gate_up, None, weights)
        elif self.base.config.bias_activation_fusion:
            output = weighted_bias_swiglu_impl(gate_up, None, weights[:, None])
        else:
            gate, up = gate_up.chunk(2, -1)
            output = (torch.nn.functional.silu(gate) * up * weights[:, None]).to(gate_up.dtype)
        return output

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.base.sharded_state_dict(*args, **kwargs)


class EachExpert(torch.nn.Module):
    """One linear layer of every expert of this rank, in one kernel if the device has it, else expert by expert.

    Neither core's column-parallel nor its row-parallel layer of an expert sends messages: the dispatcher does.
    """

    def __init__(self, layers: Iterable[Any]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.stored: Sequence[StoredMatrix] = ()  # the experts' frozen matrices in low bits; empty: there are none

    @property
    def experts_weights(self) -> list[torch.nn.Parameter]:
        """The weight [rows, columns] of each expert."""
        layers: Any = self.layers
        return [layer.weight for layer in layers]

    def forward(self, x: Tensor, counts: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        """x [n, in], sorted by expert -> [n, out], and the biases, which the caller adds; None: there are no biases.

        counts: number of rows of each expert
        """
        layers: list[Any] = list(self.layers)
        rows = RowsOfExperts.of(counts, x.device)
        is_stored = any(matrix.is_held for matrix in self.stored)
        output = rows.times_stored(x, self.stored) if is_stored else rows.times(x, self.experts_weights)
        if layers[0].bias is None:
            return output, None
        return output, [getattr(layer, "spread_bias", layer.bias) for layer in layers]
