"""Divides the weights of a pipeline stage into units.  With parallel.shard, a unit is gathered and reduced as a whole.

A unit is the embedding, a layer, the final norm, the block for multi-token prediction, or the output weight (which with
tied embeddings is the embedding).  A unit has up to four flat buffers: for trained and for frozen weights, each inside
and outside of experts.  Each weight, and the part of each rank of the shard group, begins at a multiple of 64 elements.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from sft.estimate.parameters import Numbers, factors_of, whole_of
from sft.estimate.stage import Stage
from sft.layers.adapters import EMBEDDING, FINAL_NORM, HEAD
from sft.layers.kinds import LayerGroup
from sft.parallel.layout import SHARD_ALIGNMENT, Layout

NOTHING = Numbers(dense=0.0, experts=0.0)


@dataclass(frozen=True, kw_only=True)
class UnitSizes:
    """The numbers of elements of one unit's flat buffers, with padding."""

    trained: Numbers
    frozen: Numbers

    @property
    def whole(self) -> Numbers:
        return self.trained + self.frozen


@dataclass(frozen=True, kw_only=True)
class StageUnits:
    """The units of a stage; None: the stage has no such unit.

    layers     the units of layers by the layer's number, from 1
    block      the block for multi-token prediction
    output     the output weight; None with tied embeddings, if the stage has the embedding
    """

    embedding: UnitSizes | None
    layers: dict[int, UnitSizes]
    norm: UnitSizes | None
    block: UnitSizes | None
    output: UnitSizes | None

    @staticmethod
    def of(stage: Stage) -> "StageUnits":
        model, is_tied = stage.config.model, stage.config.model.tie_embeddings
        norm, trained = Numbers(dense=_rounded(model.hidden_size), experts=0.0), stage.trained
        has_embedding = stage.is_first or (stage.block is not None and not is_tied)
        has_output = stage.is_last and not (stage.is_first and is_tied)
        block = None if stage.block is None else _model_layer(stage.block, stage.layout)
        return StageUnits(
            embedding=_table(stage, trained.has(EMBEDDING, ())) if has_embedding else None,
            layers=dict(sorted(_layers(stage), key=lambda layer: layer[0])),
            norm=_unit(stage, norm, norm if trained.has(FINAL_NORM, ()) else NOTHING) if stage.is_last else None,
            block=None if block is None else _unit(stage, block, block),
            output=_table(stage, trained.has(EMBEDDING if is_tied else HEAD, ())) if has_output else None,
        )

    def __iter__(self) -> Iterator[UnitSizes]:
        """The units in the order of their use in forward."""
        units = (self.embedding, *self.layers.values(), self.norm, self.block, self.output)
        return (unit for unit in units if unit is not None)

    @property
    def head(self) -> UnitSizes:
        """The unit that the loss head uses."""
        unit = self.output or self.embedding
        assert unit is not None
        return unit

    @property
    def whole(self) -> Numbers:
        return sum((unit.whole for unit in self), NOTHING)

    @property
    def trained(self) -> Numbers:
        return sum((unit.trained for unit in self), NOTHING)


def present(unit: UnitSizes | None) -> list[UnitSizes]:
    """[unit], or [] if the stage does not have the unit."""
    return [] if unit is None else [unit]


def padded(numbers: Numbers, layout: Layout) -> Numbers:
    """The sizes of flat buffers of these parameters: on 8 ranks 100 elements -> 512, 513 -> 1,024, 0 -> 0."""
    return Numbers(
        dense=_rounded(numbers.dense, SHARD_ALIGNMENT * layout.shard_ranks),
        experts=_rounded(numbers.experts, SHARD_ALIGNMENT * layout.expert_shard_ranks),
    )


def _rounded(number: float, multiple: int = SHARD_ALIGNMENT) -> float:
    """`number`, rounded up to a multiple of `multiple`."""
    return float(-(-number // multiple) * multiple)


def _layers(stage: Stage) -> Iterator[tuple[int, UnitSizes]]:
    """Yield the number and the unit of each layer of the stage."""
    trained = stage.trained
    for group in stage.groups:
        own, numbers = _model_layer(group, stage.layout), [n for n in group.numbers if stage.num_on([n])]
        if trained.whole is None:
            unit = _unit(stage, own, own)
            yield from ((number, unit) for number in numbers)
            continue
        units = dict[int, UnitSizes]()  # number of the first of several layers that are alike -> their unit
        for number in numbers:
            first = trained.alike.get(number, number)
            if first not in units:
                adapted, whole = trained.by_layer.get(number, ([], []))
                factors = factors_of(adapted, stage)
                units[first] = _unit(stage, own + factors, whole_of(whole, stage) + factors)
            yield number, units[first]


def _model_layer(group: LayerGroup, layout: Layout) -> Numbers:
    """Numbers of elements of one of these layers on a rank, without adapters.  Each weight is rounded up."""
    dense = experts = 0.0
    for weight, number in zip(group.weights, group.num_elements, strict=True):
        if weight.is_buffer:
            continue
        if weight.is_of_expert:
            experts += group.mlp.num_experts / layout.ep * _rounded(number / (layout.etp if weight.split else 1))
        else:
            dense += _rounded(number / (layout.tp if weight.split else 1))
    return Numbers(dense=dense, experts=experts)


def _table(stage: Stage, is_trained: bool) -> UnitSizes:
    """The unit of the embedding or of the output weight."""
    table = Numbers(dense=stage.rows * stage.config.model.hidden_size, experts=0.0)
    return _unit(stage, table, table if is_trained else NOTHING)


def _unit(stage: Stage, own: Numbers, trained: Numbers) -> UnitSizes:
    """The unit of these parameters.  own: all parameters; trained: the parameters that the optimizer updates"""
    frozen = Numbers(dense=own.dense - trained.dense, experts=own.experts - trained.experts)
    return UnitSizes(trained=padded(trained, stage.layout), frozen=padded(frozen, stage.layout))
