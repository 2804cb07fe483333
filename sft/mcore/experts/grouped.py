"""Multiplies tokens by the matrices of their experts, and computes experts layer by layer instead of one by one.

Tokens are rows sorted by expert.  torch's grouped product multiplies the rows of all experts in one kernel.  It needs
bf16, widths that are multiples of 8, and a GPU of compute capability 9.x or 10.x.  Otherwise, a loop multiplies the
rows of one expert after another.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from torch import Tensor

from sft.mcore.modules.activation import Activation
from sft.mcore.modules.biases import submodules_of
from sft.mcore.modules.unrepeated import Unrepeated, unrepeated

_ALIGNMENT = 8  # rows of bf16 matrices in the kernel start at multiples of 16 bytes


@dataclass(frozen=True)
class RowsOfExperts:
    """The division of rows, which are sorted by expert, among experts.

    counts: number of rows of each expert
    ends: int32 [experts], the end of each expert's rows, on the device; None: there is no kernel for this device
    """

    counts: list[int]
    ends: Tensor | None

    @classmethod
    def of(cls, counts: list[int], device: torch.device) -> "RowsOfExperts":
        if not sum(counts) or not _has_kernel(device):
            return cls(counts, None)
        ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32)
        return cls(counts, ends.pin_memory().to(device, non_blocking=True))  # without a wait of the host

    def times(self, x: Tensor, matrices: Tensor | Sequence[Tensor]) -> Tensor:
        """Multiply rows by their experts' matrices: x [n, columns] -> [n, rows]

        matrices: [experts, rows, columns], or a tensor [rows, columns] of each expert
        """
        first, is_stack = matrices[0], isinstance(matrices, Tensor)
        is_aligned = all(size % _ALIGNMENT == 0 for size in first.shape)
        if self.ends is not None and is_aligned and x.dtype == first.dtype == torch.bfloat16:
            output: Tensor = GroupedProduct.apply(x, self.ends, *([matrices] if is_stack else matrices))
            return output
        return torch.cat([rows @ matrix.t() for rows, matrix in zip(x.split(self.counts), matrices)])


def _has_kernel(device: torch.device) -> bool:
    if device.type != "cuda" or not hasattr(torch.nn.functional, "grouped_mm"):  # older releases of torch lack it
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)


class GroupedProduct(torch.autograd.Function):
    """x [n, columns], ends int32 [experts], matrices -> [n, rows], in one kernel.

    matrices: one tensor [experts, rows, columns], or a tensor [rows, columns] of each expert.  The latter are copied
    into one tensor for the kernel, forward and backward, and the copy is not kept.

    Autograd's own backward would give the kernel the gradient of the output with any strides, and the kernel refuses
    some.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *matrices: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends, *matrices)
        return torch.nn.functional.grouped_mm(x, _stacked(matrices).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *matrices = ctx.saved_tensors
        grad, dx = grad.contiguous(), None
        dmatrices: Sequence[Tensor | None] = [None] * len(matrices)
        if ctx.needs_input_grad[0]:
            dx = torch.nn.functional.grouped_mm(grad, _stacked(matrices), offs=ends)
        if any(ctx.needs_input_grad[2:]):
            stack = torch.nn.functional.grouped_mm(grad.t(), x, offs=ends)
            starts = torch.nn.functional.pad(ends, (1, 0))[:-1]
            stack.masked_fill_((starts == ends)[:, None, None], 0.0)  # experts without rows
            dmatrices = [stack] if matrices[0].ndim == 3 else stack.unbind()
        return dx, None, *dmatrices


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    return matrices[0] if matrices[0].ndim == 3 else torch.stack(list(matrices))


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
        wide, dbiases, dweights = torch.promote_types(grad.dtype, torch.float32), [], []
        factors = [None] * len(biases) if weights is None else weights.split(ctx.counts)
        for rows, bias, factor in zip(grad.split(ctx.counts), biases, factors):
            if factor is None:
                dbiases.append(rows.sum(0, dtype=wide).to(bias.dtype))
                continue
            rows = rows.to(wide)
            dbiases.append((rows * factor[:, None]).sum(0).to(bias.dtype))
            dweights.append((rows * bias.to(wide)).sum(1))
        return grad, None if weights is None else torch.cat(dweights).to(weights.dtype), None, *dbiases


def computes_at_once(core: Any) -> bool:
    """Whether one kernel can compute a layer of all experts, so that core's experts are faster layer by layer.

    core: a TransformerConfig
    """
    is_on_gpu = torch.cuda.is_available() and not core.use_cpu_initialization
    return is_on_gpu and core.bf16 and _has_kernel(torch.device("cuda"))


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
        self.linear_fc1 = _EachExpert(expert.linear_fc1 for expert in base.local_experts)
        outputs = [expert.linear_fc2 for expert in base.local_experts]
        is_left_out = isinstance(outputs[0], Unrepeated)
        self.linear_fc2 = (unrepeated(_EachExpert) if is_left_out else _EachExpert)(outputs)

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


class _EachExpert(torch.nn.Module):
    """One linear layer of every expert of this rank, in one kernel if the device has it, else expert by expert.

    Neither core's column-parallel nor its row-parallel layer of an expert sends messages: the dispatcher does.
    """

    def __init__(self, layers: Iterable[Any]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: Tensor, counts: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        """x [n, in], sorted by expert -> [n, out], and the biases, which the caller adds; None: there are no biases.

        counts: number of rows of each expert
        """
        layers: list[Any] = list(self.layers)
        output = RowsOfExperts.of(counts, x.device).times(x, [layer.weight for layer in layers])
        if layers[0].bias is None:
            return output, None
        return output, [getattr(layer, "spread_bias", layer.bias) for layer in layers]
