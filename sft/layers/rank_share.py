"""The part of a layer's tensors that one rank holds."""

from dataclasses import dataclass

from sft.config import ModelConfig
from sft.layers.tree_share import TreeShare

FP32 = 4  # bytes of an element


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """The sizes that determine a rank's part of a layer.  `Layout.share` makes this object."""

    tp: int = 1  # tensor-parallel size of layers
    cp: int = 1  # number of ranks that share a pack
    etp: int = 1  # tensor-parallel size of an expert
    ep: int = 1  # number of ranks that divide the experts of a layer among them
    sequence: float = 1.0  # share of the hidden states between layers on the rank: 1 / tp with sequence parallelism
    width: int = 2  # bytes of an element of a weight or activation
    is_fused: bool = True  # GPU kernels; False: CPU kernels, which save and copy more
    documents: float = 1.0  # documents of a pack
    is_uneven: bool = False  # whether a flash kernel may take several calls for a pack (sft/parallel/length_classes.py)
    trees: TreeShare = TreeShare()  # trees of a pack

    @property
    def sequences(self) -> float:
        """The number of sequences in a pack for an attention kernel.  With cp, a rank has two chunks of a document."""
        return self.documents * (2 if self.cp > 1 else 1)

    def hidden(self, model: ModelConfig) -> float:
        """Bytes of one token's hidden state between layers, on one rank."""
        return self.width * model.hidden_size * self.sequence
