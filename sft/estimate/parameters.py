"""Counts the parameters on one rank of a pipeline stage, and the trained ones among them.  Arithmetic only."""

from dataclasses import dataclass

from sft.config import Config, ModelConfig
from sft.layers.adapters import EMBEDDING, HEAD, Trained, Weight
from sft.layers.flops import LayerParameters, block_of, kinds_of, layers_of
from sft.parallel.layout import Layout, padded_vocab_size


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Numbers of parameters of a rank.  dense: outside of experts; experts: in its experts"""

    dense: float
    experts: float

    @property
    def total(self) -> float:
        return self.dense + self.experts

    def owned(self, layout: Layout) -> float:
        """The parameters of a rank's share, if all ranks that hold the same weights divide these among them."""
        return self.dense / (layout.dp * layout.cp) + self.experts / layout.expert_copies

    def __add__(self, other: "Numbers") -> "Numbers":
        return Numbers(dense=self.dense + other.dense, experts=self.experts + other.experts)


@dataclass(frozen=True, kw_only=True)
class StageParameters:
    """The parameters of one rank of a stage.  all: with adapters; trained: that the optimizer updates"""

    all: Numbers
    trained: Numbers


def stage_parameters(config: Config, layout: Layout, vocab_size: int, stage: int, trained: Trained) -> StageParameters:
    """The parameters of one rank of pipeline stage `stage`."""
    weights = parameters(config.model, layout, vocab_size, stage)
    if trained.whole is None:
        return StageParameters(all=weights, trained=weights)
    factors = _factors(config, layout, stage, trained)
    whole = _whole(config.model, layout, vocab_size, stage, trained)
    return StageParameters(all=weights + factors, trained=factors + whole)


def parameters(model: ModelConfig, layout: Layout, vocab_size: int, stage: int) -> Numbers:
    """The weights of the model on one rank of a stage.

    hidden size 4, MLP width 8, 2 heads of width 2, 1 layer, tied embeddings, 128 tokens, one rank -> 512 + 172, 0
    """
    hidden, first, last = model.hidden_size, stage == 0, stage == layout.pp - 1
    layers = _layers_on(model, layout, stage)
    tables = first + (last and not (first and model.tie_embeddings))
    block = block_of(model) if last else []
    tables += bool(block) and not first and not model.tie_embeddings  # the last stage has a copy of the embedding
    dense = _dense(layers, layout) + _dense(block, layout)
    experts = _experts(layers) + _experts(block)
    return Numbers(
        dense=dense + tables * vocab_rows(vocab_size, layout.tp) * hidden + hidden * last,
        experts=experts / (layout.ep * layout.etp),
    )


def _layers_on(model: ModelConfig, layout: Layout, stage: int) -> list[tuple[LayerParameters, int]]:
    """The parameters of each kind of layer, and the number of such layers on the stage."""
    if layout.pp == 1:
        return layers_of(model)
    chunks = layout.chunks(model.num_layers, stage)
    return [(kind, sum(number in chunk for chunk in chunks for number in numbers)) for kind, numbers in kinds_of(model)]


def _dense(layers: list[tuple[LayerParameters, int]], layout: Layout) -> float:
    return sum(number * (layer.split / layout.tp + layer.whole) for layer, number in layers)


def _experts(layers: list[tuple[LayerParameters, int]]) -> float:
    return sum(number * layer.num_experts * layer.expert for layer, number in layers)


def vocab_rows(vocab_size: int, tp: int) -> float:
    """Number of rows of the embedding on a rank, with padding."""
    return padded_vocab_size(vocab_size, tp) / tp


def trains_layers(trained: Trained) -> bool:
    """Whether the optimizer updates matrices of layers, so that backward computes their gradients."""
    return trained.whole is None or any(weight.layer is not None and len(weight.shape) > 1 for weight in trained.whole)


def _factors(config: Config, layout: Layout, stage: int, trained: Trained) -> Numbers:
    """The parameters of adapters on one rank of a stage."""
    rank = config.lora.rank or 0
    own = [weight for weight in trained.adapted if _is_layer_on(weight.layer, config.model, layout, stage)]
    return Numbers(
        dense=sum(weight.num_trained(rank, layout.tp) for weight in own if not weight.num_experts),
        experts=sum(weight.num_trained(rank, layout.etp) for weight in own if weight.num_experts) / layout.ep,
    )


def _whole(model: ModelConfig, layout: Layout, vocab_size: int, stage: int, trained: Trained) -> Numbers:
    """The parameters on one rank of a stage that are trained themselves, without adapters."""
    own = [weight for weight in trained.whole or () if _is_on(weight, model, layout, stage)]
    experts = sum(weight.size for weight in own if weight.is_expert) / (layout.ep * layout.etp)
    dense = 0.0
    for weight in own:
        if weight.key in (EMBEDDING, HEAD):
            dense += vocab_rows(vocab_size, layout.tp) * model.hidden_size
        elif not weight.is_expert:
            dense += weight.size / (layout.tp if weight.is_split else 1)
    return Numbers(dense=dense, experts=experts)


def _is_on(weight: Weight, model: ModelConfig, layout: Layout, stage: int) -> bool:
    if weight.layer is not None:
        return _is_layer_on(weight.layer, model, layout, stage)
    is_first, is_last = stage == 0, stage == layout.pp - 1
    return (is_first or (is_last and model.tie_embeddings)) if weight.key == EMBEDDING else is_last


def _is_layer_on(layer: int, model: ModelConfig, layout: Layout, stage: int) -> bool:
    """Whether the stage has this layer.  layer: its number, from 0"""
    return any(layer + 1 in chunk for chunk in layout.chunks(model.num_layers, stage))
