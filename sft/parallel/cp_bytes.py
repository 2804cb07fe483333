"""How many bytes the ranks that share a pack receive from each other, by the lengths of its documents.

The sum over layers of what the files of sft/layers/mixers say:

    K/V of a layer          a rank receives (cp_size - 1) / cp_size of the document, in forward and in backward, and as
                            many gradients in fp32; of latent attention the latent, where it is narrower
    window                  tokens of `halo_tokens`, also three times
    linear attention        tokens of short documents, maps and states of long ones, and halos of the convolution

With train.recompute full, forward runs twice.  Only layers count: not the numbers of metrics, nor gradients of weights.
"""

from dataclasses import dataclass

import numpy as np

from sft.config import Config
from sft.layers.kinds import all_layer_groups
from sft.layers.rank_share import FP32
from sft.layers.traffic import Passes, Traffic
from sft.parallel.alignment import aligned


@dataclass(frozen=True, kw_only=True)
class CpBytes:
    """Bytes of one microbatch over cp.  All of them are those of one rank of tp, and of the mean pipeline stage.

    kv_bytes      keys, values and gradients of a token that arrive at each other rank
    others        layers with messages of other kinds: how many a stage has, and the bytes of one
    """

    kv_bytes: float = 0.0
    others: tuple[tuple[float, Traffic], ...] = ()

    @staticmethod
    def of(config: Config) -> "CpBytes":
        """The bytes of a recipe.

        Llama 8B in bf16 on tp 2: a token has 4 x 2 x 128 numbers of keys and values in each of 32 layers; they travel
        twice in bf16 and their gradients once in fp32 -> kv_bytes 262,144
        """
        is_full = config.train.recompute == "full"
        passes = Passes(num=3 if is_full else 2, width=FP32 if config.run.precision == "fp32" else FP32 // 2)
        layers = [
            (len(group.numbers) / config.parallel.pp, group.mixer.traffic(config, passes))
            for group in all_layer_groups(config.model)
        ]
        return CpBytes(
            kv_bytes=sum(number * traffic.gathered for number, traffic in layers),
            others=tuple((number, traffic) for number, traffic in layers if type(traffic) is not Traffic),
        )

    def num_bytes(self, lengths: np.ndarray, doc_multiple: int, cp_size: int) -> np.ndarray:
        """Bytes that all ranks of the group together receive for each document: int64 [n].

        lengths [1000], doc_multiple 8, kv_bytes 4, cp_size 4 -> 12,000
        """
        padded = aligned(np.asarray(lengths, dtype=np.int64), doc_multiple)
        return np.rint(self.document_bytes(padded, cp_size)).astype(np.int64)

    def document_bytes(self, padded: np.ndarray, cp_size: int) -> np.ndarray:
        """Bytes of documents of these padded lengths, not rounded: float64 [n].

        Layers of a stage are a mean, so there may be half a layer.
        """
        if cp_size == 1:
            return np.zeros(len(padded))
        return self.kv_bytes * padded * (cp_size - 1) + self.other_than_keys(padded, cp_size)

    def other_than_keys(self, padded: np.ndarray, cp_size: int) -> np.ndarray:
        """Bytes of halos and of linear attention of each document, over all ranks of the group: float64 [n]."""
        total = np.zeros(len(padded))
        for number, traffic in self.others:
            total += number * traffic.others(padded, cp_size)
        return total
