"""Computes how many bytes a layer with linear attention saves and how many it holds temporarily, without torch."""

from dataclasses import dataclass

from sft.config import Config, ModelConfig
from sft.layers.model_bytes import FP32, RankShare
from sft.layers.softmax_bytes import AttentionBytes
from sft.parallel.fragments import HeadSizes
from sft.parallel.layout import Layout

STATE_INTERVAL = 512  # tokens, for which torch_kernel.py saves one state: schedule.CHUNK * schedule.INTERVAL
# Numbers of a block of short_convolution.py, which has BLOCKS fp32 copies of it at one time.  Blocks of the gated norm
# and of the delta rule take no more.  On a CPU they fit the cache: 8,192 tokens of 2,048 channels took half the time of
# blocks of 16 times the size.  On CUDA a block is 64 MiB.
BLOCK_NUMBERS = {"cpu": 2**20, "cuda": 2**24}
BLOCKS = 6


@dataclass(frozen=True, kw_only=True)
class LinearAttentionBytes(AttentionBytes):
    """Bytes of Gated DeltaNet in plain torch.  `saved` is exact up to the states, which are rounded down to whole
    intervals of each fragment: tests/ranks/test_saved_tensors.py counts these bytes.

    heads          of this rank
    tokens         of this rank, of one document
    block_numbers  of BLOCK_NUMBERS
    """

    norm_outputs_are_saved = False
    is_recomputed = True
    heads: HeadSizes
    tokens: float
    block_numbers: int

    @staticmethod
    def of(model: ModelConfig, config: Config, layout: Layout, pack: float) -> "LinearAttentionBytes":
        rank = RankShare.of(config, layout)
        return LinearAttentionBytes(
            model=model.model_copy(update={"qk_norm": False}),
            rank=rank,
            cp=layout.cp,
            heads=HeadSizes.of(model.linear_attention, layout.tp, rank.width),
            tokens=pack / layout.cp,
            block_numbers=BLOCK_NUMBERS["cpu" if config.run.device == "cpu" else "cuda"],
        )

    @property
    def saved(self) -> dict[str, float]:
        width, values, of_heads = self.rank.width, self._values, self.heads.value_heads
        state = FP32 * values * self.heads.key_dim
        saved = {
            "projections": width * (self._mixed + values + 2 * of_heads),
            "queries, keys, values": width * self._mixed,
            "decays and beta": (3 * FP32 + width) * of_heads,  # the decay's logarithm, and softplus with its input
            "states": state / STATE_INTERVAL,
            "delta rule's output": width * values,
            "gated norm's scale": FP32 * of_heads,
        }
        if self.cp > 1:  # of two fragments, A and the states before them
            saved["maps"] = 2 * state * (1 + self.heads.key_dim / self.heads.value_dim) / self.tokens
        return saved

    @property
    def norm_outputs(self) -> dict[str, float]:
        return {"gated norm's output": self.rank.width * self._values}

    def local(self, tokens: float) -> float:
        """Gradients while the backward of the gated norm or of the delta rule runs, and fp32 blocks.

        The gated norm has those of its output, its input and the gate.  Then the norm's input and output are free, and
        the delta rule has those of its output and the gate, and makes those of q, k and v.  Of the two fragments of a
        document there are A, B and states, as made, sent and received.
        """
        gradients = max(3 * self._values, self._values + self._mixed)
        fragments = 0 if self.cp == 1 else 3 * 2 * self.heads.map_bytes
        blocks = BLOCKS * FP32 * min(self.block_numbers, tokens * self._mixed)
        return tokens * self.rank.width * gradients + blocks + fragments

    def rotary(self, pack: float) -> float:
        return 0.0

    def gathered(self, pack: float) -> float:
        return 0.0

    @property
    def _values(self) -> int:
        return self.heads.value_heads * self.heads.value_dim

    @property
    def _mixed(self) -> int:
        """Channels of the convolution: numbers of a token's q, k and v."""
        return 2 * self.heads.key_heads * self.heads.key_dim + self._values
