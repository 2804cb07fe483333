"""Divides fragments into parts, and calls the kernels of flash-linear-attention (FLA) for each part.

Linked fragments come first, and only they have tensors of states.  So the linked fragments are one part, and all other
fragments are another part.  FLA's kernels run once for each part.  Most microbatches have one part.

No pass makes the host wait for the GPU: the host computes all arguments about fragments once for all layers.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol

import numpy as np
import torch
from torch import Tensor

from sft.mcore.linear_attention.fla_layer import FlaLayer
from sft.mcore.linear_attention.fla_rule import Part
from sft.mcore.linear_attention.recurrence import Fragments, GradientsT, InputsT, Maps


@dataclass(frozen=True)
class FlaSchedule:
    """Fragments, and their non-empty parts: first the linked fragments, then the others."""

    fragments: Fragments
    parts: tuple[Part, ...]

    @staticmethod
    def of(fragments: Fragments, device: torch.device) -> "FlaSchedule":
        edges, count = fragments.boundaries, len(fragments.linked)
        assert (fragments.linked == np.arange(count)).all(), f"linked fragments {fragments.linked} are not the first"
        cut = [(edges[: count + 1], True), (edges[count:], False)]
        return FlaSchedule(fragments, tuple(Part.of(x, linked, device) for x, linked in cut if len(x) > 1))


class PartPass(Protocol[GradientsT]):
    """One forward or backward pass over a part that has tokens.

    states  initial states of the fragments; None: zero
    grad    gradients of the outputs of all tokens of the rank
    last    gradients of the fragments' last states; None: zero
    """

    part: Part

    def maps(self) -> tuple[Tensor, Tensor]:
        """The maps A and B of the fragments."""

    def outputs(self, states: Tensor | None) -> Tensor: ...

    def state_gradients(self, grad: Tensor) -> Tensor:
        """The gradients of the initial states through outputs, without those through last states."""

    def gradients(self, grad: Tensor, states: Tensor | None, last: Tensor | None) -> GradientsT:
        """The gradients of the inputs of this part."""


@dataclass(frozen=True)
class PreparedInputs(Generic[InputsT]):
    """The inputs of a pass, and for each part with tokens a `PartPass`, which has computed all that needs no states."""

    inputs: InputsT
    passes: tuple[PartPass[InputsT], ...]

    @property
    def linked(self) -> PartPass[InputsT] | None:
        return next((x for x in self.passes if x.part.has_states), None)


@dataclass(frozen=True)
class FlaRecurrence(FlaLayer, Generic[InputsT]):
    """Implements `recurrence.Kernel` with kernels of FLA.

    functions: FLA's functions (`fla_functions.functions`); reason: why this run uses this kernel, for the log
    """

    maps: ClassVar[Maps]
    functions: Any
    reason: str = ""

    def __str__(self) -> str:
        return f"fla ({self.reason})"

    @abstractmethod
    def part_pass(self, inputs: InputsT, part: Part) -> PartPass[InputsT]: ...

    @abstractmethod
    def identity(self, inputs: InputsT, count: int) -> Tensor:
        """The maps A of `count` fragments without tokens."""

    def schedule(self, fragments: Fragments, heads: int, device: torch.device) -> FlaSchedule:
        return FlaSchedule.of(fragments, device)

    def prepared(self, inputs: InputsT, schedule: FlaSchedule) -> PreparedInputs[InputsT]:
        parts = [part for part in schedule.parts if part.num_tokens]  # FLA does not take empty inputs
        return PreparedInputs(inputs, tuple(self.part_pass(inputs, part) for part in parts))

    def transitions(self, prepared: PreparedInputs[InputsT], schedule: FlaSchedule) -> tuple[Tensor, Tensor]:
        if prepared.linked is not None:
            return prepared.linked.maps()
        count = len(schedule.fragments.linked)
        return self.identity(prepared.inputs, count), prepared.inputs.zero_states(count)

    def forward(
        self, prepared: PreparedInputs[InputsT], schedule: FlaSchedule, states: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        parts = [x.outputs(states if x.part.has_states else None) for x in prepared.passes]
        values = prepared.inputs.values
        return _joined(parts, values), values.new_empty(0)

    def state_gradients(self, grad: Tensor, prepared: PreparedInputs[InputsT], schedule: FlaSchedule) -> Tensor:
        if prepared.linked is not None:
            return prepared.linked.state_gradients(grad)
        return prepared.inputs.zero_states(len(schedule.fragments.linked))

    def backward(
        self,
        grad: Tensor,
        prepared: PreparedInputs[InputsT],
        schedule: FlaSchedule,
        states: Tensor | None,
        saved: Tensor,
        last_gradients: Tensor | None,
    ) -> InputsT:
        of_parts = [
            [*x.gradients(grad, *((states, last_gradients) if x.part.has_states else (None, None)))]
            for x in prepared.passes
        ]
        make: Callable[..., InputsT] = type(prepared.inputs)
        return make(*(_joined([part[i] for part in of_parts], x) for i, x in enumerate(prepared.inputs)))


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """The tensors of parts as one tensor; without parts, an empty tensor with the dtype and inner axes of `like`."""
    return parts[0] if len(parts) == 1 else torch.cat([like[:0], *parts])
