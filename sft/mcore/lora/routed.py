"""Adds an adapter to the logits of a router, whose weight is no linear layer: logits + scale * B (A x).

A router computes logits in fp32.  The product of A and the tokens is in the tokens' type, and that of B is in fp32.
"""

from typing import Any

import torch
from torch import Tensor

from sft.config.lora import LoraConfig
from sft.layers.adapters import AdaptedWeight
from sft.mcore.lora.factors import Factors
from sft.mcore.lora.split import Split
from sft.mcore.wide import wide_dtype


class RouterAdapter(torch.nn.Module):
    """The adapter of a router.  Every rank of tp holds both factors, and computes the logits of its own tokens.

    weight, split: those of the router's weight; like: the weight, whose type the factors get
    """

    def __init__(self, weight: AdaptedWeight, split: Split, lora: LoraConfig, like: Tensor) -> None:
        super().__init__()
        assert lora.rank is not None
        (adapter,) = weight.adapters
        self.factors, self.scale = Factors(adapter, weight, lora.rank, split, like), lora.scale

    def forward(self, tokens: Tensor, scale: Tensor | None = None) -> Tensor:
        """The term of the logits: tokens [t, h] -> [t, experts], in fp32, or in float64 if the tokens are float64.

        scale: [h], factors of the tokens, which are multiplied into the columns of A; None: 1
        """
        a: Tensor = self.factors.a
        b: Tensor = self.factors.b[0]
        wide = wide_dtype(tokens.dtype)
        if scale is not None:
            a = (a.to(wide) * scale).to(tokens.dtype)
        return self.scale * ((tokens @ a.t()).to(wide) @ b.to(wide).t())

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Nothing: `Factors.leaves` describes the factors."""
        return {}
