"""The gated delta rule on one rank: its inputs, the fragments of a microbatch, and the interface of its kernels.

Every value head has a state S [K, V].  For each token t (Yang et al. 2024, arXiv:2412.06464):

    S = exp(g_t) S        S += k_t (beta_t (v_t - S^T k_t))^T        o_t = S^T q_t

q and k are first divided by their L2 norms, and q is also divided by sqrt(K).  Key head j serves the value heads
j * r to j * r + r - 1, where r = value heads / key heads.

A fragment is a run of consecutive tokens of one document on one rank.  The state after it is an affine function of the
state before it: S_out = A S_in + B.  A and B are the fragment's map.  The state before a linked fragment is that after
its predecessor (sft/parallel/fragments.py).  The state before a fragment without one, or that is not linked, is zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from sft.parallel.taps import Taps

NORM_EPS = 1e-6  # added to the squared norm of q and k, as in transformers and FLA


class Inputs(NamedTuple):
    """Inputs of a kernel for the t tokens of a rank, or their gradients.

    q, k  [t, key heads, K], not normalised
    v     [t, value heads, V]
    g     [t, value heads], logarithm of the decay, at most 0, fp32
    beta  [t, value heads], between 0 and 1
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @property
    def state_dtype(self) -> torch.dtype:
        """Dtype of states, maps and decays: float64 for float64 values, otherwise float32."""
        return torch.float64 if self.v.dtype == torch.float64 else torch.float32

    def zero_states(self, count: int) -> Tensor:
        """[count, value heads, K, V]"""
        shape = (count, self.v.shape[1], self.k.shape[-1], self.v.shape[-1])
        return torch.zeros(shape, dtype=self.state_dtype, device=self.v.device)


@dataclass(frozen=True, eq=False)
class Fragments:
    """The n fragments of a rank's t tokens in one microbatch.  All layers use the same fragments.

    boundaries  int64 [n + 1]: fragment i holds the tokens boundaries[i] to boundaries[i + 1] - 1; the first boundary is
                0, the last one is t.  Fragments may be empty
    linked      int64 [m], ascending: indices of the linked fragments.  Only these have maps, initial states and
                gradients of last states.  All other fragments start with the state zero
    """

    boundaries: np.ndarray
    linked: np.ndarray

    @staticmethod
    def of(boundaries: np.ndarray | Sequence[int], linked: np.ndarray | Sequence[int] = ()) -> "Fragments":
        """Fragments with these boundaries.  Asserts that boundaries do not decrease and that linked fragments exist.

        Fragments.of([0, 130, 194, 324], linked=[0, 2]) -> fragments of 130, 64 and 130 tokens; the first and last are
        linked
        """
        edges, links = np.asarray(boundaries, dtype=np.int64), np.asarray(linked, dtype=np.int64)
        assert edges.ndim == 1 and edges.size and edges[0] == 0, f"boundaries {edges} do not begin with 0"
        assert (np.diff(edges) >= 0).all(), f"boundaries decrease at fragment {np.argmax(np.diff(edges) < 0)}"
        assert links.ndim == 1 and (np.diff(links) > 0).all(), f"linked fragments {links} are not ascending"
        assert not links.size or 0 <= links[0] <= links[-1] < edges.size - 1, f"no such linked fragments: {links}"
        return Fragments(edges, links)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.boundaries)


class FragmentSchedule(Protocol):
    """The fragments of a microbatch, with values that a kernel computes from them once for all layers."""

    @property
    def fragments(self) -> Fragments: ...


class Kernel(Protocol):
    """One implementation of the rule, and of the convolution, the decays and the norm around it.

    States, maps and their gradients have the dtype `Inputs.state_dtype`.
    The argument `schedule` of the other methods is a result of the method `schedule` of the same kernel, and `inputs`
    is a result of `prepared`.
    """

    def schedule(self, fragments: Fragments, heads: int, device: torch.device) -> Any:
        """The `FragmentSchedule` of a microbatch.  heads: value heads of this rank"""

    def prepared(self, inputs: Inputs, schedule: Any) -> Any:
        """The inputs, with what this kernel computes from them alone, for the calls of one forward or backward pass."""

    def transitions(self, inputs: Any, schedule: Any) -> tuple[Tensor, Tensor]:
        """The maps of the linked fragments: A [m, value heads, K, K], B [m, value heads, K, V].  Does not read q."""

    def forward(self, inputs: Any, schedule: Any, states: Tensor | None) -> tuple[Tensor, Tensor]:
        """Outputs [t, value heads, V] in the dtype of v, and a tensor that this kernel saves for backward.

        states: [m, value heads, K, V], initial states of the linked fragments; None: zero
        """

    def state_gradients(self, grad: Tensor, inputs: Any, schedule: Any) -> Tensor:
        """Gradients of the linked fragments' initial states, [m, value heads, K, V].

        Only the outputs of a fragment contribute to the gradient of its initial state, not its last state.
        grad: [t, value heads, V], gradients of the outputs.  Outputs are affine in initial states, so the result
        depends on no state.
        """

    def backward(
        self,
        grad: Tensor,
        inputs: Any,
        schedule: Any,
        states: Tensor | None,
        saved: Tensor,
        last_gradients: Tensor | None,
    ) -> Inputs:
        """Gradients of the inputs.

        grad            [t, value heads, V], gradients of the outputs
        states, saved   the argument `states` and the second result of `forward`
        last_gradients  [m, value heads, K, V], gradients of the linked fragments' last states; None: zero
        """

    def convolution_plan(self, taps: Taps, device: torch.device) -> Any:
        """Tensors that describe a microbatch for `convolution`."""

    def convolution(self, x: Tensor, weight: Tensor, plan: Any, cp_group: Any) -> Tensor:
        """`short_convolution.short_convolution`, the convolution before the rule, with gradients."""

    def log_decay(self, a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
        """The logarithm g of each head's decay, [t, heads], at most 0, in fp32, or in float64 for float64 inputs; with
        gradients.

            g = -exp(a_log) * softplus(a + dt_bias)         a [t, heads], a_log and dt_bias [heads]
        """

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm after the rule, with gradients: weight * normed(x) * silu(gate), [t, heads, V], and the scale 1 /
        root mean square of each head, [t, heads, 1], which has no gradient."""

    def gated(self, x: Tensor, gate: Tensor, weight: Tensor, scale: Tensor, eps: float) -> Tensor:
        """The first result of `gated_norm` once more, without gradients.  scale: its second result"""
