"""Computes the bytes that ranks that share a pack receive from each other, from the lengths of the pack's documents.

The bytes of a document are summed over layers.  The files of sft/layers/mixers give the bytes of a layer:

    full attention      In forward and in backward, a rank receives the keys and values of (cp_size - 1) / cp_size of
                        the document; in backward also as many gradients in fp32.  In latent attention, latents replace
                        keys and values if they have fewer elements
    window attention    Keys, values and gradients as above, but only of the tokens in halos (`halo_tokens`)
    linear attention,   Tokens of short documents, maps and states of long ones and of trees, halos of the convolution
    Mamba-2

With train.recompute = full, forward runs twice; with attention_kept, all of it but attention.  With selective, linear
attention and Mamba-2 run twice, and nothing else that sends over cp.

Bytes outside of layers, such as metrics and gradients of weights, are not counted.
"""

from dataclasses import dataclass

import numpy as np

from sft.config import Config
from sft.layers.kinds import all_layer_groups
from sft.layers.mixer import Mixer
from sft.layers.rank_share import FP32
from sft.layers.traffic import Passes, Traffic
from sft.parallel.alignment import aligned
from sft.parallel.branches import Branches


@dataclass(frozen=True, kw_only=True)
class CpBytes:
    """The bytes that are sent over cp for a microbatch, on one tp rank and an average pipeline stage.

    kv_bytes      bytes of keys, values and their gradients per token that each other rank receives, over all layers of
                  the stage
    others        kinds of layers that send other messages: (number of such layers per stage, bytes of one layer)
    """

    kv_bytes: float = 0.0
    others: tuple[tuple[float, Traffic], ...] = ()

    @staticmethod
    def of(config: Config) -> "CpBytes":
        """The bytes of a recipe.

        Llama 8B in bf16 on tp 2: a token has 4 x 2 x 128 elements of keys and values on a rank in each of 32 layers.
        They are sent twice in bf16, and their gradients once in fp32 -> kv_bytes = 1,024 x 32 x 8 = 262,144
        """
        layers = [
            (len(group.numbers) / config.parallel.pp, group.mixer.traffic(config, passes(config, group.mixer)))
            for group in all_layer_groups(config.model)
        ]
        return CpBytes(
            kv_bytes=sum(number * traffic.gathered for number, traffic in layers),
            others=tuple((number, traffic) for number, traffic in layers if type(traffic) is not Traffic),
        )

    def num_bytes(self, lengths: np.ndarray, doc_multiple: int, cp_size: int) -> np.ndarray:
        """The bytes that all ranks of the group together receive for each document: int64 [n].

        lengths: real lengths of the documents, [n]

        lengths [1000], doc_multiple 8, kv_bytes 4, cp_size 4 -> 1,000 x 4 x 3 = 12,000
        """
        padded = aligned(np.asarray(lengths, dtype=np.int64), doc_multiple)
        return np.rint(self.document_bytes(padded, cp_size)).astype(np.int64)

    def document_bytes(self, padded: np.ndarray, cp_size: int, branches: Branches | None = None) -> np.ndarray:
        """The bytes of documents with these padded lengths, not rounded: float64 [n].  branches: of these documents

        The number of layers is the mean over pipeline stages, so it may be a fraction.
        """
        if cp_size == 1:
            return np.zeros(len(padded))
        return self.kv_bytes * padded * (cp_size - 1) + self.other_than_keys(padded, cp_size, branches)

    def other_than_keys(self, padded: np.ndarray, cp_size: int, branches: Branches | None = None) -> np.ndarray:
        """Bytes of halos and of linear attention of each document, over all ranks of the group: float64 [n]."""
        total = np.zeros(len(padded))
        for number, traffic in self.others:
            total += number * traffic.others(padded, cp_size, branches)
        return total


def passes(config: Config, mixer: Mixer) -> Passes:
    """The passes of a layer with this mixer, by train.recompute."""
    train = config.train
    repeats_mixer = mixer.is_recomputed and train.recompute == "selective"
    return Passes(
        num=3 if train.repeats_layers or repeats_mixer else 2,
        of_attention=3 if train.repeats_attention or repeats_mixer else 2,
        width=FP32 if config.run.precision == "fp32" else FP32 // 2,
    )
