"""Predicts the exposed seconds of messages of sharded gradients and weights, which computation does not hide.

    microbatch, forward    with parallel.shard = weights, a unit's weights are gathered while the previous unit computes
    microbatch, backward   while a unit computes, the gradients of the previous unit are reduced, and with
                           parallel.shard = weights, the weights of the next unit are gathered
    step                   replicas sum the gradients of their shards.  With parallel.shard = gradients, whole weights
                           are gathered after the update

The computation of one layer hides the messages beside it.  The prediction compares sums over all layers, as if all
layers took the same time.  Nothing hides the gathers before the first layer, the reduction of the head (the next unit
waits for it) and the reduction of the embedding (no computation follows).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from sft.estimate.messages import Messages, unhidden
from sft.estimate.parameters import Numbers
from sft.estimate.stage import Stage
from sft.estimate.units import StageUnits, UnitSizes, present

# A hidden message delays computation by this share of its time.  Assumed: its kernels take 16 of 132 SMs of an H100.
SLOWED = 0.12


@dataclass(frozen=True)
class ShardMessages:
    """The messages of one rank of a stage, with parallel.shard = gradients or weights."""

    stage: Stage
    units: StageUnits
    messages: Messages

    @staticmethod
    def of(stage: Stage, messages: Messages) -> "ShardMessages":
        return ShardMessages(stage, StageUnits.of(stage), messages)

    def of_microbatch(self, forward_s: float, backward_s: float) -> float:
        """Exposed seconds of a microbatch.  forward_s, backward_s: seconds in which the layers compute"""
        units, parallel, constants = self.units, self.stage.config.parallel, self.messages.constants
        layers = [*units.layers.values(), *present(units.block)]
        ends = [*present(units.embedding), *([units.head] if self.stage.is_last else [])]
        shown, forward, reduced, gathered = self._reduced(ends), 0.0, self._reduced(layers), 0.0
        if parallel.shard == "weights":
            shown += self._gathered([*present(units.embedding), *layers[:1]])
            forward, gathered = self._gathered([*layers[1:], units.head]), self._gathered(layers)
        if not parallel.overlap:  # weights are gathered ahead also without overlap
            shown, reduced = shown + reduced, 0.0
        backward = gathered + reduced
        hidden = SLOWED * (min(forward, forward_s) + min(backward, backward_s))
        return shown + hidden + unhidden(constants, forward, forward_s) + unhidden(constants, backward, backward_s)

    def of_step(self) -> float:
        """Exposed seconds of a step after its last microbatch."""
        trained, both = self.units.trained, self._element * (1 + 1 / self.messages.constants.reduce_scatter.value)
        summed = 0.0  # an all-reduce is a reduce-scatter and a gather
        for number, group in ((trained.dense, self._dense), (trained.experts, self._experts)):
            if number and group.copies > 1:
                num_bytes = both * number / group.ranks * (group.copies - 1) / group.copies
                gb_s = self.messages.wide_link(group.copies, group.stride * group.ranks)
                summed += self.messages.seconds(num_bytes, gb_s, 2)
        if self.stage.config.parallel.shard == "weights":
            return summed
        return summed + sum(self._seconds(unit.trained, self.stage.rank.width) for unit in self.units)

    # --- parts ---------------------------------------------------------------------------------------------------

    @property
    def _element(self) -> int:
        """Bytes of an element of the gradients."""
        return self.stage.config.optim.gradient_bytes

    @property
    def _dense(self) -> "_Group":
        layout = self.stage.layout
        return _Group(layout.shard_ranks, layout.tp, layout.dp * layout.cp // layout.shard_ranks)

    @property
    def _experts(self) -> "_Group":
        layout = self.stage.layout
        ranks = layout.expert_shard_ranks
        return _Group(ranks, layout.ep * layout.etp, layout.expert_copies // ranks)

    def _gathered(self, units: Iterable[UnitSizes]) -> float:
        listed = list(units)
        seconds = {id(unit): self._seconds(unit.whole, self.stage.rank.width) for unit in _distinct(listed)}
        return sum(seconds[id(unit)] for unit in listed)

    def _reduced(self, units: Iterable[UnitSizes]) -> float:
        width = self._element / self.messages.constants.reduce_scatter.value
        listed = list(units)
        seconds = {id(unit): self._seconds(unit.trained, width) for unit in _distinct(listed)}
        return sum(seconds[id(unit)] for unit in listed)

    def _seconds(self, numbers: Numbers, width: float) -> float:
        """Seconds in which ranks exchange their parts of these elements.  width: bytes of an element"""
        total = 0.0
        for number, group in ((numbers.dense, self._dense), (numbers.experts, self._experts)):
            if number and group.ranks > 1:
                num_bytes = width * number * (group.ranks - 1) / group.ranks
                total += self.messages.seconds(num_bytes, self.messages.wide_link(group.ranks, group.stride), 1)
        return total


def _distinct(units: Iterable[UnitSizes]) -> Iterable[UnitSizes]:
    """The different unit objects.  Layers that are alike share one object."""
    return {id(unit): unit for unit in units}.values()


class _Group(NamedTuple):
    """A shard group.

    ranks   number of ranks of the group
    stride  distance between two neighbouring ranks of the group
    copies  number of groups that hold copies of the same parameters
    """

    ranks: int
    stride: int
    copies: int
