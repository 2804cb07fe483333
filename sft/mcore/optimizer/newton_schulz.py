"""Orthogonalises matrices by the Newton-Schulz iteration of Muon (Jordan et al., 2024).

Values and order of operations are those of torch.optim.Muon, so results in bf16 are equal to its results bit for bit.
"""

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315  # coefficients of the quintic, as in torch.optim.Muon
EPSILON = 1e-7  # the least norm by which a matrix is divided


def orthogonalised(matrices: Tensor, steps: int) -> Tensor:
    """Matrices with about the singular vectors of `matrices`, and singular values between 0.7 and 1.2.

    matrices: [n, rows, columns] in bf16 or fp32; a matrix of zeros stays zero
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    norms = torch.stack([matrix.norm() for matrix in x])
    x = x / norms.clamp(min=EPSILON)[:, None, None]
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
        x = torch.baddbmm(x, polynomial, x, beta=A)
    return x.mT if is_tall else x
