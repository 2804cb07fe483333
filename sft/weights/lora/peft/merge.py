"""Adds an adapter to its weight."""

import torch


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """weight + scale * b @ a, computed in fp32 (in float64 for float64), and rounded once to the weight's type.

    weight: [out, in]; a: [rank, in]; b: [out, rank]
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(dtype), b.to(dtype), a.to(dtype), alpha=scale).to(weight.dtype)
