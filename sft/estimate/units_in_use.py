"""Computes the bytes of the units that are whole at each moment of a step, with parallel.shard = gradients or weights.

    forward    the unit that computes is whole, and the next unit, whose gather has begun
    loss       the head is whole, in forward and backward
    backward   the same as in forward, with the units in reverse order.  The gradients of the unit that computes are
               also whole, and those of the unit that has just computed, which are being reduced

Forward has no gradients, so backward needs more.  Backward of the embedding needs no weights.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sft.estimate.parameters import Numbers
from sft.estimate.stage import Stage
from sft.estimate.units import StageUnits, UnitSizes, present

WHOLE_WEIGHTS, WHOLE_GRADIENTS = "gathered weights", "gradients in reduction"


@dataclass(frozen=True)
class UnitsInUse:
    """The units of a stage, and which of them are whole.  The methods return bytes by name, without zeros."""

    stage: Stage
    units: StageUnits

    @staticmethod
    def of(stage: Stage) -> "UnitsInUse":
        return UnitsInUse(stage, StageUnits.of(stage))

    @property
    def embedding(self) -> UnitSizes:
        assert self.units.embedding is not None
        return self.units.embedding

    def at_head(self) -> dict[str, float]:
        """Bytes during the loss."""
        return self._bytes(self.units.head)

    def at_block(self) -> dict[str, float]:
        """Bytes during backward of the block for multi-token prediction."""
        assert self.units.block is not None
        return self._bytes(self.units.block, before=[self.units.head], after=present(self.units.norm))

    def at_layers(self, numbers: Iterable[int]) -> dict[str, float]:
        """Bytes during backward of one of these layers: the one that needs most.  numbers: layers, from 1"""
        layers, chosen = self._layers, {*numbers}
        # Layers that are alike share a unit, so there are few different triples of neighbouring layers.
        around = dict[tuple[int, ...], int]()
        for position, number in enumerate(self.units.layers):
            if number in chosen:
                near = layers[max(position - 1, 0) : position + 2]
                around.setdefault((position == 0, len(near), *map(id, near)), position)
        return max(map(self._at_layer, around.values()), key=lambda whole: sum(whole.values()))

    def at_embedding(self) -> dict[str, float]:
        """Bytes during backward of the embedding."""
        return self._bytes(self.embedding, before=self._layers[:1], needs_weights=False)

    def _at_layer(self, position: int) -> dict[str, float]:
        layers = self._layers
        before = layers[position + 1 : position + 2] or present(self.units.norm)
        return self._bytes(layers[position], before=before, after=layers[max(position - 1, 0) : position])

    @property
    def _layers(self) -> list[UnitSizes]:
        return list(self.units.layers.values())

    def _bytes(
        self,
        now: UnitSizes,
        *,
        before: Sequence[UnitSizes] = (),
        after: Sequence[UnitSizes] = (),
        needs_weights: bool = True,
    ) -> dict[str, float]:
        """Bytes while backward computes the unit `now`.

        before: units that have just computed, whose gradients and the reduced part of this rank are in memory
        after: units that compute next, whose weights are already gathered
        needs_weights: False: backward of `now` needs no weights
        """
        parallel, run, layout = self.stage.config.parallel, self.stage.config.run, self.stage.layout
        gathered = [now, *after] if parallel.shard == "weights" and needs_weights else []
        gradients = self._divided(now.trained)
        if parallel.overlap and run.device != "cpu":
            numbers = [self._parted(unit.trained) for unit in before]
            gradients += sum(part.total + part.owned(layout) for part in numbers)
        whole = {
            WHOLE_WEIGHTS: self.stage.rank.width * sum(self._divided(unit.whole) for unit in gathered),
            WHOLE_GRADIENTS: self.stage.config.optim.gradient_bytes * gradients,
        }
        return {name: num_bytes for name, num_bytes in whole.items() if num_bytes}

    def _divided(self, numbers: Numbers) -> float:
        return self._parted(numbers).total

    def _parted(self, numbers: Numbers) -> Numbers:
        """The numbers of the parameters that several ranks divide.  Parameters that one rank holds need no gather.

        An example of the latter are experts with ep = dp x cp: each expert is on one rank.
        """
        layout = self.stage.layout
        return Numbers(
            dense=numbers.dense * (layout.shard_ranks > 1), experts=numbers.experts * (layout.expert_shard_ranks > 1)
        )
