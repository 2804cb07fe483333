"""The kernels of linear attention of flash-linear-attention (FLA, the package fla-core), on CUDA in bf16.

FLA computes in Triton, with fp32 states between chunks and bf16 products within them.  fla_rule.py calls its kernels of
the delta rule, fla_layer.py those of the convolution and of the gated norm.  Nothing is saved for backward but the
inputs.

Fragments between which states pass come first, and only they have tensors of states.  So the linked fragments and
the others are two parts, and each part is a run of FLA's kernels.  Most microbatches have one part.

No pass makes the host wait for the GPU: everything that kernels need about fragments is computed on the host once for
all layers.  On Hopper, FLA refuses some releases of Triton (WRONG_TRITON).
"""

import importlib.util
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from sft.config import Config
from sft.mcore.linear_attention import fla_functions, fla_layer
from sft.mcore.linear_attention.delta_rule import Inputs
from sft.mcore.linear_attention.fla_compilation import compile_kernels
from sft.mcore.linear_attention.fla_layer import FlaLayer
from sft.mcore.linear_attention.fla_rule import Part, PartPass
from sft.mcore.linear_attention.recurrence import MATRICES, Fragments

MAX_KEY_DIM = 256  # widest key head that FLA supports
# Releases of Triton from the first of these, and before the second, compute wrong gradients on Hopper.  With them, FLA
# 0.6.0 raises an error in the backward pass (fla/ops/common/chunk_o.py).  If tilelang is installed, FLA uses its kernel
# instead.
WRONG_TRITON = ("3.4.0", "3.7.1")
AMPERE, HOPPER = 8, 9  # major compute capabilities


@dataclass(frozen=True)
class FlaSchedule:
    """Fragments, and their parts that have fragments: first the linked ones, then the others."""

    fragments: Fragments
    parts: tuple[Part, ...]

    @staticmethod
    def of(fragments: Fragments, device: torch.device) -> "FlaSchedule":
        edges, count = fragments.boundaries, len(fragments.linked)
        assert (fragments.linked == np.arange(count)).all(), f"linked fragments {fragments.linked} are not the first"
        cut = [(edges[: count + 1], True), (edges[count:], False)]
        return FlaSchedule(fragments, tuple(Part.of(x, linked, device) for x, linked in cut if len(x) > 1))


@dataclass(frozen=True)
class PreparedInputs:
    """The inputs of a pass, and for each part with tokens what its kernels compute from the inputs alone."""

    inputs: Inputs
    passes: tuple[PartPass, ...]

    @property
    def linked(self) -> PartPass | None:
        return next((x for x in self.passes if x.part.has_states), None)


@dataclass(frozen=True)
class FlaKernel(FlaLayer):
    """Implements `delta_rule.DeltaKernel` with kernels of FLA.

    functions: FLA's (`fla_functions.functions`); reason: why this run uses this kernel, for the log
    """

    maps = MATRICES
    functions: Any
    reason: str = ""

    def __str__(self) -> str:
        return f"fla ({self.reason})"

    def compile(self, config: Config, device: torch.device) -> None:
        compile_kernels(self, config, device)

    def schedule(self, fragments: Fragments, heads: int, device: torch.device) -> FlaSchedule:
        return FlaSchedule.of(fragments, device)

    def prepared(self, inputs: Inputs, schedule: FlaSchedule) -> PreparedInputs:
        parts = [part for part in schedule.parts if part.num_tokens]  # FLA does not take empty inputs
        return PreparedInputs(inputs, tuple(PartPass(self.functions, inputs, part) for part in parts))

    def transitions(self, prepared: PreparedInputs, schedule: FlaSchedule) -> tuple[Tensor, Tensor]:
        if prepared.linked is not None:
            return prepared.linked.maps()
        offsets = prepared.inputs.zero_states(len(schedule.fragments.linked))
        identity = torch.eye(offsets.shape[2], dtype=offsets.dtype, device=offsets.device)
        return identity.repeat(*offsets.shape[:2], 1, 1), offsets

    def forward(self, prepared: PreparedInputs, schedule: FlaSchedule, states: Tensor | None) -> tuple[Tensor, Tensor]:
        parts = [x.outputs(states if x.part.has_states else None) for x in prepared.passes]
        return _joined(parts, prepared.inputs.v), prepared.inputs.v.new_empty(0)

    def state_gradients(self, grad: Tensor, prepared: PreparedInputs, schedule: FlaSchedule) -> Tensor:
        if prepared.linked is not None:
            return prepared.linked.state_gradients(grad)
        return prepared.inputs.zero_states(len(schedule.fragments.linked))

    def backward(
        self,
        grad: Tensor,
        prepared: PreparedInputs,
        schedule: FlaSchedule,
        states: Tensor | None,
        saved: Tensor,
        last_gradients: Tensor | None,
    ) -> Inputs:
        of_parts = [
            x.gradients(grad, *((states, last_gradients) if x.part.has_states else (None, None)))
            for x in prepared.passes
        ]
        return Inputs(*(_joined([part[i] for part in of_parts], x) for i, x in enumerate(prepared.inputs)))

    def log_decay(self, a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
        if not len(a):
            return a.float()
        g: Tensor = self.functions.fused_gdn_gate(a, a_log, dt_bias, output_dtype=torch.float32)
        return g

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return fla_layer.gated_norm(self.functions, x, gate, weight, eps)

    def gated(self, x: Tensor, gate: Tensor, weight: Tensor, scale: Tensor, eps: float) -> Tensor:
        return fla_layer.gated(self.functions, x, gate, weight, eps)[0]


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """The tensors of parts as one tensor; without parts, an empty one like `like`."""
    return parts[0] if len(parts) == 1 else torch.cat([like[:0], *parts])


def made() -> FlaKernel:
    return FlaKernel(fla_functions.functions(), "flash-linear-attention")


def why_not(config: Config, device_type: str) -> str | None:
    """The reason why this run cannot use FLA; None if it can."""
    if (reason := fla_functions.excluded_by(config, device_type)) is not None:
        return reason
    if (size := config.model.linear_attention.key_head_dim) > MAX_KEY_DIM:
        return f"FLA has keys of at most {MAX_KEY_DIM} numbers, but model.linear_attention.key_head_dim is {size}"
    return fla_functions.problem() or old_gpu() or wrong_triton()


def old_gpu() -> str | None:
    """The reason why this GPU is too old for FLA's maps of states; None if it is not."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] >= AMPERE:
        return None
    return "FLA's maps of states need compute capability 8.0 or later"


def wrong_triton() -> str | None:
    """The reason why FLA refuses to compute gradients on this GPU with the installed Triton; None if it does not."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != HOPPER:
        return None
    (first, fixed), installed = WRONG_TRITON, version("triton")
    if not first <= TorchVersion(installed) < fixed or importlib.util.find_spec("tilelang"):
        return None
    return (
        f"Triton {installed} computes wrong gradients on Hopper, and FLA refuses it.  Install Triton {fixed} or later, "
        "or tilelang"
    )
