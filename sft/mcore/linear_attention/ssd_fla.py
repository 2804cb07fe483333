"""Computes Mamba-2 by kernels of flash-linear-attention (FLA), on CUDA in bf16.

SSD is the gated delta rule without the term that reads the state: with w = 0 for all tokens, FLA's kernels of the delta
rule compute S = exp(g) S + k v^T.  So a pass calls them with k = B, q = C, v = dt x and zeros for w.  These kernels
share B and C among the heads of a group, and they take and return states.  They never make the host wait.  FLA's
kernels of simple gated linear attention (chunk_fwd_h) would: they read the number of chunks from the GPU.

FLA's kernel of Mamba's norm computes the norm by groups.  It reads the gate as a view of the projections' output.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sft.config import Config
from sft.layers.mixers.mamba import MambaSizes
from sft.layers.mixers.recurrent import FLA_CHUNK as CHUNK
from sft.mcore.linear_attention import fla_functions, fla_kernel
from sft.mcore.linear_attention.fla_compilation import compile_convolution, compile_recurrence
from sft.mcore.linear_attention.fla_functions import TO_BASE_2
from sft.mcore.linear_attention.fla_recurrence import FlaRecurrence
from sft.mcore.linear_attention.fla_rule import Part
from sft.mcore.linear_attention.recurrence import NUMBERS, Fragments
from sft.mcore.linear_attention.ssd import SsdInputs

_NORM = "fla.modules.norm.layernorm_gated"
_SHARED = (
    "fla.ops.utils",
    "fla.ops.common.chunk_delta_h",
    "fla.ops.common.chunk_o",
    "fla.modules.causal_conv1d.ops",
)
_COMMON = "weight bias eps z group_size norm_before_gate is_rms_norm"
FUNCTIONS: Mapping[str, Mapping[str, str]] = {
    **{module: fla_functions.FUNCTIONS[module] for module in _SHARED},
    _NORM: {"layer_norm_fwd": f"x {_COMMON}", "layer_norm_bwd": f"dy x mean rstd dz {_COMMON}"},
}


class SsdPass:
    """Implements `fla_recurrence.PartPass`.

    functions: FLA's functions (FUNCTIONS); inputs: the inputs of all tokens of the rank
    """

    def __init__(self, functions: Any, inputs: SsdInputs, part: Part) -> None:
        self.part, self._f, self._inputs = part, functions, SsdInputs(*(x[part.tokens][None] for x in inputs))
        self._pack = part.sequences
        self._g = functions.chunk_local_cumsum(self._inputs.g, chunk_size=CHUNK, scale=TO_BASE_2, **self._pack)
        self._values = self._scaled(self._inputs.x)
        self._dvalues: Tensor | None = None

    def maps(self) -> tuple[Tensor, Tensor]:
        sequence, chunk = self._pack["chunk_indices"].unbind(1)
        first, stop = self.part.boundaries[sequence] + chunk * CHUNK, self.part.boundaries[sequence + 1]
        of_chunks = self._g[0].index_select(0, torch.minimum(first + CHUNK, stop) - 1)
        sums = torch.segment_reduce(of_chunks.double(), "sum", offsets=self.part.chunk_offsets, axis=0, unsafe=True)
        decays = (sums / TO_BASE_2).exp()  # not exp2, which torch compiles when it is first called
        return decays[..., None, None].to(self._inputs.state_dtype), self._run(None, is_last_wanted=True)[1]

    def outputs(self, states: Tensor | None) -> Tensor:
        before, _ = self._run(states)
        out: Tensor = self._f.chunk_fwd_o(v=self._values, h=before, **self._qk)
        return out[0]

    def state_gradients(self, grad: Tensor) -> Tensor:
        like = SsdInputs(*(x[0] for x in self._inputs)).zero_states(self.part.num_fragments)
        dstates: Tensor = self._reverse(grad, like, None)[1]
        return dstates

    def gradients(self, grad: Tensor, states: Tensor | None, last: Tensor | None) -> SsdInputs:
        before, _ = self._run(states)
        dbefore, _, dvalues = self._reverse(grad, None, last)
        dc, db, _, dg = self._f.chunk_bwd_dqkwg(v=self._values, do=self._of(grad), h=before, dh=dbefore, **self._qk)
        del before, dbefore
        dg = self._f.chunk_local_cumsum(dg, chunk_size=CHUNK, reverse=True, **self._pack)
        ddt = (dvalues.float() * self._inputs.x.float()).sum(-1)
        results = dc, db, self._scaled(dvalues), dg, ddt
        return SsdInputs(*(dx[0].to(x.dtype) for dx, x in zip(results, self._inputs)))

    @property
    def _qk(self) -> Mapping[str, Any]:
        """The arguments of kernels that multiply queries and keys within chunks."""
        c, b = self._inputs.c, self._inputs.b
        return {"q": c, "k": b, "g": self._g, "scale": 1.0, "chunk_size": CHUNK, **self._pack}

    @property
    def _zeros(self) -> Tensor:
        """w, [1, t, heads, N]"""
        return self._inputs.b.new_zeros((*self._inputs.x.shape[:3], self._inputs.b.shape[-1]))

    def _scaled(self, x: Tensor) -> Tensor:
        """dt x, in the dtype of x, rounded once"""
        return torch.mul(x, self._inputs.dt[..., None]).to(x.dtype)

    def _run(self, states: Tensor | None, *, is_last_wanted: bool = False) -> tuple[Any, Any]:
        """The state before each chunk, and if wanted the last state of each fragment."""
        before, _, last = self._f.chunk_gated_delta_rule_fwd_h(
            k=self._inputs.b,
            w=self._zeros,
            u=self._values,
            g=self._g,
            initial_state=states,
            output_final_state=is_last_wanted,
            save_new_value=False,
            chunk_size=CHUNK,
            chunk_offsets=self.part.chunk_offsets,
            **self._pack,
        )
        return before, last

    def _reverse(self, grad: Tensor, like: Tensor | None, last: Tensor | None) -> Any:
        """Gradients of the state before each chunk, of initial states if `like` has their shape, and of dt x."""
        dout = self._of(grad)
        if self._dvalues is None:
            self._dvalues = self._f.chunk_bwd_dv_local(do=dout, **self._qk)
        return self._f.chunk_gated_delta_rule_bwd_dhu(
            w=self._zeros,
            do=dout,
            dv=self._dvalues,
            h0=like,
            dht=last,
            chunk_offsets=self.part.chunk_offsets,
            **self._qk,
        )

    def _of(self, grad: Tensor) -> Tensor:
        return grad[self.part.tokens][None]


class FlaSsdKernel(FlaRecurrence[SsdInputs]):
    """Implements `ssd.SsdKernel` with kernels of FLA."""

    maps = NUMBERS

    def compile(self, config: Config, device: torch.device) -> None:
        """Call every kernel of a layer on as many tokens as a rank has of a full pack."""
        mamba, cp = config.model.mamba, config.parallel.cp
        sizes, tokens = MambaSizes.of(mamba, config.parallel.tp, 2), max(2, config.data.seq_length // cp)

        def random(*shape: int) -> Tensor:
            return torch.randn(tokens, *shape, device=device).bfloat16()

        by_group = sizes.groups, sizes.state_dim
        for num_linked in {0, 2 if cp > 1 else 0}:
            g, dt = -random(sizes.heads).float().exp(), random(sizes.heads).float().exp()
            inputs = SsdInputs(random(*by_group), random(*by_group), random(sizes.heads, sizes.head_dim), g, dt)
            compile_recurrence(self, inputs, Fragments.of([0, tokens // 2, tokens], range(num_linked)), device)
            is_linked = num_linked > 0
            compile_convolution(self, random(sizes.channels), mamba.conv_kernel, has_states=is_linked, has_bias=True)
            wide = sizes.groups, sizes.inner // sizes.groups
            x, gate, weight = (x.requires_grad_() for x in (random(*wide), random(*wide), random(*wide)[0]))
            self.grouped_norm(x, gate, weight, config.model.norm_epsilon)[0].sum().backward()

    def part_pass(self, inputs: SsdInputs, part: Part) -> SsdPass:
        return SsdPass(self.functions, inputs, part)

    def identity(self, inputs: SsdInputs, count: int) -> Tensor:
        shape = (count, inputs.x.shape[1], 1, 1)
        return torch.ones(shape, dtype=inputs.state_dtype, device=inputs.x.device)

    def grouped_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, scale = _FusedGroupedNorm.apply(self.functions, x, gate, weight, eps)
        return out, scale

    def grouped(self, x: Tensor, gate: Tensor, weight: Tensor, scale: Tensor, eps: float) -> Tensor:
        return _grouped(self.functions, x, gate, weight, eps)[0]


def made() -> FlaSsdKernel:
    return FlaSsdKernel(fla_functions.loaded(FUNCTIONS), "flash-linear-attention")


def why_not(config: Config, device_type: str) -> str | None:
    """The reason why this run cannot use FLA; None if it can."""
    if (reason := fla_functions.excluded_by(config, device_type)) is not None:
        return reason
    if (size := config.model.mamba.state_dim) > fla_kernel.MAX_KEY_DIM:
        return f"FLA has states of at most {fla_kernel.MAX_KEY_DIM} rows, but model.mamba.state_dim is {size}"
    return fla_functions.problem(FUNCTIONS) or fla_kernel.old_gpu() or fla_kernel.wrong_triton()


def _grouped(functions: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm by groups without gradients, and 1 / root mean square [groups * t] in the kernel's order."""
    if not x.numel():
        return torch.empty_like(x), x.new_empty(0, dtype=torch.float32)
    out, _, scale = functions.layer_norm_fwd(x.flatten(1), z=gate.flatten(1), **_how(weight, eps))
    return out.view(x.shape), scale


def _how(weight: Tensor, eps: float) -> dict[str, Any]:
    arguments = {"weight": weight.flatten(), "bias": None, "eps": eps, "group_size": weight.shape[1]}
    return {**arguments, "norm_before_gate": False, "is_rms_norm": True}


class _FusedGroupedNorm(torch.autograd.Function):
    """The norm by groups.  Saves the gate without a copy, as a view of the projections' output."""

    @staticmethod
    def forward(ctx: Any, functions: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, scale = _grouped(functions, x, gate, weight, eps)
        ctx.save_for_backward(x, gate, weight, scale)
        ctx.setting = functions, eps
        ctx.mark_non_differentiable(scale)
        return out, scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        (x, gate, weight, scale), (functions, eps) = ctx.saved_tensors, ctx.setting
        if not x.numel():
            return None, torch.zeros_like(x), torch.zeros_like(gate), torch.zeros_like(weight), None
        rows, dz = grad.contiguous().flatten(1), x.new_empty(len(x), x[0].numel())
        dx, dweight = functions.layer_norm_bwd(
            rows, x.flatten(1), mean=None, rstd=scale, z=gate.flatten(1), dz=dz, **_how(weight, eps)
        )[:2]
        return None, dx.view(x.shape), dz.view(x.shape), dweight.view(weight.shape), None
