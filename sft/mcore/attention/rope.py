"""Computes the rotary position embedding: the frequencies of each scaling method, the rotation, the table of angles.

Frequencies follow Hugging Face transformers, whose definitions match released weights: linear (Chen 2023), llama3
(Llama 3.1), YaRN (Peng 2023), and proportional, which rotates only the first dimensions of a head (Gemma 4).

YaRN multiplies rotated queries and keys by a temperature.  If whole heads are rotated, this module multiplies the
attention scale by the square of the temperature instead.  If only a part of each head is rotated, it multiplies sine
and cosine by the temperature.  DeepSeek has a second factor (`model.rope.mscale_all_dim`), whose square multiplies the
attention scale, and so also the products of the part of each head that is not rotated.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sft.config import ModelConfig, RopeConfig


def frequencies(rope: RopeConfig, rotary_dim: int) -> Tensor:
    """The angle in radians by which each pair of dimensions turns per position: float32 [rotary_dim / 2].

    rotary_dim 4, base 10000, no scaling -> [1, 0.01]; proportional with fraction 0.5 -> [1, 0]
    """
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    plain = 1.0 / rope.base**exponent
    if rope.is_proportional:
        plain[int(rope.fraction * rotary_dim // 2) :] = 0.0  # an angle of 0 does not change the pair
    if rope.scaling in ("none", "proportional"):
        return plain
    if rope.scaling == "linear":
        return plain / rope.factor
    return _llama3(plain, rope) if rope.scaling == "llama3" else _yarn(plain, rope, rotary_dim)


def softmax_scale(model: ModelConfig) -> float:
    """The factor on query-key products: `plain_scale` times the square of a temperature.

    The temperature is DeepSeek's if mscale_all_dim is set, else YaRN's if whole heads are rotated, else 1.

    query and key heads 192 wide, factor 40, mscale_all_dim 1 -> 1.3689 ** 2 / sqrt(192) = 0.1352
    """
    rope = model.rope
    if rope.mscale_all_dim is not None:
        return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2 * plain_scale(model)
    temperature = _temperature(rope) if rotates_whole_heads(model) else 1.0
    return temperature**2 * plain_scale(model)


def rotates_whole_heads(model: ModelConfig) -> bool:
    return model.rotary_dim == model.resolved_head_dim


def plain_scale(model: ModelConfig) -> float:
    """Factor on query-key products in layers without rotary positions."""
    return model.attention_multiplier or 1.0 / math.sqrt(model.resolved_head_dim)


def _temperature(rope: RopeConfig) -> float:
    """YaRN's factor on rotated queries and keys; 1 with other scalings."""
    return rope.attention_factor or 0.1 * math.log(rope.factor) + 1.0 if rope.scaling == "yarn" else 1.0


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    assert rope.original_max_position is not None
    wavelength = 2 * math.pi / plain
    turns = rope.original_max_position / wavelength  # number of turns over the original context
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    unscaled = smooth.clamp(0.0, 1.0)  # 1: the frequency stays, 0: it is divided by factor
    return (1 - unscaled) * plain / rope.factor + unscaled * plain


def _yarn(plain: Tensor, rope: RopeConfig, rotary_dim: int) -> Tensor:
    assert rope.original_max_position is not None

    def dimension(turns: float) -> float:
        """The index of the pair of dimensions that makes `turns` full turns over the original context; a fraction."""
        assert rope.original_max_position is not None
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return rotary_dim * math.log(ratio) / (2 * math.log(rope.base))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    scaled = ramp.clamp(0.0, 1.0)
    return plain / rope.factor * scaled + plain * (1 - scaled)


@dataclass(frozen=True)
class Rotation:
    """The rotation of queries and keys of a rank's tokens, made once per microbatch for all layers.

    cos, sin [t, 1, rotary_dim]: the value of each pair of dimensions, once for each of its two dimensions; times YaRN's
        temperature if only a part of each head is rotated
    query_scale [t, 1, 1]: factor on rotated queries; None: no factor
    interleaved: True: a pair consists of neighbouring dimensions (0 and 1, 2 and 3, ...); False: of dimension i of the
        first half and dimension i of the second half
    """

    cos: Tensor
    sin: Tensor
    query_scale: Tensor | None = None
    interleaved: bool = False

    @staticmethod
    def of(
        positions: Tensor,
        inv_freq: Tensor,
        dtype: torch.dtype,
        rope: RopeConfig = RopeConfig(),
        *,
        whole_heads: bool | None = None,
    ) -> "Rotation":
        """The rotation of tokens.  Angles are fp32, as in transformers.

        positions: int64 [t], positions of the tokens in their texts
        inv_freq: float32 [rotary_dim / 2], the result of `frequencies`; dtype: of cos and sin
        whole_heads: whether whole heads are rotated; None: they are if rope.fraction is 1
        """
        angles = torch.outer(positions.to(torch.float32), inv_freq)
        angles = angles.repeat_interleave(2, dim=-1) if rope.interleaved else torch.cat((angles, angles), dim=-1)
        angles = angles[:, None, :]
        scale = None
        if rope.query_scale_beta is not None:
            assert rope.original_max_position is not None
            multiples = (positions // rope.original_max_position).to(torch.float32)
            scale = (1.0 + rope.query_scale_beta * torch.log1p(multiples)).to(dtype)[:, None, None]
        is_whole = rope.fraction == 1.0 if whole_heads is None else whole_heads
        temperature = 1.0 if is_whole else _temperature(rope)
        cos, sin = (temperature * angles.cos()).to(dtype), (temperature * angles.sin()).to(dtype)
        return Rotation(cos, sin, scale, rope.interleaved)

    def apply_to_query(self, query: Tensor) -> Tensor:
        rotated = self.apply(query)
        return rotated if self.query_scale is None else rotated * self.query_scale

    def query_gradient(self, grad: Tensor) -> Tensor:
        """The backward of `apply_to_query`."""
        return self.undo(grad if self.query_scale is None else grad * self.query_scale)

    def apply(self, x: Tensor) -> Tensor:
        """Rotate the first rotary_dim dimensions of each head of x [t, heads, head_dim]."""
        return self._turned(x, self.sin)

    def undo(self, x: Tensor) -> Tensor:
        """The backward of `apply`, for x [t, heads, head_dim].  Without a temperature it is the inverse rotation."""
        return self._turned(x, -self.sin)

    def _turned(self, x: Tensor, sin: Tensor) -> Tensor:
        width, quarter_turn = self.cos.shape[-1], _turn_neighbours if self.interleaved else _rotate_half
        if width == x.shape[-1]:
            return x * self.cos + quarter_turn(x) * sin
        first = x[..., :width]
        return torch.cat((first * self.cos + quarter_turn(first) * sin, x[..., width:]), dim=-1)


def _rotate_half(x: Tensor) -> Tensor:
    """Turns [a, b] into [-b, a], where a and b are the halves of the last dimension."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _turn_neighbours(x: Tensor) -> Tensor:
    """Turns [a, b, c, d] into [-b, a, -d, c], where a, b, c, d are elements of the last dimension."""
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack((-second, first), dim=-1).flatten(-2)


class RotaryTable(torch.nn.Module):
    """The angles of positions 0, 1, 2, ... for core's GPTModel, used if Transformer Engine rotates queries and keys.

    Replaces core's RotaryEmbedding, which caches up to 32 tables, one for each max_seqlen: 16 GiB at 1M positions.
    This class keeps one table, as long as the longest document so far.
    """

    def __init__(self, inv_freq: Tensor) -> None:
        super().__init__()
        self.inv_freq = inv_freq  # not a buffer: stays fp32 when the model is cast, and is not in checkpoints
        self.table = inv_freq.new_empty((0, 1, 1, 2 * inv_freq.numel()))

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """The length of the table that a microbatch needs: max_seqlen, from core's argument packed_seq_params."""
        length: int = args[4].max_seqlen_q
        return length

    def forward(self, length: int, packed_seq: bool = True, cp_group: Any = None) -> Tensor:
        """The table: float32 [length, 1, 1, rotary_dim].  Its last axis has the angles in radians, twice in a row.

        Each half has one angle for each pair of dimensions.  packed_seq, cp_group: given by core, not used
        """
        if self.table.shape[0] < length:
            angles = torch.outer(torch.arange(length, dtype=torch.float32, device=self.inv_freq.device), self.inv_freq)
            self.table = torch.cat((angles, angles), dim=-1)[:, None, None, :]
        return self.table[:length]
