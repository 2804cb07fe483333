"""Divides the weights of a pipeline stage into units: what parallel.shard gathers and reduces at once.

A unit is a layer, the embedding, the head with the final norm (with tied embeddings the norm alone), or the block for
multi-token prediction.  Its weights lie in flat buffers: trained and frozen ones, inside and outside of experts.  A
buffer is padded to a multiple of 64 elements for each rank of its shard group, and each rank holds an equal part.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from sft.estimate.parameters import Numbers, factors_of, of_layer, whole_of
from sft.estimate.stage import Stage
from sft.layers.adapters import EMBEDDING
from sft.parallel.layout import Layout

ALIGNMENT = 64  # elements: the part of each rank begins at a multiple of this
NOTHING = Numbers(dense=0.0, experts=0.0)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The numbers of elements of one unit's flat buffers, with padding."""

    trained: Numbers
    frozen: Numbers

    @property
    def whole(self) -> Numbers:
        return self.trained + self.frozen


@dataclass(frozen=True, kw_only=True)
class Units:
    """The units of a stage; None: the stage has no such unit.

    layers     by the layer's number, from 1
    is_tied    whether the loss head also uses the unit of the embedding
    """

    embedding: Unit | None
    layers: dict[int, Unit]
    block: Unit | None
    head: Unit | None
    is_tied: bool

    @staticmethod
    def of(stage: Stage) -> "Units":
        embedding, head = _tables(stage)
        own = None if stage.block is None else of_layer(stage.block.parameters, stage.layout)
        return Units(
            embedding=embedding,
            layers=dict(sorted(_layers(stage), key=lambda layer: layer[0])),
            block=None if own is None else _unit(stage, own, own),
            head=head,
            is_tied=stage.is_first and stage.config.model.tie_embeddings,
        )

    def __iter__(self) -> Iterator[Unit]:
        """The units in the order of their use in forward."""
        units = (self.embedding, *self.layers.values(), self.block, self.head)
        return (unit for unit in units if unit is not None)

    @property
    def whole(self) -> Numbers:
        return sum((unit.whole for unit in self), NOTHING)

    @property
    def trained(self) -> Numbers:
        return sum((unit.trained for unit in self), NOTHING)


def padded(numbers: Numbers, layout: Layout) -> Numbers:
    """The sizes of flat buffers of these parameters: on 8 ranks 100 elements -> 512, 513 -> 1,024, 0 -> 0."""
    dense, experts = (
        -(-number // (ALIGNMENT * ranks)) * ALIGNMENT * ranks
        for number, ranks in ((numbers.dense, layout.shard_ranks), (numbers.experts, layout.expert_shard_ranks))
    )
    return Numbers(dense=dense, experts=experts)


def _layers(stage: Stage) -> Iterator[tuple[int, Unit]]:
    """The layers of the stage with their numbers."""
    trained = stage.trained
    for group in stage.groups:
        own, numbers = of_layer(group.parameters, stage.layout), [n for n in group.numbers if stage.num_on([n])]
        if trained.whole is None:
            unit = _unit(stage, own, own)
            yield from ((number, unit) for number in numbers)
            continue
        for number in numbers:
            adapted, whole = trained.by_layer.get(number, ([], []))
            factors = factors_of(adapted, stage)
            yield number, _unit(stage, own + factors, whole_of(whole, stage) + factors)


def _tables(stage: Stage) -> tuple[Unit | None, Unit | None]:
    """The units of the embedding and of the head."""
    model = stage.config.model
    _, whole = stage.trained.by_layer.get(None, ([], []))
    is_tied = stage.is_first and model.tie_embeddings
    table, norm = Numbers(dense=stage.rows * model.hidden_size, experts=0.0), Numbers(
        dense=model.hidden_size, experts=0.0
    )
    inputs = [weight for weight in whole if weight.key == EMBEDDING]
    outputs = [weight for weight in whole if weight.key != EMBEDDING or (model.tie_embeddings and not stage.is_first)]
    trains_all = stage.trained.whole is None
    embedding, head = None, None
    if stage.is_first or (stage.block is not None and not model.tie_embeddings):
        embedding = _unit(stage, table, table if trains_all else whole_of(inputs, stage))
    if stage.is_last:
        own = norm if is_tied else table + norm
        head = _unit(stage, own, own if trains_all else whole_of(outputs, stage))
    return embedding, head


def _unit(stage: Stage, own: Numbers, trained: Numbers) -> Unit:
    """The unit of these parameters.  trained: those that the optimizer updates"""
    frozen = Numbers(dense=own.dense - trained.dense, experts=own.experts - trained.experts)
    return Unit(trained=padded(trained, stage.layout), frozen=padded(frozen, stage.layout))
