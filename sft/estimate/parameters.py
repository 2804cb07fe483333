"""Counts the parameters on one rank of a pipeline stage, and the trained ones among them.  Arithmetic only."""

from collections.abc import Iterable
from dataclasses import dataclass

from sft.config import Config
from sft.estimate.stage import Stage
from sft.layers.adapters import EMBEDDING, HEAD, AdaptedWeight, Weight
from sft.parallel.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Numbers of parameters on a rank.  dense: parameters outside of experts; experts: parameters in experts"""

    dense: float
    experts: float

    @property
    def total(self) -> float:
        return self.dense + self.experts

    def owned(self, layout: Layout) -> float:
        """Number of parameters in the rank's shard, if the ranks of its shard group divide the parameters equally."""
        return self.dense / layout.shard_ranks + self.experts / layout.expert_shard_ranks

    def updated(self, config: Config, layout: Layout) -> float:
        """Number of these parameters that the rank's optimizer updates."""
        return self.owned(layout) if config.parallel.distributed_optimizer else self.total

    def __add__(self, other: "Numbers") -> "Numbers":
        return Numbers(dense=self.dense + other.dense, experts=self.experts + other.experts)


_NONE = Numbers(dense=0.0, experts=0.0)


@dataclass(frozen=True, kw_only=True)
class StageParameters:
    """The parameters on one rank of a stage.

    all      parameters of the model and of adapters
    trained  the parameters among them that the optimizer updates
    muon     the parameters among these that Muon updates (optim.name = muon)
    """

    all: Numbers
    trained: Numbers
    muon: Numbers


def stage_parameters(stage: Stage) -> StageParameters:
    """The parameters of one rank of the stage."""
    weights, whole, has_muon = _weights(stage), stage.trained.whole, stage.config.optim.has_muon
    if whole is None:
        return StageParameters(all=weights, trained=weights, muon=_matrices(stage) if has_muon else _NONE)
    factors, whole = _factors_on(stage), [weight for weight in whole if _is_on(weight, stage)]
    return StageParameters(
        all=weights + factors,
        trained=whole_of(whole, stage) + factors,
        muon=whole_of([w for w in whole if w.is_muon], stage) + factors if has_muon else _NONE,
    )


def _matrices(stage: Stage) -> Numbers:
    """The parameters of all weights on one rank that Muon updates."""
    layout, dense, experts = stage.layout, 0.0, 0.0
    blocks = [] if stage.block is None else [(stage.block, 1)]
    for group, count in [*((group, stage.num_on(group.numbers)) for group in stage.groups), *blocks]:
        for weight, size in zip(group.weights, group.num_elements):
            if not weight.is_muon or weight in group.around:
                continue
            if weight.is_of_expert:
                experts += count * group.mlp.num_experts * size / (layout.ep * layout.etp)
            else:
                dense += count * size / (layout.tp if weight.split else 1)
    return Numbers(dense=dense, experts=experts)


def _weights(stage: Stage) -> Numbers:
    """The weights of the model on one rank of the stage.

    hidden size 4, MLP width 8, 2 heads of width 2, 1 layer, tied embeddings, vocabulary of 128, one rank
    -> dense 512 + 172, experts 0
    """
    model, layout = stage.config.model, stage.layout
    layers = [(group.parameters, stage.num_on(group.numbers)) for group in stage.groups]
    tables = stage.is_first + (stage.is_last and not (stage.is_first and model.tie_embeddings))
    if stage.block is not None:
        layers.append((stage.block.parameters, 1))
        tables += not stage.is_first and not model.tie_embeddings  # the last stage has a copy of the embedding
    dense = sum(number * (layer.split / layout.tp + layer.whole) for layer, number in layers)
    experts = sum(number * layer.num_experts * layer.expert for layer, number in layers)
    return Numbers(
        dense=dense + tables * stage.rows * model.hidden_size + model.hidden_size * stage.is_last,
        experts=experts / (layout.ep * layout.etp),
    )


def _factors_on(stage: Stage) -> Numbers:
    """The parameters of all adapters on one rank."""
    trained, total, of_layer = stage.trained, Numbers(dense=0.0, experts=0.0), dict[int, Numbers]()
    for number, (adapted, _) in trained.by_layer.items():
        if stage.num_on([number]):
            first = trained.alike.get(number, number)
            if first not in of_layer:
                of_layer[first] = factors_of(adapted, stage)
            total += of_layer[first]
    return total


def factors_of(weights: Iterable[AdaptedWeight], stage: Stage) -> Numbers:
    """The parameters of the adapters of these weights on one rank."""
    layout, rank, dense, experts = stage.layout, stage.config.lora.rank or 0, 0.0, 0.0
    for weight in weights:
        if weight.num_experts:
            experts += weight.num_trained(rank, layout.etp) / layout.ep
        else:
            dense += weight.num_trained(rank, layout.tp)
    return Numbers(dense=dense, experts=experts)


def whole_of(weights: Iterable[Weight], stage: Stage) -> Numbers:
    """The parameters of these weights of the model on one rank."""
    layout, dense, experts = stage.layout, 0.0, 0.0
    for weight in weights:
        if weight.key in (EMBEDDING, HEAD):
            dense += stage.rows * stage.config.model.hidden_size
        elif weight.is_expert:
            experts += weight.size / (layout.ep * layout.etp)
        else:
            dense += weight.size / (layout.tp if weight.is_split else 1)
    return Numbers(dense=dense, experts=experts)


def _is_on(weight: Weight, stage: Stage) -> bool:
    if weight.layer is not None:
        return stage.num_on([weight.layer + 1]) > 0
    is_copied = stage.is_last and stage.config.model.tie_embeddings
    return (stage.is_first or is_copied) if weight.key == EMBEDDING else stage.is_last
