"""A kernel of the gated delta rule that calls flash-linear-attention (FLA, the package fla-core), on CUDA in bf16.

FLA computes the rule in Triton, with fp32 states between chunks and bf16 products within them.  This module calls only
FLA's public function.  FLA has no functions for maps and for gradients of states.  Their results come from the same
function: the map of a fragment is its last state if the values are [0, v] and the first state is [1, 0], and autograd
gives the gradients of states.  Nothing is saved for backward, which runs FLA's forward and backward.

On an H200 with Triton 3.7.1, forward and backward ran, and another document changed no bit (docs/numbers/h200.md).  A
comparison with plain torch on a GPU is not finished.  In Triton's interpreter on a CPU, with fla-core 0.6.0 and fp32
inputs, maps, outputs and gradients agreed with plain torch within 2e-6.  On Hopper, FLA refuses some releases of Triton
(WRONG_TRITON).  Tests on a CPU replace FLA's function by plain torch.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.torch_version import TorchVersion

from sft.config import Config
from sft.mcore.device import send
from sft.mcore.linear_attention.delta_rule import Fragments, Inputs
from sft.parallel.context_parallel import runs

MAX_KEY_DIM = 256  # widest key head that FLA supports
# Releases of Triton from the first of these, and before the second, compute wrong gradients on Hopper.  With them, FLA
# 0.6.0 raises an error in the backward pass (fla/ops/common/chunk_o.py).  If tilelang is installed, FLA uses its kernel
# instead.
WRONG_TRITON = ("3.4.0", "3.7.1")
HOPPER = 9  # major compute capability
INSTALL = 'Install it with: pip install "fla-core[cuda]>=0.6" (docs/start/install.md)'
Operator = Callable[..., tuple[Tensor, Tensor | None]]  # fla.ops.gated_delta_rule.chunk_gated_delta_rule


@dataclass(frozen=True)
class FlaSchedule:
    """Fragments, and their boundaries as tensors for FLA: int64 [n + 1], on the host and on the device.

    FLA caches what it computes from a boundaries tensor, by the identity of the tensor.  So all layers of a microbatch
    pass the same tensors.
    """

    fragments: Fragments
    on_host: Tensor
    on_device: Tensor

    @staticmethod
    def of(fragments: Fragments, device: torch.device) -> "FlaSchedule":
        on_host = torch.from_numpy(fragments.boundaries)
        return FlaSchedule(fragments, on_host, send(on_host, device))


@dataclass(frozen=True)
class FlaKernel:
    """Implements `delta_rule.Kernel` with kernels of FLA.

    If fragments are linked, a pass allocates an initial state for every fragment of the rank, also for unlinked ones.
    operator: FLA's function; reason: why this run uses this kernel, for the log
    """

    operator: Operator
    reason: str = ""

    def __str__(self) -> str:
        return f"fla ({self.reason})"

    def schedule(self, fragments: Fragments, heads: int, device: torch.device) -> FlaSchedule:
        return FlaSchedule.of(fragments, device)

    def transitions(self, inputs: Inputs, schedule: FlaSchedule) -> tuple[Tensor, Tensor]:
        size, device, fragments = inputs.k.shape[-1], inputs.v.device, schedule.fragments
        starts, lengths = fragments.boundaries[fragments.linked], fragments.lengths[fragments.linked]
        tokens = send(torch.from_numpy(runs(starts, lengths)), device)
        k, v, g, beta = (x.index_select(0, tokens) for x in inputs[1:])
        identity = torch.eye(size, dtype=inputs.state_dtype, device=device)
        first = pad(identity, (0, v.shape[-1])).repeat(len(lengths), v.shape[1], 1, 1)
        maps, linked = first, FlaSchedule.of(Fragments.of(np.cumsum([0, *lengths])), device)
        if len(tokens):
            _, maps = self._run(Inputs(k, k, pad(v, (size, 0)), g, beta), linked, first, True)
        return maps[..., :size].contiguous(), maps[..., size:].contiguous()

    def forward(self, inputs: Inputs, schedule: FlaSchedule, states: Tensor | None) -> tuple[Tensor, Tensor]:
        out = inputs.v
        if len(out):  # FLA does not take empty inputs
            out, _ = self._run(inputs, schedule, _all_states(states, inputs, schedule.fragments), False)
        return out, inputs.v.new_empty(0)

    def state_gradients(self, grad: Tensor, inputs: Inputs, schedule: FlaSchedule) -> Tensor:
        fragments = schedule.fragments
        states = inputs.zero_states(len(fragments.lengths))
        if not len(grad):
            return states[torch.from_numpy(fragments.linked)]
        states.requires_grad_()
        with torch.enable_grad():
            out, _ = self._run(inputs, schedule, states, False)
        (gradients,) = torch.autograd.grad(out, states, grad)
        return gradients[torch.from_numpy(fragments.linked)]

    def backward(
        self,
        grad: Tensor,
        inputs: Inputs,
        schedule: FlaSchedule,
        states: Tensor | None,
        saved: Tensor,
        last_gradients: Tensor | None,
    ) -> Inputs:
        if not len(grad):
            return inputs
        leaves = Inputs(*(x.detach().requires_grad_() for x in inputs))
        has_last, fragments = last_gradients is not None, schedule.fragments
        with torch.enable_grad():
            out, last = self._run(leaves, schedule, _all_states(states, inputs, fragments), has_last)
        results, grads = (
            ((out, last), (grad, _all_states(last_gradients, inputs, fragments))) if has_last else (out, grad)
        )
        return Inputs(*torch.autograd.grad(results, leaves, grads))

    def _run(
        self, inputs: Inputs, schedule: FlaSchedule, first: Tensor | None, has_last: bool
    ) -> tuple[Tensor, Tensor]:
        """Outputs [t, value heads, V] and, with `has_last`, the last states of all fragments, [n, value heads, K, V].

        first: initial states of all fragments; None: zero
        """
        out, last = self.operator(
            *(x[None] for x in inputs),
            initial_state=first,
            output_final_state=has_last,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=schedule.on_device,
            cu_seqlens_cpu=schedule.on_host,
        )
        return out[0], out.new_empty(0) if last is None else last


def _all_states(states: Tensor | None, inputs: Inputs, fragments: Fragments) -> Tensor | None:
    """States [m, ...] of the linked fragments -> states [n, ...] of all fragments, 0 for those that are not linked."""
    if states is None:
        return None
    result = inputs.zero_states(len(fragments.lengths))
    result[torch.from_numpy(fragments.linked)] = states
    return result


def why_not(config: Config, device_type: str) -> str | None:
    """The reason why this run cannot use FLA; None if it can."""
    if device_type != "cuda":
        return "FLA needs CUDA, but this run is on the CPU"
    if config.run.precision != "bf16":
        return f"FLA computes in bf16, but run.precision is {config.run.precision}"
    if config.run.deterministic:
        return "run.deterministic is true, and FLA measures at run time which of its kernels' variants are fastest"
    if (size := config.model.linear_attention.key_head_dim) > MAX_KEY_DIM:
        return f"FLA has keys of at most {MAX_KEY_DIM} numbers, but model.linear_attention.key_head_dim is {size}"
    return missing() or wrong_triton()


def missing() -> str | None:
    """The reason why FLA cannot be imported, with advice; None if it can."""
    try:
        operator()
    except ImportError as error:
        return f"fla cannot be imported ({error}).  {INSTALL}"
    return None


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


def operator() -> Any:
    """FLA's function chunk_gated_delta_rule.  Raises ImportError if FLA cannot be imported."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule
