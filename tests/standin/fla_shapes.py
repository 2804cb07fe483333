"""The functions of flash-linear-attention that the trainer calls, with results of the right shapes and of no meaning.

They launch few kernels of torch, and never wait: what waits in a pass is the trainer's code around them.
"""

from typing import Any

import torch
from torch import Tensor

from sft.layers.mixers.recurrent import FLA_CHUNK as CHUNK

Results = tuple[Any, ...]


def _states(k: Tensor, v: Tensor, count: int) -> Tensor:
    return v.new_zeros(1, count, v.shape[2], k.shape[-1], v.shape[-1])


class Shapes:
    """Stands in for `fla_functions.functions()`."""

    @staticmethod
    def l2norm_fwd(x: Tensor, **how: Any) -> Results:
        return x * 1, x.float().sum(-1)

    @staticmethod
    def l2norm_bwd(y: Tensor, rstd: Tensor, dy: Tensor, **how: Any) -> Tensor:
        return dy * rstd[..., None].to(dy.dtype) + y

    @staticmethod
    def chunk_local_cumsum(g: Tensor, **how: Any) -> Tensor:
        return g.float() * 1

    @staticmethod
    def chunk_gated_delta_rule_fwd_intra(*, k: Tensor, v: Tensor, **how: Any) -> Results:
        w = v.new_zeros(*v.shape[:3], k.shape[-1])
        return w, v * 1, v.new_zeros(*v.shape[:3], CHUNK)

    @staticmethod
    def prepare_wy_repr_bwd(*, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, **how: Any) -> Results:
        return k.float() * 1, v * 1, beta * 1, g * 1

    @staticmethod
    def chunk_gated_delta_rule_fwd_h(
        *, k: Tensor, u: Tensor, chunk_indices: Tensor, cu_seqlens: Tensor, output_final_state: bool, **how: Any
    ) -> Results:
        last = _states(k, u, len(cu_seqlens) - 1)[0].float() if output_final_state else None
        return _states(k, u, len(chunk_indices)), u * 1, last

    @staticmethod
    def chunk_gated_delta_rule_bwd_dhu(
        *, k: Tensor, dv: Tensor, h0: Tensor | None, chunk_indices: Tensor, **how: Any
    ) -> Results:
        return _states(k, dv, len(chunk_indices)), None if h0 is None else h0 * 1, dv * 1

    @staticmethod
    def chunk_fwd_o(*, v: Tensor, **how: Any) -> Tensor:
        return v * 1

    @staticmethod
    def chunk_bwd_dv_local(*, do: Tensor, **how: Any) -> Tensor:
        return do * 1

    @staticmethod
    def chunk_bwd_dqkwg(*, q: Tensor, k: Tensor, g: Tensor, w: Tensor | None = None, **how: Any) -> Results:
        return q.float() * 1, k.float() * 1, None if w is None else w * 1, g * 1

    @staticmethod
    def chunk_cp_fwd_h(*, hm: Tensor, **how: Any) -> None:
        hm.zero_()

    @staticmethod
    def fused_kda_gate(g: Tensor, A_log: Tensor, dt_bias: Tensor, **how: Any) -> Tensor:
        return g.float() * A_log.float()[:, None] + dt_bias.float().view(g.shape[1:])

    @staticmethod
    def chunk_kda_fwd_intra(*, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Results:
        pairs = v.new_zeros(*v.shape[:3], CHUNK)
        return k * 1, v * 1, q * 1, k * 1, pairs, pairs * 1

    @staticmethod
    def chunk_gla_fwd_o_gk(*, v: Tensor, **how: Any) -> Tensor:
        return v * 1

    @staticmethod
    def chunk_kda_bwd_dAv(*, v: Tensor, A: Tensor, **how: Any) -> Results:
        return A.float(), v * 1

    @staticmethod
    def chunk_kda_bwd_wy_dqkg_fused(*, q: Tensor, k: Tensor, v: Tensor, g: Tensor, **how: Any) -> Results:
        beta, solution = how["beta"], how["A"]
        return q.float(), k.float(), v * 1, beta.float(), g * 1, solution.float()

    @staticmethod
    def chunk_kda_bwd_intra(*, dq: Tensor, dk: Tensor, db: Tensor, dg: Tensor, **how: Any) -> Results:
        return dq * 1, dk * 1, db * 1, dg * 1

    @staticmethod
    def fused_gdn_gate(g: Tensor, A_log: Tensor, dt_bias: Tensor, **how: Any) -> Tensor:
        return g.float() * A_log.float() + dt_bias.float()

    @staticmethod
    def causal_conv1d_fwd(*, x: Tensor, **how: Any) -> Results:
        return x * 1, None

    @staticmethod
    def causal_conv1d_bwd(
        *, x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, **how: Any
    ) -> Results:
        dbias, states = (None if x is None else torch.zeros_like(x) for x in (bias, initial_state))
        return x + dy, torch.zeros_like(weight), dbias, None, states

    @staticmethod
    def layer_norm_gated_fwd(x: Tensor, g: Tensor, **how: Any) -> Results:
        return x * g, None, x.float().sum(-1), x

    @staticmethod
    def layer_norm_gated_bwd(dy: Tensor, x: Tensor, g: Tensor, *, weight: Tensor, **how: Any) -> Results:
        return dy * g, dy * x, torch.zeros_like(weight), None

    @staticmethod
    def layer_norm_fwd(x: Tensor, *, z: Tensor, group_size: int, **how: Any) -> Results:
        return x * z, None, x.new_zeros(x.numel() // group_size, dtype=torch.float32)

    @staticmethod
    def layer_norm_bwd(dy: Tensor, x: Tensor, *, weight: Tensor, dz: Tensor, **how: Any) -> Results:
        return dy * x, torch.zeros_like(weight), None, dz.copy_(dy)
