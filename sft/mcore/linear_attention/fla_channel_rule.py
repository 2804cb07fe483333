"""Computes the delta rule with a decay for each channel, by FLA's kernels of Kimi Delta Attention (fla.ops.kda).

A pass has the same steps as in fla_rule.py.  Kernels that go from chunk to chunk take decayed inputs: each key times
the decay from its token to the end of the chunk, and each query times the decay from the start of the chunk.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sft.layers.mixers.recurrent import FLA_CHUNK as CHUNK
from sft.mcore.linear_attention.delta_rule import NORM_EPS, Inputs
from sft.mcore.linear_attention.fla_rule import DeltaPass, Part


class ChannelPass(DeltaPass):
    """One forward or backward pass over a part that has tokens.  inputs.g: [t, heads, K]"""

    def __init__(self, functions: Any, inputs: Inputs, part: Part) -> None:
        self._normalise(functions, inputs, part)
        self._w, self._u, self._decayed_q, self._decayed_k, self._weights, self._solution = (
            functions.chunk_kda_fwd_intra(
                gk=self._g, v=self._inputs.v, beta=self._inputs.beta, disable_recompute=True, **self._qk
            )
        )

    @property
    def _qk(self) -> Mapping[str, Any]:
        return {"q": self._q, "k": self._k, "scale": self._scale, "chunk_size": CHUNK, **self._pack}

    @property
    def _of_states(self) -> Mapping[str, Any]:
        return {"k": self._decayed_k, "w": self._w, "gk": self._g, "chunk_size": CHUNK}

    @property
    def _of_queries(self) -> Tensor:
        return self._decayed_q

    def outputs(self, states: Tensor | None) -> Tensor:
        before, values = self._states(states)
        arguments = {name: x for name, x in self._qk.items() if name != "k"}
        out: Tensor = self._f.chunk_gla_fwd_o_gk(v=values, g=self._g, A=self._weights, h=before, **arguments)
        return out[0]

    def gradients(self, grad: Tensor, states: Tensor | None, last: Tensor | None) -> Inputs:
        before, values = self._states(states)
        of_weights, self._dv = self._of_pairs(grad, values)
        dbefore, _, du = self._reverse(grad, None, last)
        dq, dk, dv, dbeta, dg, of_solution = self._f.chunk_kda_bwd_wy_dqkg_fused(
            v=self._inputs.v,
            v_new=values,
            g=self._g,
            beta=self._inputs.beta,
            A=self._solution,
            h=before,
            do=self._of(grad),
            dh=dbefore,
            dv=du,
            chunk_offsets=self.part.chunk_offsets,
            **self._qk,
        )
        del before, values, dbefore
        dq, dk, dbeta, dg = self._f.chunk_kda_bwd_intra(
            q=self._q,
            k=self._k,
            g=self._g,
            beta=self._inputs.beta,
            dAqk=of_weights,
            dAkk=of_solution,
            dq=dq,
            dk=dk,
            db=dbeta,
            dg=dg,
            chunk_size=CHUNK,
            **self._pack,
        )
        dg = self._f.chunk_local_cumsum(dg, chunk_size=CHUNK, reverse=True, **self._pack)
        dq = self._f.l2norm_bwd(self._q, self._q_scale, dq, eps=NORM_EPS)
        dk = self._f.l2norm_bwd(self._k, self._k_scale, dk, eps=NORM_EPS)
        return Inputs(*(dx[0].to(x.dtype) for dx, x in zip((dq, dk, dv, dg, dbeta), self._inputs)))

    def _local_gradients(self, grad: Tensor) -> Tensor:
        return self._of_pairs(grad, self._u)[1]

    def _of_pairs(self, grad: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the weights of pairs, and the part of the values' gradients from outputs of their own chunk.

        The second result does not depend on `values`.
        """
        dweights, dv = self._f.chunk_kda_bwd_dAv(v=values, do=self._of(grad), A=self._weights, **self._qk)
        return dweights, dv
