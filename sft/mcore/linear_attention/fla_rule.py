"""Computes the gated delta rule by FLA's kernels on a part of a rank's fragments: the linked ones, or all others.

FLA's chunks of 64 tokens need, besides q, k, v, g and beta, only the state before each chunk.  So a pass has steps:

    1. normalise q and k, add up g within each chunk, and solve the triangular system of each chunk       `DeltaPass`
    2. for linked fragments: the map of each fragment                                                     `maps`
    3. the state before each chunk, from initial states, and with it the outputs                          `outputs`

Backward repeats step 1.  Then it computes gradients of states from the last chunk to the first, for linked fragments
twice.  The first time is without gradients of last states (`state_gradients`).  Ranks pass the results on, which gives
the gradients of last states.  The second time uses these (`gradients`).  Only kernels that go from chunk to chunk run
twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sft.layers.mixers.recurrent import FLA_CHUNK as CHUNK
from sft.mcore.device import send
from sft.mcore.linear_attention.delta_rule import NORM_EPS, Inputs
from sft.mcore.linear_attention.fla_functions import TO_BASE_2


@dataclass(frozen=True, eq=False)
class Part:
    """Consecutive fragments of a microbatch, as all kernels of FLA take them.  All layers pass the same tensors.

    tokens         the tokens of the fragments among the tokens of the rank
    has_states     whether the fragments are linked
    boundaries     int64 [n + 1], boundaries of the fragments among these tokens
    chunk_indices  int64 [chunks, 2], for each chunk the index of its fragment, and its index within the fragment
    chunk_offsets  int64 [n + 1], number of chunks before each fragment, then the number of all chunks
    """

    tokens: slice
    has_states: bool
    boundaries: Tensor
    chunk_indices: Tensor
    chunk_offsets: Tensor

    @staticmethod
    def of(boundaries: np.ndarray, has_states: bool, device: torch.device) -> "Part":
        """boundaries: int64 [n + 1], boundaries of the fragments among the tokens of the rank"""
        first, stop = int(boundaries[0]), int(boundaries[-1])
        indices, offsets = chunks(boundaries)
        on_device = (send(torch.from_numpy(x), device) for x in (boundaries - first, indices, offsets))
        return Part(slice(first, stop), has_states, *on_device)

    @property
    def sequences(self) -> dict[str, Tensor]:
        """Arguments of FLA's kernels."""
        return {"cu_seqlens": self.boundaries, "chunk_indices": self.chunk_indices}

    @property
    def num_fragments(self) -> int:
        return len(self.boundaries) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.stop - self.tokens.start)


def chunks(boundaries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For sequences with these boundaries, `Part.chunk_indices` and `Part.chunk_offsets`."""
    counts = -(-np.diff(boundaries) // CHUNK)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])
    sequence = np.repeat(np.arange(len(counts)), counts)
    return np.stack([sequence, np.arange(offsets[-1]) - offsets[sequence]], axis=1), offsets


class DeltaPass:
    """Implements `fla_recurrence.PartPass`.

    functions: FLA's functions (`fla_functions.functions`); inputs: the inputs of all tokens of the rank
    """

    def __init__(self, functions: Any, inputs: Inputs, part: Part) -> None:
        self._normalise(functions, inputs, part)
        self._w, self._u, self._solution = functions.chunk_gated_delta_rule_fwd_intra(
            k=self._k, v=self._inputs.v, g=self._g, beta=self._inputs.beta, chunk_size=CHUNK, **self._pack
        )

    def _normalise(self, functions: Any, inputs: Inputs, part: Part) -> None:
        """Store the inputs of the part, its queries and keys divided by their norms, and sums of g within chunks."""
        self.part, self._f, self._inputs = part, functions, Inputs(*(x[part.tokens][None] for x in inputs))
        self._pack, self._scale = part.sequences, inputs.k.shape[-1] ** -0.5
        self._q, self._q_scale = functions.l2norm_fwd(self._inputs.q, eps=NORM_EPS)
        self._k, self._k_scale = functions.l2norm_fwd(self._inputs.k, eps=NORM_EPS)
        self._g = functions.chunk_local_cumsum(self._inputs.g, chunk_size=CHUNK, scale=TO_BASE_2, **self._pack)
        self._dv: Tensor | None = None

    @property
    def _qk(self) -> Mapping[str, Any]:
        """The arguments of kernels that multiply queries and keys within chunks."""
        return {"q": self._q, "k": self._k, "g": self._g, "scale": self._scale, "chunk_size": CHUNK, **self._pack}

    @property
    def _of_states(self) -> Mapping[str, Any]:
        """The arguments, by name, that all kernels take that carry a state from chunk to chunk."""
        return {"k": self._k, "w": self._w, "g": self._g, "chunk_size": CHUNK}

    @property
    def _of_queries(self) -> Tensor:
        """The queries for the backward kernel that goes from chunk to chunk."""
        return self._q

    def maps(self) -> tuple[Tensor, Tensor]:
        """The maps A and B of the fragments."""
        heads, value_dim, key_dim = *self._inputs.v.shape[2:], self._inputs.k.shape[-1]
        shape = (self.part.num_fragments, heads, key_dim, value_dim + key_dim)
        both = torch.empty(shape, dtype=self._inputs.state_dtype, device=self._inputs.v.device)
        self._f.chunk_cp_fwd_h(u=self._u, hm=both, cu_seqlens=self.part.boundaries, multi_seqs=True, **self._of_states)
        return both[..., value_dim:].contiguous(), both[..., :value_dim].contiguous()

    def outputs(self, states: Tensor | None) -> Tensor:
        before, values = self._states(states)
        out: Tensor = self._f.chunk_fwd_o(v=values, h=before, **self._qk)
        return out[0]

    def state_gradients(self, grad: Tensor) -> Tensor:
        """The gradients of the initial states through outputs, without those through last states."""
        inputs = Inputs(*(x[0] for x in self._inputs))
        like = inputs.zero_states(self.part.num_fragments)
        dstates: Tensor = self._reverse(grad, like, None)[1]
        return dstates

    def gradients(self, grad: Tensor, states: Tensor | None, last: Tensor | None) -> Inputs:
        """Gradients of the inputs of this part."""
        before, values = self._states(states)
        dbefore, _, du = self._reverse(grad, None, last)
        dout = self._of(grad)
        dq, dk, dw, dg = self._f.chunk_bwd_dqkwg(v=values, w=self._w, h=before, dv=du, do=dout, dh=dbefore, **self._qk)
        del before, values, dbefore  # as large as ten of the other tensors
        more_dk, dv, dbeta, more_dg = self._f.prepare_wy_repr_bwd(
            k=self._k, v=self._inputs.v, beta=self._inputs.beta, g=self._g, A=self._solution, dw=dw, du=du, **self._pack
        )
        dg = self._f.chunk_local_cumsum(dg.add_(more_dg), chunk_size=CHUNK, reverse=True, **self._pack)
        dq = self._f.l2norm_bwd(self._q, self._q_scale, dq, eps=NORM_EPS)
        dk = self._f.l2norm_bwd(self._k, self._k_scale, dk.add_(more_dk), eps=NORM_EPS)
        return Inputs(*(dx[0].to(x.dtype) for dx, x in zip((dq, dk, dv, dg, dbeta), self._inputs)))

    def _states(self, states: Tensor | None) -> tuple[Any, Any]:
        """The state before each chunk, and the values that chunks write."""
        before, values, _ = self._f.chunk_gated_delta_rule_fwd_h(
            u=self._u,
            initial_state=states,
            output_final_state=False,
            chunk_offsets=self.part.chunk_offsets,
            **self._of_states,
            **self._pack,
        )
        return before, values

    def _reverse(self, grad: Tensor, like: Tensor | None, last: Tensor | None) -> Any:
        """Gradients of the state before each chunk, of initial states if `like` has their shape, and of values."""
        if self._dv is None:
            self._dv = self._local_gradients(grad)
        return self._f.chunk_gated_delta_rule_bwd_dhu(
            q=self._of_queries,
            do=self._of(grad),
            dv=self._dv,
            h0=like,
            dht=last,
            scale=self._scale,
            chunk_offsets=self.part.chunk_offsets,
            **self._of_states,
            **self._pack,
        )

    def _local_gradients(self, grad: Tensor) -> Tensor:
        """The part of the gradients of values that comes from outputs of their own chunk."""
        dv: Tensor = self._f.chunk_bwd_dv_local(do=self._of(grad), **self._qk)
        return dv

    def _of(self, grad: Tensor) -> Tensor:
        return grad[self.part.tokens][None]
