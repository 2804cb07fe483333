"""Computes the bytes of the units that are whole at each moment of a step, with parallel.shard = gradients or weights.

    forward    the unit that computes is whole, and so is the next one, whose gather has begun
    backward   in reverse order; the unit's gradients are whole, and so are those of the unit before it, in reduction

Forward has no gradients, so backward needs more.  The head is whole during the loss, forward and backward.  Backward of
the embedding needs no weights.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sft.estimate.stage import Stage
from sft.estimate.units import Unit, Units
from sft.layers.rank_share import FP32

WHOLE_WEIGHTS, WHOLE_GRADIENTS = "gathered weights", "gradients in reduction"


@dataclass(frozen=True)
class UnitsInUse:
    """The units of a stage, and which of them are whole.  The methods return bytes by name, without zeros."""

    stage: Stage
    units: Units

    @staticmethod
    def of(stage: Stage) -> "UnitsInUse":
        return UnitsInUse(stage, Units.of(stage))

    @property
    def embedding(self) -> Unit:
        assert self.units.embedding is not None
        return self.units.embedding

    def at_head(self) -> dict[str, float]:
        """Bytes during the loss.  Its backward begins the gather of the next unit."""
        block = self.units.block
        return self._bytes(self._head, before=(), after=[block] if block is not None else self._layers[-1:])

    def at_block(self) -> dict[str, float]:
        """Bytes during backward of the block for multi-token prediction."""
        assert self.units.block is not None
        return self._bytes([self.units.block], before=self._head, after=self._layers[-1:])

    def at_layers(self, numbers: Iterable[int]) -> dict[str, float]:
        """Bytes during backward of the one of these layers for which they are most.  numbers: from 1"""
        positions = [position for position, number in enumerate(self.units.layers) if number in {*numbers}]
        return max(map(self._at_layer, positions), key=lambda whole: sum(whole.values()))

    def at_embedding(self) -> dict[str, float]:
        """Bytes during backward of the embedding."""
        return self._bytes([self.embedding], before=self._layers[:1], after=(), needs_weights=False)

    def _at_layer(self, position: int) -> dict[str, float]:
        layers, block = self._layers, self.units.block
        before = layers[position + 1 : position + 2] or ([block] if block is not None else self._head)
        return self._bytes([layers[position]], before=before, after=layers[max(position - 1, 0) : position])

    @property
    def _layers(self) -> list[Unit]:
        return list(self.units.layers.values())

    @property
    def _head(self) -> list[Unit]:
        """The units that the loss head uses."""
        units = (self.units.head, self.units.embedding if self.units.is_tied else None)
        return [unit for unit in units if unit is not None]

    def _bytes(
        self, now: Sequence[Unit], *, before: Sequence[Unit], after: Sequence[Unit], needs_weights: bool = True
    ) -> dict[str, float]:
        """Bytes while backward computes the units `now`.

        before: units whose gradients may still be in reduction; after: units whose gather has begun
        """
        parallel, run = self.stage.config.parallel, self.stage.config.run
        overlaps = parallel.overlap and run.device != "cpu"
        gathered = [*now, *after] if parallel.shard == "weights" and needs_weights else []
        reduced = [*now, *before] if overlaps else now
        whole = {
            WHOLE_WEIGHTS: self.stage.rank.width * sum(unit.whole.total for unit in gathered),
            WHOLE_GRADIENTS: FP32 * sum(unit.trained.total for unit in reduced),
        }
        return {name: num_bytes for name, num_bytes in whole.items() if num_bytes}
