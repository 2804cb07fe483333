"""Computes the bytes of the units that are whole at each moment of a step, with parallel.shard = gradients or weights.

    forward    the unit that computes is whole, and so is the next one, whose gather has begun
    loss       the head is whole, forward and backward
    backward   in reverse order; the unit's gradients are whole, and so are those of the unit before it, in reduction

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
        """Bytes during backward of the one of these layers for which they are most.  numbers: from 1"""
        layers, chosen = self._layers, {*numbers}
        # Layers that are alike share a unit, so few triples differ.
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

        before: units whose gradients may still be in reduction, with the sum of this rank's part; after: units whose
        gather has begun
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
        """The part of these numbers that several ranks divide.  A rank that shares with no other one needs no gather.

        ep = dp x cp: each expert is on one rank
        """
        layout = self.stage.layout
        return Numbers(
            dense=numbers.dense * (layout.shard_ranks > 1), experts=numbers.experts * (layout.expert_shard_ranks > 1)
        )
