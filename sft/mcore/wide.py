"""The dtype in which kernels and modules compute sums and norms: fp32, or float64 for float64 inputs."""

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """torch.float32 for a narrower `dtype`, otherwise `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    """x in fp32, or in float64 if it is float64."""
    return x.to(wide_dtype(x.dtype))
