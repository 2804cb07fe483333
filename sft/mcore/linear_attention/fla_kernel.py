"""Computes the gated delta rule by flash-linear-attention (FLA, the package fla-core), on CUDA in bf16.

FLA computes in Triton, with fp32 states between chunks and bf16 products within chunks.  fla_rule.py calls FLA's
kernels of the delta rule, fla_layer.py its kernels of the convolution and of the gated norm.  Only the inputs are saved
for backward.  On Hopper, FLA refuses some releases of Triton (WRONG_TRITON).
"""

import importlib.util
from importlib.metadata import version

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from sft.config import Config
from sft.config.linear_attention import Activation
from sft.mcore.linear_attention import fla_functions, fla_layer
from sft.mcore.linear_attention.delta_rule import Inputs
from sft.mcore.linear_attention.fla_channel_rule import ChannelPass
from sft.mcore.linear_attention.fla_compilation import compile_kernels
from sft.mcore.linear_attention.fla_recurrence import FlaRecurrence
from sft.mcore.linear_attention.fla_rule import DeltaPass, Part
from sft.mcore.linear_attention.recurrence import MATRICES

MAX_KEY_DIM = 256  # widest key head that FLA supports
# Releases of Triton from the first of these on, and before the second, compute wrong gradients on Hopper.  With such a
# release, FLA 0.6.0 raises an error in the backward pass (fla/ops/common/chunk_o.py).  If tilelang is installed, FLA
# uses a kernel of tilelang instead.
WRONG_TRITON = ("3.4.0", "3.7.1")
AMPERE, HOPPER = 8, 9  # major compute capabilities


class FlaKernel(FlaRecurrence[Inputs]):
    """Implements `delta_rule.DeltaKernel` with kernels of FLA."""

    maps = MATRICES

    def compile(self, config: Config, device: torch.device) -> None:
        compile_kernels(self, config, device)

    def part_pass(self, inputs: Inputs, part: Part) -> DeltaPass:
        one_pass = ChannelPass if inputs.has_channel_decay else DeltaPass
        return one_pass(self.functions, inputs, part)

    def identity(self, inputs: Inputs, count: int) -> Tensor:
        identity = torch.eye(inputs.k.shape[-1], dtype=inputs.state_dtype, device=inputs.k.device)
        return identity.repeat(count, inputs.v.shape[1], 1, 1)

    def log_decay(self, a: Tensor, a_log: Tensor, dt_bias: Tensor, floor: float | None = None) -> Tensor:
        if not len(a):
            return a.float()
        g: Tensor
        if a.ndim == 3:
            g = self.functions.fused_kda_gate(a, a_log, dt_bias, lower_bound=floor, output_dtype=torch.float32)
        else:
            g = self.functions.fused_gdn_gate(a, a_log, dt_bias, output_dtype=torch.float32)
        return g

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: Activation = "silu"
    ) -> tuple[Tensor, Tensor]:
        return fla_layer.gated_norm(self.functions, x, gate, weight, eps, activation)

    def gated(
        self, x: Tensor, gate: Tensor, weight: Tensor, scale: Tensor, eps: float, activation: Activation = "silu"
    ) -> Tensor:
        return fla_layer.gated(self.functions, x, gate, weight, eps, activation)[0]


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
