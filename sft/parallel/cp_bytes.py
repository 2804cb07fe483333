"""Computes how many bytes the ranks that share a pack receive from each other, from the lengths of its documents.

The bytes of a document are summed over layers.  The files of sft/layers/mixers give the bytes of a layer:

    full attention      In forward and in backward, a rank receives the keys and values of (cp_size - 1) / cp_size of
                        the document.  In backward it also receives their gradients in fp32.  In latent attention,
                        latents replace keys and values if they have fewer elements
    window attention    The same for the tokens in halos (`halo_tokens`) instead of the whole document
    linear attention,   The tokens of short documents, the maps and states of long documents and of trees, and the
    Mamba-2             halos of the convolution

With train.recompute = full, the forward pass of a layer runs twice, and so do its messages.  With attention_kept, the
messages of attention are sent once in forward, and all others twice.  With selective, only the messages of linear
attention and Mamba-2 are sent twice.

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
    """The bytes that are sent over cp for a microbatch, for one tp rank and a pipeline stage with the mean number of
    layers.

    kv_bytes      bytes of keys, values and their gradients that each other rank receives for a token, summed over the
                  layers of the stage
    others        for each kind of layer with other messages: (number of such layers per stage, `Traffic` of one layer)
    """

    kv_bytes: float = 0.0
    others: tuple[tuple[float, Traffic], ...] = ()

    @staticmethod
    def of(config: Config) -> "CpBytes":
        """The bytes that a recipe sends.

        Llama 8B in bf16 on tp 2: in each of 32 layers, a rank has 4 key heads x 2 (key, value) x 128 = 1,024 elements
        of a token.  They are sent twice in bf16 (2 + 2 bytes), and their gradients once in fp32 (4 bytes).
        -> kv_bytes = 1,024 x 32 x 8 = 262,144
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
        """The bytes of documents with these padded lengths, not rounded: float64 [n].

        The number of layers is the mean over pipeline stages, so it may be a fraction.

        branches: how these documents continue each other; None: no document is a branch
        """
        if cp_size == 1:
            return np.zeros(len(padded))
        return self.kv_bytes * padded * (cp_size - 1) + self.other_than_keys(padded, cp_size, branches)

    def other_than_keys(self, padded: np.ndarray, cp_size: int, branches: Branches | None = None) -> np.ndarray:
        """The bytes of each document without keys and values of full attention, over all ranks: float64 [n]."""
        total = np.zeros(len(padded))
        for number, traffic in self.others:
            total += number * traffic.others(padded, cp_size, branches)
        return total


def passes(config: Config, mixer: Mixer) -> Passes:
    """How often a layer with this mixer is computed in a step with train.recompute, and the bytes of an element."""
    train = config.train
    repeats_mixer = mixer.is_recomputed and train.recompute == "selective"
    return Passes(
        num=3 if train.repeats_layers or repeats_mixer else 2,
        of_attention=3 if train.repeats_attention or repeats_mixer else 2,
        width=FP32 if config.run.precision == "fp32" else FP32 // 2,
    )
