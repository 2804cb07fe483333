"""The part of a layer's tensors that one rank holds."""

from dataclasses import dataclass

from sft.config import ModelConfig

FP32 = 4  # bytes of a number


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """The sizes by which a rank's part differs from the whole.  `Layout.share` makes it."""

    tp: int = 1  # tensor-parallel size of layers
    cp: int = 1  # ranks that share a pack
    etp: int = 1  # tensor-parallel size of an expert
    ep: int = 1  # ranks that share out the experts of a layer
    sequence: float = 1.0  # share of the tokens between layers that the rank holds: 1 / tp with sequence parallelism
    width: int = 2  # bytes of a number
    is_fused: bool = True  # the kernels of a GPU; False: those of a CPU, which save and copy more

    def hidden(self, model: ModelConfig) -> float:
        """Bytes of one hidden state between layers."""
        return self.width * model.hidden_size * self.sequence
