"""FP8 weights are dequantised as their config.json says; every other quantisation is refused by name."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sft.errors import CheckpointError, ConfigError
from sft.hf.quantization import Scheme, scheme_of
from sft.hf.source import open_source
from tests.unit.fixtures import hf
from tests.unit.fixtures.hf import Make, tensors

FP8, LARGEST = torch.float8_e4m3fn, 448.0
BLOCKS = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[24, 16])
PER_TENSOR = dict(
    quant_method="fp8", activation_scheme="static", dequantize=False, weight_block_size=None,
    modules_to_not_convert=["lm_head"],
)  # fmt: skip


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    """The quantization_config that llm-compressor writes."""
    kind = dict(num_bits=8, type="float", strategy=strategy, symmetric=True, dynamic=False, group_size=None)
    group = dict(targets=["Linear"], weights={**kind, **weights}, input_activations=None, output_activations=None)
    return dict(
        quant_method="compressed-tensors", format="float-quantized", config_groups={"group_0": group},
        ignore=["lm_head"], kv_cache_scheme=None, quantization_status="compressed",
    )  # fmt: skip


CASES: dict[str, tuple[dict[str, Any], str, tuple[int, int] | None, torch.dtype, tuple[int, ...] | None]] = {
    # config, suffix of the scale, rows and columns that share a scale (None: all), type and shape of the scales
    "blocks": (BLOCKS, "_scale_inv", (24, 16), torch.float32, None),
    "per tensor": (PER_TENSOR, "_scale_inv", None, torch.bfloat16, ()),
    "compressed, per tensor": (compressed("tensor"), "_scale", None, torch.float32, (1,)),
    "compressed, per row": (compressed("channel"), "_scale", (1, 1 << 20), torch.bfloat16, None),
    "compressed, blocks": (compressed("block", block_structure=[24, 16]), "_scale", (24, 16), torch.bfloat16, None),
}


def quantise(source: Path, case: str) -> dict[str, torch.Tensor]:
    """Rewrites the layers' matrices of a bf16 folder in FP8.  Returns their dequantised values in float64."""
    config, suffix, block, scale_dtype, scale_shape = CASES[case]
    stored, meant = tensors(source), {}
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        matrix = stored[name].double()
        rows, columns = block or matrix.shape
        grid = math.ceil(matrix.shape[0] / rows), math.ceil(matrix.shape[1] / columns)
        scales = torch.empty(grid, dtype=scale_dtype)
        narrow = torch.empty(matrix.shape, dtype=FP8)
        exact = np.empty(matrix.shape)
        for i in range(grid[0]):
            for j in range(grid[1]):
                part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = matrix[part].abs().max() / LARGEST * (1 + 0.1 * i + 0.01 * j)
                narrow[part] = (matrix[part] / scales[i, j].double()).to(FP8)
                exact[part] = narrow[part].double().numpy() * float(scales[i, j])
        stored[name] = narrow
        stored[name + suffix] = scales if scale_shape is None else scales.reshape(scale_shape)
        if config is PER_TENSOR:
            stored[name.replace(".weight", ".activation_scale")] = torch.tensor(0.5, dtype=torch.bfloat16)
        meant[name] = torch.from_numpy(exact)
    save_file(stored, source / "model.safetensors")
    hf.change(source, quantization_config=config)
    return meant


@pytest.mark.parametrize("case", CASES)
def test_every_number_is_the_stored_one_times_its_scale(made: Make, case: str) -> None:
    source = made("qwen3", dtype=torch.bfloat16)
    before = tensors(source)
    meant = quantise(source, case)
    opened = open_source(source)
    assert {name: expected.dtype for name, expected in opened.manifest.items()} == dict.fromkeys(before, "BF16")
    assert {name: expected.shape for name, expected in opened.manifest.items()} == {
        name: tuple(tensor.shape) for name, tensor in before.items()
    }
    assert opened.describe().endswith("tensors trained; 86 KiB, 14 tensors stored in FP8")
    for name, numbers in meant.items():
        rows, columns = numbers.shape
        found = torch.empty(rows, columns, dtype=torch.bfloat16)
        opened.stored.read_rows(name, 0, found)
        # A stored number has 4 significant bits and a scale at most 24, so fp32 rounds their product; then bf16 rounds
        # it.
        expected = numbers.float().bfloat16()
        assert torch.equal(found, expected)
        assert b"".join(opened.stored.raw_blocks(name, 999)) == expected.view(torch.uint8).numpy().tobytes()
        part = torch.empty(5, 7)  # fp32, across blocks
        opened.stored.read_rows(name, 22, part, first_column=13)
        assert torch.equal(part, expected[22:27, 13:20].float())


def test_transformers_reads_the_same_numbers(made: Make) -> None:
    """Compares with the dequantisation of transformers, for blocks that divide the matrices."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    source = made("qwen3", dtype=torch.bfloat16)
    quantise(source, "per tensor")
    opened, stored = open_source(source), tensors(source)
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        scale = stored[f"{name}_scale_inv"].reshape(1, 1)
        expected = Fp8Dequantize(None)._dequantize_one(stored[name], scale, torch.bfloat16)
        found = torch.empty(expected.shape, dtype=torch.bfloat16)
        opened.stored.read_rows(name, 0, found)
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "config,told",
    [
        (dict(quant_method="awq", bits=4), 'quant_method = "awq", which is not supported; fp8 (one scale per block'),
        (dict(quant_method="gptq", bits=4), 'quant_method = "gptq", which is not supported'),
        (dict(quant_method="bitsandbytes", load_in_4bit=True), 'quant_method = "bitsandbytes"'),
        (dict(quant_method="modelopt", quant_algo="NVFP4"), 'quant_method = "modelopt", which is not supported'),
        ("fp8", "quant_method = null, which is not supported"),
        ({**BLOCKS, "fmt": "e5m2"}, 'quantization_config.fmt = "e5m2" is not supported, only e4m3'),
        ({**BLOCKS, "weight_block_size": [128]}, "blocks of [128], which are not [rows, columns]"),
        ({**BLOCKS, "zero_point": True}, "quantization_config.zero_point = true is not supported"),
        (compressed("channel", num_bits=4, type="int"), 'weights of num_bits = 4, type = "int", strategy = "channel"'),
        (  # packed integers have a format of their own
            compressed("group", num_bits=4, type="int", group_size=32),
            'group_size = 32, symmetric = true in format = "float-quantized", which are not supported; fp8 (one',
        ),
        (compressed("group", group_size=128), 'strategy = "group", group_size = 128, symmetric = true in format ='),
        ({**compressed("channel"), "format": "nvfp4-pack-quantized"}, 'in format = "nvfp4-pack-quantized", which are'),
        ({**compressed("channel"), "format": "marlin-24"}, 'in format = "marlin-24", which are not supported'),
        (compressed("block", block_structure=[128]), 'strategy = "block", symmetric = true, block_structure = [128]'),
        ({**compressed("channel"), "kv_cache_scheme": {"num_bits": 8}}, 'kv_cache_scheme = {"num_bits": 8} is not'),
        (dict(quant_method="compressed-tensors"), "names no group of weights"),
    ],
)
def test_other_quantisations_are_refused_by_name(config: Any, told: str) -> None:
    assert told in hf.refusal(hf.llama(quantization_config=config))


def test_blocks_that_config_json_does_not_name_are_those_of_transformers() -> None:
    from transformers import FineGrainedFP8Config

    scheme, _ = scheme_of({"quantization_config": {"quant_method": "fp8"}})
    assert isinstance(scheme, Scheme) and scheme.block == (128, 128) == tuple(FineGrainedFP8Config().weight_block_size)
    assert scheme.dtype == "BF16"
    stored_in_half = {"quantization_config": PER_TENSOR, "torch_dtype": "float16"}
    scheme, _ = scheme_of(stored_in_half)
    assert isinstance(scheme, Scheme) and scheme.block is None and scheme.dtype == "F16"


def damage(source: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> str:
    stored = tensors(source)
    change(stored)
    save_file(stored, source / "model.safetensors")
    with pytest.raises((CheckpointError, ConfigError)) as error:
        open_source(source)
    return str(error.value)


NAME = "model.layers.1.mlp.up_proj.weight"


def test_scales_that_do_not_fit(made: Make) -> None:
    source = made("qwen3", dtype=torch.bfloat16)
    quantise(source, "blocks")
    good = tensors(source)[f"{NAME}_scale_inv"]
    told = "FP8 weights without a usable scale"
    line = "one number per block of 24 x 16): model.layers.*.mlp.up_proj.weight (layer 1)."
    for scale in (good[:, :1].contiguous(), good.to(torch.int32), good.sum()):
        found = damage(source, lambda stored: stored.update({f"{NAME}_scale_inv": scale}))  # noqa: B023
        assert told in found and found.endswith(line)
    assert told in damage(source, lambda stored: stored.pop(f"{NAME}_scale_inv"))
    # a scale without an FP8 weight
    spare = {NAME: torch.zeros(64, 32, dtype=torch.bfloat16), f"{NAME}_scale_inv": good}
    assert f"surplus: {NAME.replace('.1.', '.*.')}_scale_inv (layer 1)" in damage(source, lambda s: s.update(spare))
    hf.change(source, quantization_config=...)
    assert "type F8_E4M3 is not supported" in damage(source, lambda stored: None)
