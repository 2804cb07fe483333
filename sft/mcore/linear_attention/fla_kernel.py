"""A kernel of the gated delta rule: that of flash-linear-attention (the package fla-core), on CUDA in bf16.

FLA computes the rule in Triton, with fp32 states between chunks and bf16 products within them.  This module only calls
its public function.  FLA has no function for maps or for gradients of states alone, but needs none: the map of a
fragment is its last state if the values are [0, v] and the first state is [1, 0], and autograd gives the rest.  Nothing
is saved for backward, which runs FLA's forward and backward.

No GPU has run its backward yet: on Hopper, FLA refuses some releases of Triton (WRONG_TRITON).  Triton's interpreter
has run it on a CPU, with fla-core 0.6.0 and fp32 inputs: maps, outputs and gradients were those of plain torch within
2e-6.  Tests pass its inputs to a plain replacement.
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

MAX_KEY_DIM = 256  # limit of FLA
# Releases from the first and before the second compute wrong gradients on Hopper.  FLA 0.6.0 raises an error in the
# backward pass (fla/ops/common/chunk_o.py), unless tilelang is installed, whose kernel it then takes.
WRONG_TRITON = ("3.4.0", "3.7.1")
HOPPER = 9  # major compute capability
INSTALL = 'Install it with: pip install "fla-core[cuda]>=0.6" (docs/start/install.md)'
Operator = Callable[..., tuple[Tensor, Tensor | None]]  # fla.ops.gated_delta_rule.chunk_gated_delta_rule


@dataclass(frozen=True)
class FlaSchedule:
    """Fragments, and their boundaries as FLA takes them: int64 [n + 1], on the host and on the device.

    FLA remembers what it computes of a tensor, and knows the tensor again by its identity.
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

    If fragments are linked, it holds a first state for every fragment of the rank.
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
        """Outputs [t, value heads, V] and, if wanted, the last states of all fragments."""
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
    """States of the linked fragments -> states of all fragments, which are zero for the others."""
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
    """The reason why FLA computes no gradients on this GPU with the installed Triton, with advice; None if it does."""
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
    """FLA's function.  Raises ImportError."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule
