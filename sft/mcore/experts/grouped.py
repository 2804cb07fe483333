"""Products of tokens with one matrix for each expert, and experts that compute layer by layer.

Tokens are rows sorted by expert.  torch's grouped product multiplies the rows of all experts in one kernel.  It needs
bf16, widths that are multiples of 8, and a GPU of compute capability 9.x or 10.x.  Otherwise, a loop multiplies the
rows of one expert after another.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from sft.mcore.modules.gated_activation import GatedActivation

_ALIGNMENT = 8  # rows of bf16 matrices in the kernel start at multiples of 16 bytes


@dataclass(frozen=True)
class RowsOfExperts:
    """Which rows belong to which expert.

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

    def times(self, x: Tensor, matrices: Tensor) -> Tensor:
        """Multiply rows by their experts' matrices: x [n, columns], matrices [experts, rows, columns] -> [n, rows]"""
        is_aligned = all(size % _ALIGNMENT == 0 for size in matrices.shape[1:])
        if self.ends is not None and is_aligned and x.dtype == matrices.dtype == torch.bfloat16:
            output: Tensor = GroupedProduct.apply(x, matrices, self.ends)
            return output
        return torch.cat([rows @ matrix.t() for rows, matrix in zip(x.split(self.counts), matrices.unbind())])


def _has_kernel(device: torch.device) -> bool:
    if device.type != "cuda" or not hasattr(torch.nn.functional, "grouped_mm"):  # older releases of torch lack it
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


class GroupedProduct(torch.autograd.Function):
    """x [n, columns], matrices [experts, rows, columns], ends int32 [experts] -> [n, rows], in one kernel.

    Autograd's own backward would give the kernel the gradient of the output with any strides, and the kernel refuses
    some.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, matrices, ends)
        return torch.nn.functional.grouped_mm(x, matrices.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, matrices, ends = ctx.saved_tensors
        grad, dx, dmatrices = grad.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            dx = torch.nn.functional.grouped_mm(grad, matrices, offs=ends)
        if ctx.needs_input_grad[1]:
            dmatrices = torch.nn.functional.grouped_mm(grad.t(), x, offs=ends)
            starts = torch.nn.functional.pad(ends, (1, 0))[:-1]
            dmatrices.masked_fill_((starts == ends)[:, None, None], 0.0)  # experts without rows
        return dx, dmatrices, None


def layer_by_layer(experts: Any, activation: GatedActivation | None = None) -> Any:
    """Core's `experts`, so that linear_fc1 and linear_fc2 are each called once for all experts, with (rows, counts).

    Transformer Engine's experts are returned unchanged, because they do this already.
    activation: None: core's SwiGLU
    """
    return LayerByLayer(experts, activation) if isinstance(experts, SequentialMLP) else experts


class LayerByLayer(torch.nn.Module):
    """Wraps core's SequentialMLP: computes linear_fc1 of all experts first, then linear_fc2 of all experts.

    Core computes one expert after another.
    """

    def __init__(self, base: SequentialMLP, activation: GatedActivation | None) -> None:
        super().__init__()
        self.base, self._gated = base, activation
        self.linear_fc1 = _EachExpert(expert.linear_fc1 for expert in base.local_experts)
        self.linear_fc2 = _EachExpert(expert.linear_fc2 for expert in base.local_experts)

    def forward(self, tokens: Tensor, counts: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """tokens [n, h], sorted by expert; counts [experts]: tokens of each expert; weights [n] -> [n, h], None as bias

        weights: factor on each token's output
        """
        rows = counts.tolist()
        gate_up, _ = self.linear_fc1(tokens, rows)
        output, _ = self.linear_fc2(self._activation(gate_up, weights), rows, weights)
        return output, None

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
    """One linear layer of every expert of this rank, applied expert by expert."""

    def __init__(self, layers: Iterable[Any]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: Tensor, counts: list[int], weights: Tensor | None = None) -> tuple[Tensor, None]:
        """x [n, in], sorted by expert -> [n, out] with the biases added, and None as bias

        counts: rows of each expert; weights: [n], factors on the biases; None: 1
        """
        factors: Sequence[Tensor | None] = [None] * len(counts) if weights is None else weights.split(counts)
        outputs = []
        for layer, rows, factor in zip(self.layers, x.split(counts), factors):
            output, bias = layer(rows)
            if bias is not None:
                output = output + (bias if factor is None else bias * factor[:, None]).to(output.dtype)
            outputs.append(output)
        return torch.cat(outputs), None
