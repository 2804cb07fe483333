"""Defines the interface of recurrences: the methods of a kernel, and what the code around it may assume.

A recurrence has a state S [K, V] for every head, which each token of a document reads and changes.  A fragment is a run
of consecutive tokens of one document on one rank.  The state after it is an affine function of the state before it:

    S_out = A(S_in) + B

A and B are the fragment's map.  The recurrence decides what A is (`Maps`): a matrix that multiplies the state, or a
number.  A linked fragment with a predecessor begins with the state after its predecessor (sft/parallel/fragments.py).
All other fragments begin with the state zero.

A recurrence is a file with a NamedTuple of its inputs, and one class for each kernel: delta_rule.py, for example.
documents.py, recurrent_attention.py, state_passing.py, relayout.py and short_convolution.py serve all recurrences.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from sft.parallel.taps import Taps


class Maps(NamedTuple):
    """Functions that apply the part A of maps to states, for tensors of maps [..., R, C] and of states [..., K, V].

    times       (A, states) -> A(states)
    transposed  A -> the A for gradients of states
    """

    times: Callable[[Tensor, Tensor], Tensor]
    transposed: Callable[[Tensor], Tensor]


MATRICES = Maps(torch.matmul, lambda maps: maps.mT)  # A is a matrix [K, K]
NUMBERS = Maps(torch.mul, lambda maps: maps)  # A is a number, [1, 1]


class RecurrentInputs(Protocol):
    """Inputs of a kernel for the t tokens of a rank, or their gradients: a NamedTuple of tensors [t, ...]."""

    @property
    def values(self) -> Tensor:
        """The input [t, heads, V] whose shape and dtype the outputs have."""

    @property
    def state_dtype(self) -> torch.dtype:
        """Dtype of states, maps and decays."""

    def zero_states(self, count: int) -> Tensor:
        """States of 0, [count, heads, K, V], of dtype `state_dtype`."""

    def __iter__(self) -> Iterator[Tensor]: ...


InputsT = TypeVar("InputsT", bound=RecurrentInputs)
GradientsT = TypeVar("GradientsT", bound=RecurrentInputs, covariant=True)


def wide_dtype(values: Tensor) -> torch.dtype:
    """`RecurrentInputs.state_dtype`: float64 for float64 values, otherwise float32."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


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


class Convolution(Protocol):
    """One implementation of the convolution before a recurrence."""

    def convolution_plan(self, taps: Taps, device: torch.device) -> Any:
        """Tensors that describe a microbatch for `convolution`."""

    def convolution(self, x: Tensor, weight: Tensor, plan: Any, cp_group: Any, bias: Tensor | None = None) -> Tensor:
        """The function `short_convolution.short_convolution`, with gradients."""


class Kernel(Convolution, Protocol[InputsT]):
    """One implementation of a recurrence, with its convolution.

    States, maps and their gradients have the dtype `RecurrentInputs.state_dtype`.
    The argument `schedule` of the other methods is a result of the method `schedule` of the same kernel, and `inputs`
    is a result of `prepared`.
    """

    @property
    def maps(self) -> Maps: ...

    def schedule(self, fragments: Fragments, heads: int, device: torch.device) -> Any:
        """The `FragmentSchedule` of a microbatch.  heads: heads with a state on this rank"""

    def prepared(self, inputs: InputsT, schedule: Any) -> Any:
        """The inputs, with values that this kernel computes from the inputs alone, for one forward or backward pass."""

    def transitions(self, inputs: Any, schedule: Any) -> tuple[Tensor, Tensor]:
        """The maps of the linked fragments: A [m, heads, R, C], B [m, heads, K, V]."""

    def forward(self, inputs: Any, schedule: Any, states: Tensor | None) -> tuple[Tensor, Tensor]:
        """The outputs [t, heads, V] in the dtype of the values, and a tensor that this kernel saves for backward.

        states: [m, heads, K, V], initial states of the linked fragments; None: zero
        """

    def state_gradients(self, grad: Tensor, inputs: Any, schedule: Any) -> Tensor:
        """The gradients of the linked fragments' initial states through outputs, [m, heads, K, V].

        The gradients through last states are left out.  Outputs are affine in initial states, so the result depends on
        no state.

        grad: [t, heads, V], gradients of the outputs
        """

    def backward(
        self,
        grad: Tensor,
        inputs: Any,
        schedule: Any,
        states: Tensor | None,
        saved: Tensor,
        last_gradients: Tensor | None,
    ) -> InputsT:
        """The gradients of the inputs.

        grad            [t, heads, V], gradients of the outputs
        states, saved   the argument `states` and the second result of `forward`
        last_gradients  [m, heads, K, V], gradients of the linked fragments' last states; None: zero
        """
