"""NF4 numbers: written out, and those of bitsandbytes, if it is installed."""

import pytest
import torch

from sft.low_bits import nf4

# bitsandbytes 0.50.2 on a CPU, blocksize 64, without compress_statistics, of the matrix `numbers`.
OCTETS = (
    "0a2d4e71b2d5f81c3e6f91c4e70a2d4f81b3e5f91c3e60a2d4e71b2d5f91c3e6"
    "1b3e5f91c3e60a2d4e71b2d5f91c3e60a2d4e71b2d5f81c3e6f91c4e70a2d4f8"
    "7777777777777777777777777777777777777777777777777777777777777777"
)
VALUES = [
    *(-1.435897707939148, 0.6969501972198486, -0.8145173192024231, 1.4910985231399536),
    *(-0.38109520077705383, 2.0625, 0.33191853761672974, -1.435897707939148),
]


def numbers() -> torch.Tensor:
    """Two rows, and a row of zeros."""
    rows = [[((37 * i + 5 * row) % 64 - 30) / 32 * (row + 1) for i in range(64)] for row in range(2)]
    return torch.tensor([*rows, [0.0] * 64])


def test_numbers_and_scales_are_those_of_bitsandbytes() -> None:
    part = nf4.quantised(numbers())
    assert bytes(part.octets.flatten().tolist()).hex() == OCTETS
    assert part.scales.tolist() == [[1.03125], [2.0625], [0.0]]
    values = part.values(torch.float32)
    assert values.shape == (3, 64) and values[1, :8].tolist() == VALUES and not values[2].any()
    assert part.num_bytes == 3 * (32 + 4)


def test_the_last_block_of_a_row_may_be_shorter() -> None:
    matrix = torch.tensor([[*[0.5] * 64, 4.0, -2.0, 0.0]])
    part = nf4.quantised(matrix)
    assert part.scales.tolist() == [[0.5, 4.0]]
    assert part.values(torch.float32)[0, 62:].tolist() == [0.5, 0.5, 4.0, pytest.approx(-2.100292), 0.0]


def test_a_number_between_two_values_gets_the_nearest() -> None:
    limit = 0.8614784181118011  # between 0.7229568362236023 and 1
    matrix = torch.tensor([[1.0, limit, limit + 1e-6, -0.848, *[0.0] * 60]])
    assert nf4.quantised(matrix).values(torch.float32)[0, :4].tolist() == [
        *(1.0, pytest.approx(0.72295684), 1.0, pytest.approx(-0.6961928)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_numbers_are_quantised_as_by_bitsandbytes(dtype: torch.dtype) -> None:
    oracle = pytest.importorskip("bitsandbytes.functional")
    matrix = (torch.randn(96, 256, generator=torch.Generator().manual_seed(3)) * 0.02).to(dtype)
    octets, state = oracle.quantize_4bit(matrix, blocksize=64, quant_type="nf4", compress_statistics=False)
    part = nf4.quantised(matrix)
    assert torch.equal(part.octets.flatten(), octets.flatten())
    assert torch.equal(part.scales.flatten(), state.absmax)
    assert torch.equal(part.values(dtype), oracle.dequantize_4bit(octets, state))
