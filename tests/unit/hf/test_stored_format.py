"""The format of released models' weights in low bits, from config.json."""

from typing import Any

import pytest

from sft.config.weight_format import NF4, WeightFormat
from sft.hf.architecture import architecture
from sft.hf.stored_format import stored_format
from tests.unit.fixtures import hf

_X = "mlp.experts.experts"
EXPERTS = {f"{_X}.linear_fc1.weight": 1.0, f"{_X}.linear_fc2.weight": 1.0}
DENSE = {"mlp.linear_fc1.weight": 1.0, "mlp.linear_fc2.weight": 1.0}
SHARED = {"mlp.shared_experts.linear_fc1.weight": 1.0, "mlp.shared_experts.linear_fc2.weight": 1.0}
QKV = {"self_attention.linear_qkv.weight": 1.0, "self_attention.linear_proj.weight": 1.0}


def format_of(content: dict[str, Any]) -> WeightFormat | None:
    return stored_format(content, architecture(content, "config.json"))


@pytest.mark.parametrize(
    "name, expected",
    [
        ("gpt_oss_20b", WeightFormat(name="MXFP4", bits=4, columns=32, scale_bytes=1, shares=EXPERTS)),
        ("kimi_k2_5", WeightFormat(name="INT4", bits=4, columns=32, scale_bytes=2, shares=EXPERTS)),
        ("minimax_m2", WeightFormat(name="FP8", bits=8, rows=128, columns=128, scale_bytes=4, shares=EXPERTS | QKV)),
    ],
)
def test_formats_of_released_models(name: str, expected: WeightFormat) -> None:
    assert format_of(hf.released(name)) == expected


def test_all_linears_of_deepseek_v3_are_in_fp8() -> None:
    found = format_of(hf.released("deepseek_v3"))
    assert found is not None and found.name == "FP8"
    latent = {f"self_attention.linear_{part}_proj.weight": 1.0 for part in ("q_down", "q_up", "kv_down", "kv_up")}
    output = {"self_attention.linear_proj.weight": 1.0}
    assert found.shares == latent | output | DENSE | EXPERTS | SHARED


def test_modules_of_some_layers_may_stay_in_bf16() -> None:
    """Of 36 layers of equal size, q_proj of the first one, 4 of 6 parts of linear_qkv, is in bf16."""
    content = hf.released("qwen3_8b") | {
        "quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn.q_proj"]}
    }
    found = format_of(content)
    assert found is not None
    assert found.shares == DENSE | QKV | {"self_attention.linear_qkv.weight": pytest.approx(1 - 4 / 6 / 36)}


def test_a_model_in_bf16_has_no_format() -> None:
    assert format_of(hf.released("qwen3_8b")) is None


def test_bytes_of_a_matrix() -> None:
    assert NF4.num_bytes(2, 128) == 2 * (64 + 2 * 4)
    blocks = WeightFormat(name="FP8", bits=8, rows=128, columns=128, scale_bytes=4)
    assert blocks.num_bytes(256, 128) == 256 * 128 + 2 * 4
    by_row = WeightFormat(name="FP8", bits=8, scale_bytes=4)
    assert by_row.num_bytes(256, 100) == 256 * (100 + 4)
