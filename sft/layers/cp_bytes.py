"""How many bytes the ranks that share a pack receive from each other, by the lengths of its documents.

    K/V of a layer          a rank receives (cp_size - 1) / cp_size of the document, in forward and in backward, and as
                            many gradients in fp32; of latent attention the latent, where it is narrower
    window                  tokens of `num_halo_tokens`, also three times
    linear attention        `fragments.bytes_over_cp`, in forward and in backward

With train.recompute full, forward runs twice.  Only layers count: not the numbers of metrics, nor gradients of weights.
"""

from dataclasses import dataclass

import numpy as np

from sft.config import Config
from sft.config.model import LayerKind
from sft.layers.kinds import SOFTMAX, of_kind
from sft.parallel.alignment import aligned
from sft.parallel.fragments import FP32, HeadSizes


@dataclass(frozen=True, kw_only=True)
class CpBytes:
    """Bytes of one microbatch over cp.  All of them are those of one rank of tp, and of the mean pipeline stage.

    kv_bytes      keys, values and gradients of a token that arrive at each other rank, in layers with full attention
    halo_bytes    the same in layers with a window of `window` tokens
    linear        of `num_linear` layers with linear attention, which pass states `num_passes` times
    """

    kv_bytes: float = 0.0
    halo_bytes: float = 0.0
    window: int | None = None
    linear: HeadSizes | None = None
    num_linear: float = 0.0
    num_passes: int = 2
    conv_kernel: int = 1

    @staticmethod
    def of(config: Config) -> "CpBytes":
        """The bytes of a recipe.

        Llama 8B in bf16 on tp 2: a token has 4 x 2 x 128 numbers of keys and values in each of 32 layers; they travel
        twice in bf16 and their gradients once in fp32 -> kv_bytes 262,144
        """
        model, tp, pp = config.model, config.parallel.tp, config.parallel.pp
        width = FP32 if config.run.precision == "fp32" else FP32 // 2
        is_full = config.train.recompute == "full"
        num_passes = 3 if is_full else 2
        num_linear, num_window = len(model.linear_attention.layers), model.num_window_layers
        of_number = num_passes * width + FP32
        full, window = (sent_numbers(config, kind) * of_number for kind in SOFTMAX)
        return CpBytes(
            kv_bytes=full * (model.num_layers + model.has_mtp - num_linear - num_window) / pp,
            halo_bytes=window * num_window / pp,
            window=model.sliding_window,
            linear=HeadSizes.of(model.linear_attention, tp, width) if num_linear else None,
            num_linear=num_linear / pp,
            num_passes=num_passes,
            conv_kernel=model.linear_attention.conv_kernel,
        )

    def num_bytes(self, lengths: np.ndarray, doc_multiple: int, cp_size: int) -> np.ndarray:
        """Bytes that all ranks of the group together receive for each document: int64 [n].

        lengths [1000], doc_multiple 8, kv_bytes 4, cp_size 4 -> 12,000
        """
        padded = aligned(np.asarray(lengths, dtype=np.int64), doc_multiple)
        return np.rint(self.of_documents(padded, cp_size)).astype(np.int64)

    def of_documents(self, padded: np.ndarray, cp_size: int) -> np.ndarray:
        """The same by padded lengths, not rounded: float64 [n].  A stage may have half a layer in the mean."""
        if cp_size == 1:
            return np.zeros(len(padded))
        return self.kv_bytes * padded * (cp_size - 1) + self.other_than_keys(padded, cp_size)

    def other_than_keys(self, padded: np.ndarray, cp_size: int) -> np.ndarray:
        """Bytes of halos and of linear attention of each document, over all ranks of the group: float64 [n]."""
        total = np.zeros(len(padded))
        if self.halo_bytes and self.window is not None:
            total += self.halo_bytes * halo_tokens(padded, self.window, cp_size)
        if self.linear is None:
            return total
        sizes = self.linear
        is_short = padded <= sizes.max_short(cp_size)
        tokens = padded * (cp_size - 1) // cp_size * sizes.token_bytes
        channels = 2 * sizes.key_heads * sizes.key_dim + sizes.value_heads * sizes.value_dim
        halo = halo_tokens(padded, self.conv_kernel, cp_size) * channels * sizes.width
        of_layer = np.where(is_short, tokens, 2 * (cp_size - 1) * sizes.map_bytes) + halo
        return total + self.num_passes * self.num_linear * of_layer


def halo_tokens(padded: np.ndarray, window: int, cp_size: int) -> np.ndarray:
    """Tokens before their chunks that all ranks of a group together receive for each document: int64 [n].

    The sum of `halo.num_halo_tokens` over documents: 12 tokens, window 3, cp_size 3 -> 8
    """
    chunk, rank = padded[:, None] // (2 * cp_size), np.arange(cp_size)
    before_early, before_late = rank * chunk, (2 * cp_size - 2 - 2 * rank) * chunk  # not held by the rank itself
    return (np.minimum(before_early, window - 1) + np.minimum(before_late, window - 1)).sum(axis=1)


def sent_numbers(config: Config, kind: LayerKind = SOFTMAX[0]) -> int:
    """Numbers of a token that a rank sends in a layer of this kind: keys and values, or a latent.

    Llama 8B on tp 2: 4 x 2 x 128 -> 1024        DeepSeek-V3 -> 576
    """
    if config.shares_latents:
        return config.model.latent_attention.compressed_width
    model = of_kind(config.model, kind)
    return model.resolved_query_groups // config.parallel.tp * (model.resolved_head_dim + model.value_head_dim)
