"""Quantisers: numbers written out, compared with compressed-tensors, and errors within the bound of each format."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sft.low_bits import fp4, fp8, grouped
from sft.low_bits.fp4 import TransposedMxfp4

E4M3 = torch.float8_e4m3fn
GROUPED: dict[str, tuple[str, int, int]] = {  # format, bits, group
    "int4": ("pack-quantized", 4, 32),
    "int4 of 128": ("pack-quantized", 4, 128),
    "int4 with zero points": ("pack-quantized", 4, 16),
    "int8": ("pack-quantized", 8, 32),
    "nvfp4": ("nvfp4-pack-quantized", 4, 16),
    "mxfp4": ("mxfp4-pack-quantized", 4, 32),
    "mxfp8": ("mxfp8-quantized", 8, 32),
}


def weight(seed: int, rows: int = 96, columns: int = 384) -> Tensor:
    """Values of very different sizes in the groups of a row, with a group of zeros, tiny values and ties."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-12, 3, (rows, columns // 16, 1), generator=random).float())
    values = (torch.randn(rows, columns // 16, 16, generator=random) * sizes).flatten(1)
    values[0, :128] = 0.0
    values[1, :32] = torch.arange(-16, 16) / 8
    return values.bfloat16().float()


def quantised(values: Tensor, name: str) -> grouped.GroupedPart:
    form, bits, group = GROUPED[name]
    whole = grouped.global_scale(values.abs().amax()) if name == "nvfp4" else None
    return grouped.quantised(values, form, bits, group, symmetric="zero" not in name, whole=whole)


# --- written out ---------------------------------------------------------------------------------------------------


def test_fp8_blocks_written_out() -> None:
    """Blocks of 2 rows and 3 columns of a matrix of 3 rows and 4 columns."""
    values = torch.tensor([[1.0, -3.5, 0.1, 0.0], [0.4, 7.0, 2.0, 0.0], [-0.875, 0.0, 0.01, 896.0]])
    part = fp8.quantised(values, (2, 3))
    assert part.scales.tolist() == [[0.015625, 1.0], [0.001953125, 2.0]]
    assert part.numbers.float().tolist() == [
        [64, -224, 6.5, 0],
        [26, 448, 128, 0],
        [-448, 0, 5, 448],
    ]
    meant = [[1, -3.5, 0.1015625, 0], [0.40625, 7, 2, 0], [-0.875, 0, 0.009765625, 896]]
    assert part.values(torch.float32).tolist() == meant


def test_fp8_scales_of_bf16_powers_and_whole_tensors() -> None:
    values = torch.tensor([[3.0, 450.0]])
    assert fp8.quantised(values, (1, 1), dtype=torch.bfloat16).scales.tolist() == [[0.006683349609375, 1.0078125]]
    assert fp8.quantised(values, (1, 2), powers=True).scales.tolist() == [[2.0]]
    part = fp8.quantised(values, (1, 1), largest=torch.tensor(896.0))
    assert part.scales.tolist() == [[2.0, 2.0]] and part.numbers.float().tolist() == [[1.5, 224.0]]


def test_fp4_rounds_ties_to_the_number_with_an_even_code() -> None:
    numbers = torch.tensor(
        [
            0.25,
            0.26,
            0.75,
            0.74,
            1.25,
            1.75,
            2.5,
            3.5,
            5.0,
            5.01,
            100.0,
            -0.25,
            -0.75,
            -5.0,
            -7.0,
            0,
        ]
    )
    meant = [0, 0.5, 1, 0.5, 1, 2, 2, 4, 4, 6, 6, -0.0, -1, -4, -6, 0]
    octets = fp4.packed_fp4(numbers)
    assert octets.tolist() == [0x10, 0x12, 0x42, 0x64, 0x76, 0x87, 0xEA, 0x0F]
    assert fp4.unpacked_fp4(octets).tolist() == meant


def test_mxfp4_exponents_written_out() -> None:
    """A scale of 2^0 has the exponent 127.  From 7.0 on, 6 would be more than half a step away."""
    largest = torch.tensor([6.0, 4.0, 6.96875, 7.0, 3.5, 3.46875, 1.0, 0.0, 2.0**-126, 3e38])
    assert fp4.exponents_for(largest, 2).tolist() == [
        127,
        127,
        127,
        128,
        127,
        126,
        125,
        0,
        0,
        253,
    ]
    assert fp4.exponents_for(torch.tensor([448.0, 447.0, 1.0]), 8).tolist() == [
        128,
        127,
        119,
    ]


def test_the_layout_of_gpt_oss_written_out() -> None:
    """An expert's matrix is stored transposed: [32 columns, 2 rows] become blocks [2 rows, 1 group, 16]."""
    values = torch.zeros(1, 32, 2)
    values[0, 0], values[0, 1], values[0, 31] = (
        torch.tensor([6.0, 12.0]),
        torch.tensor([-0.5, 2.0]),
        1.0,
    )
    part = TransposedMxfp4.quantised(values)
    assert part.scales.tolist() == [[[127], [128]]]
    assert part.blocks.shape == (1, 2, 1, 16)
    assert part.blocks[0, 0, 0].tolist() == [0x97, *[0] * 14, 0x20]
    assert part.blocks[0, 1, 0].tolist() == [0x27, *[0] * 14, 0x10]
    assert torch.equal(part.values(torch.float32), values)


def test_int4_written_out() -> None:
    """Two groups of 4.  The scale is the largest magnitude / 7.5; 7.5 itself becomes 7, and -7.5 becomes -8."""
    values = torch.tensor([[7.5, -1.0, 0.4, 3.5, -15.0, 4.9, 0.0, 1.0]])
    part = grouped.quantised(values, "pack-quantized", 4, 4)
    assert part.scales.tolist() == [[1.0, 2.0]] and part.scales.dtype == torch.bfloat16
    assert part.numbers.tolist() == [[int.from_bytes(bytes([0x7F, 0xC8, 0xA0, 0x88]), "little", signed=True)]]
    assert part.values(torch.bfloat16).tolist() == [[7, -1, 0, 4, -16, 4, 0, 0]]


def test_nvfp4_written_out() -> None:
    """The group with the largest magnitude of the matrix gets the scale 448."""
    values = torch.zeros(1, 32)
    values[0, :3], values[0, 16:18] = torch.tensor([6.0, -2.9, 0.5]), torch.tensor([0.75, 0.1])
    whole = grouped.global_scale(values.abs().amax())
    part = grouped.quantised(values, "nvfp4-pack-quantized", 4, 16, whole=whole)
    assert whole.tolist() == [448.0] and part.scales.float().tolist() == [[448.0, 56.0]]
    assert part.numbers.tolist() == [[0xD7, 0x01, *[0] * 6, 0x27, *[0] * 7]]
    assert part.values(torch.float32)[0, [0, 1, 2, 16, 17]].tolist() == [
        6.0,
        -3.0,
        0.5,
        0.75,
        0.125,
    ]
    assert grouped.global_scale(torch.tensor(0.0)).tolist() == [1.0]


def test_packed_integers_are_unpacked_again() -> None:
    for bits in (4, 8):
        numbers = torch.arange(-(1 << bits - 1), 1 << bits - 1, dtype=torch.int8).reshape(2, -1)
        assert torch.equal(grouped.unpacked(grouped.packed(numbers, bits), bits), numbers)


# --- compressed-tensors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("seed", range(2))
def test_compressed_tensors_stores_the_same(name: str, seed: int) -> None:
    values, (form, bits, group) = weight(seed), GROUPED[name]
    part = quantised(values, name)
    kind = "int" if form == "pack-quantized" else "float"
    options: dict[str, Any] = dict(num_bits=bits, type=kind, group_size=group, strategy="group")
    options |= dict(symmetric="zero" not in name)
    if name == "nvfp4":
        options |= dict(strategy="tensor_group", scale_dtype=E4M3)
    elif kind == "float":
        options |= dict(scale_dtype=torch.uint8)
    stored = of_the_package(values, form, options, part.global_scale)
    numbers = stored["weight" if name == "mxfp8" else "weight_packed"]
    assert torch.equal(numbers.view(torch.uint8), part.numbers.view(torch.uint8))
    assert torch.equal(stored["weight_scale"].view(torch.uint8), part.scales.view(torch.uint8))
    if part.global_scale is not None:
        assert torch.equal(stored["weight_global_scale"], part.global_scale)
    if part.zero_points is not None:
        assert torch.equal(stored["weight_zero_point"], part.zero_points)


def of_the_package(values: Tensor, form: str, options: dict[str, Any], whole: Tensor | None) -> dict[str, Tensor]:
    """What compressed-tensors stores for a matrix in fp32, by the last part of the names."""
    pytest.importorskip(
        "compressed_tensors",
        reason="an optional package: pip install compressed-tensors",
    )
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    arguments = QuantizationArgs(**options)
    groups = values.unflatten(1, (-1, options["group_size"]))
    state = {"weight": values.clone()}
    if whole is not None:
        state["weight_global_scale"] = generate_gparam(values.amin(), values.amax())
    scales, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments, state.get("weight_global_scale"))
    if options["type"] == "int":  # files have scales in bf16
        is_zero = groups.abs().amax(-1) == 0
        scales = torch.where(is_zero, torch.finfo(torch.bfloat16).eps, scales).bfloat16().float()
        if not arguments.symmetric:
            zero = (-8 - groups.amin(-1).clamp(max=0) / scales).clamp(-8, 7)
            state["weight_zero_point"] = zero.round().to(torch.int8)
    state["weight_scale"] = scales
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = dict(compressor.compress(state, QuantizationScheme(targets=["Linear"], weights=arguments)))
    if options["type"] == "int":
        stored["weight_scale"] = stored["weight_scale"].bfloat16()
    return stored


def test_compressed_tensors_gives_the_same_fp8_blocks() -> None:
    pytest.importorskip(
        "compressed_tensors",
        reason="an optional package: pip install compressed-tensors",
    )
    from compressed_tensors.quantization import QuantizationArgs, quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    values = weight(0, rows=256)
    part = fp8.quantised(values, (128, 128))
    arguments = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[128, 128])
    blocks = values.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scales, zeros = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), arguments)
    assert torch.equal(scales, part.scales)
    assert torch.equal(
        quantize(values, scales, zeros, arguments, dtype=E4M3).float(),
        part.numbers.float(),
    )


# --- errors --------------------------------------------------------------------------------------------------------

ROUNDING = 4e-6  # of the quotient and the product in fp32, relative to half a step
HALF_ULP_BF16 = 2.0**-8  # relative; values of NVFP4, and scales of integers, are rounded to bf16


def step_of_fp4(numbers: Tensor) -> Tensor:
    """The distance of the two FP4 numbers around each magnitude; 2 above 4."""
    return torch.where(numbers < 2, 0.5, torch.where(numbers < 4, 1.0, 2.0))


@pytest.mark.parametrize("seed", range(3))
def test_an_error_of_fp8_is_at_most_half_a_step(seed: int) -> None:
    values = weight(seed, rows=200)
    part = fp8.quantised(values, (128, 128))
    scales = part.scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
    half = torch.exp2(torch.floor(torch.log2((values / scales).abs().clamp(min=2.0**-6)))) * 2.0**-4
    error = (part.values(torch.float32) - values).abs()
    assert bool((error <= half * scales * (1 + ROUNDING)).all()) and bool((error > 0.4 * half * scales).any())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", GROUPED)
def test_an_error_is_at_most_half_a_step(name: str, seed: int) -> None:
    values, group = weight(seed), GROUPED[name][2]
    part = quantised(values, name)
    scales = effective(part).repeat_interleave(group, 1)
    numbers = (values / scales).abs()
    if name.startswith("int"):
        limit = (
            8 if name.startswith("int4") else 128
        )  # the rounded scale moves the largest number away from limit - 0.5
        half = torch.full_like(values, 0.5 + limit * HALF_ULP_BF16)
    elif name == "mxfp8":
        half = torch.exp2(torch.floor(torch.log2(numbers.clamp(2.0**-6, 448.0)))) * 2.0**-4 + (numbers > 448) * 32
    else:
        half = step_of_fp4(numbers) / 2
    rounded = (values.abs() + scales) * HALF_ULP_BF16 * (name == "nvfp4" or name.startswith("int"))
    bound = half * scales + rounded
    error = (part.values(torch.float32) - values).abs()
    assert bool((error <= bound * (1 + ROUNDING)).all())
    assert bool((error > 0.6 * bound).any()), "the bound is far from the errors"


def effective(part: grouped.GroupedPart) -> Tensor:
    """The step of numbers in the values of each group."""
    if part.format == "nvfp4-pack-quantized":
        assert part.global_scale is not None
        return part.scales.float() / part.global_scale
    return part.scales.float() if part.format == "pack-quantized" else fp4.powers_of_2(part.scales)


@pytest.mark.parametrize("name", GROUPED)
def test_zeros_stay_zeros_and_every_scale_is_usable(name: str) -> None:
    part = quantised(torch.zeros(4, 128), name)
    assert bool((part.values(torch.bfloat16) == 0).all()) and bool(part.values(torch.float32).isfinite().all())


def test_values_of_mxfp4_are_quantised_without_an_error() -> None:
    """A second quantisation gives the same values, but not always the same scales."""
    random = torch.Generator().manual_seed(7)
    octets = torch.randint(0, 256, (64, 64), generator=random, dtype=torch.uint8)
    octets[:, :16] &= 0x11 * 3  # magnitudes up to 1.5 in the first group of 32
    scales = torch.randint(100, 140, (64, 4), generator=random, dtype=torch.uint8)
    values = fp4.dequantised(octets.unflatten(1, (4, 16)), scales)
    numbers, other_scales = fp4.quantised_mxfp4(values)
    assert torch.equal(fp4.dequantised(numbers.unflatten(1, (4, 16)), other_scales), values)
    assert bool((other_scales[:, 0] != scales[:, 0]).all()) and torch.equal(other_scales[:, 1:], scales[:, 1:])
