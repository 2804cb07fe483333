"""Computes the decays inside of chunks, for recurrences with one decay for each head (gated delta rule, Mamba-2)."""

from abc import ABC, abstractmethod
from functools import cached_property

import torch
from torch import Tensor

from sft.mcore.linear_attention.schedule import CHUNK


class HeadDecays(ABC):
    """The decays of n chunks of c tokens, in the dtype of states.

    sums: [n, heads, c] float64, the sums s of the decays' logarithms from the start of the chunk to each token
    """

    sums: Tensor

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @cached_property
    def from_start(self) -> Tensor:
        """exp(s), decay from the start of the chunk to each token: [n, heads, c, 1]"""
        return self.sums.to(self.dtype).exp()[..., None]

    @cached_property
    def to_end(self) -> Tensor:
        """exp(s_c - s), decay from each token to the end of the chunk: [n, heads, c, 1]"""
        return (self.sums[..., -1:] - self.sums).to(self.dtype).exp()[..., None]

    @cached_property
    def decay(self) -> Tensor:
        """D_ij = exp(s_i - s_j) for i >= j, else 0: [n, heads, c, c]"""
        lower = torch.ones(CHUNK, CHUNK, dtype=self.dtype, device=self.sums.device).tril()
        differences = (self.sums[..., :, None] - self.sums[..., None, :]).to(self.dtype)
        return differences.mul_(lower).exp_().mul_(lower)
