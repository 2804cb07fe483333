"""Describes a pipeline stage: its layers, and the part of them and of the embedding that one rank holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from sft.config import Config
from sft.layers.adapters import Trained
from sft.layers.kinds import LayerGroup, all_layer_groups
from sft.layers.rank_share import RankShare
from sft.parallel.layout import Layout, padded_vocab_size


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A pipeline stage.  Backward computes its last model chunk first.

    number   number of the stage, from 0
    rank     the part of a layer's tensors that one of its ranks holds
    chunks   numbers of the layers of each of its model chunks, from 1
    rows     number of rows of the embedding, and of the output weight, on a rank, with padding
    groups   groups of layers of the whole model
    block    the layer of the block for multi-token prediction; None: this stage has no block
    trained  the trained part of the model
    """

    config: Config
    layout: Layout
    number: int
    rank: RankShare
    chunks: list[range]
    rows: float
    groups: list[LayerGroup]
    block: LayerGroup | None
    trained: Trained

    @staticmethod
    def of(config: Config, layout: Layout, vocab_size: int, number: int, trained: Trained) -> "Stage":
        groups = all_layer_groups(config.model)
        blocks = [group for group in groups if group.is_mtp and number == layout.pp - 1]
        return Stage(
            config=config,
            layout=layout,
            number=number,
            rank=layout.share(config),
            chunks=layout.chunks(config.model.num_layers, number),
            rows=padded_vocab_size(vocab_size, layout.tp) / layout.tp,
            groups=[group for group in groups if not group.is_mtp],
            block=blocks[0] if blocks else None,
            trained=trained,
        )

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.layout.pp - 1

    @property
    def num_waiting(self) -> int:
        """Largest number of forward passes of model chunks whose backward has not run.

        Each such pass keeps saved tensors and rotary tables.  pp 4 -> 4 on the first stage, 1 on the last; with 2
        virtual stages 11 and 5
        """
        pp, virtual, num_microbatches = self.layout.pp, self.layout.virtual_stages, self.layout.num_microbatches
        if self.layout.cp_sizes:  # with dynamic CP, the plan may give a step more microbatches
            num_microbatches = max(num_microbatches, 2 * pp)
        if virtual == 1:
            return min(pp - self.number, num_microbatches)
        return min(2 * (pp - self.number - 1) + (virtual - 1) * pp + 1, num_microbatches * virtual)

    @property
    def trains_layers(self) -> bool:
        """Whether the optimizer updates matrices of layers, so that backward computes their gradients."""
        whole = self.trained.whole
        return whole is None or any(weight.layer is not None and len(weight.shape) > 1 for weight in whole)

    def num_on(self, layers: Sequence[int]) -> int:
        """How many of these layers are on the stage.  layers: their numbers, from 1"""
        return sum(number in chunk for chunk in self.chunks for number in layers)
