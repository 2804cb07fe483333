"""Rotary frequencies compared with those of transformers, the attention scale, and the table of angles."""

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3NextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding, apply_rotary_pos_emb

from sft.config import ModelConfig, RopeConfig
from sft.mcore.attention import rope

# fp32 powers and products in another order: a few units in the last place (6e-8 each)
FREQUENCY_TOLERANCE = 1e-6
FLOAT64_TOLERANCE = 1e-12

YARN = dict(scaling="yarn", factor=4.0, original_max_position=4096)
LLAMA3 = dict(scaling="llama3", factor=8.0, original_max_position=8192)
CASES: list[dict[str, Any]] = [
    dict(),
    dict(base=1e6),
    dict(scaling="linear", factor=8.0, base=5e5),
    LLAMA3,
    {**LLAMA3, "base": 5e5, "factor": 32.0},
    {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 3.0},
    {**LLAMA3, "original_max_position": 64},
    YARN,
    {**YARN, "base": 1e6, "factor": 32.0, "original_max_position": 32768},
    {**YARN, "beta_fast": 8.0, "beta_slow": 0.5},
    {**YARN, "original_max_position": 64},  # beta_fast is never reached: the ramp starts at dimension 0
    {**YARN, "attention_factor": 1.3},
    {**YARN, "base": 100.0, "original_max_position": 100_000},  # the ramp ends beyond the last dimension
    {**YARN, "base": 5e4, "factor": 64.0, "beta_fast": 1.0},  # no ramp except rounding, as in Kimi-K2
    {**YARN, "base": 1e6, "beta_fast": 1.1},  # both ends of the ramp are within one or two dimensions
]


def hf(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """The results of transformers: inverse frequencies, and the factor of cos and sin."""
    kind = {"none": "default"}.get(config.scaling, config.scaling)
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": config.base}
    if kind != "default":
        parameters["factor"] = config.factor
    if kind in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = config.original_max_position
    if kind == "llama3":
        parameters |= {"low_freq_factor": config.low_freq_factor, "high_freq_factor": config.high_freq_factor}
    if kind == "yarn":
        parameters |= {"beta_fast": config.beta_fast, "beta_slow": config.beta_slow}
        parameters["attention_factor"] = config.attention_factor
    theirs = LlamaConfig(head_dim=head_dim, max_position_embeddings=1 << 20, rope_parameters=parameters)
    compute = LlamaRotaryEmbedding.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    frequencies, attention_factor = compute(theirs, device=torch.device("cpu"))
    return frequencies, float(attention_factor)


def model_of(config: RopeConfig, head_dim: int) -> ModelConfig:
    sizes = dict(num_layers=2, hidden_size=8, ffn_hidden_size=8, num_attention_heads=2)
    return ModelConfig(**sizes, head_dim=head_dim, rope=config)


@pytest.mark.parametrize("head_dim", [4, 96])
@pytest.mark.parametrize("fields", CASES, ids=lambda f: " ".join(f"{k}={v}" for k, v in f.items()) or "plain")
def test_frequencies_and_scale_are_those_of_transformers(fields: dict[str, Any], head_dim: int) -> None:
    config = RopeConfig(**fields)
    expected, attention_factor = hf(config, head_dim)
    found = rope.frequencies(config, head_dim)
    assert found.dtype == torch.float32
    assert found.shape == (head_dim // 2,)
    torch.testing.assert_close(found, expected, rtol=FREQUENCY_TOLERANCE, atol=0.0)
    # transformers multiplies queries and keys by the factor, so their product has its square.
    scale = attention_factor**2 / math.sqrt(head_dim)
    assert rope.softmax_scale(model_of(config, head_dim)) == pytest.approx(scale, rel=FLOAT64_TOLERANCE)


def test_yarn_written_out() -> None:
    """The original context is 64: no dimension turns 32 times (the ramp begins at 0); dimension 1.008, rounded up to 2,
    turns once.

    The ramp over pairs 0, 1, 2, 3 is 0, 1/2, 1, 1.  Temperature 0.1 ln 4 + 1 = 1.1386294, squared 1.2964770.
    """
    config = RopeConfig(base=10000.0, scaling="yarn", factor=4.0, original_max_position=64)
    expected = [1.0, 0.1 * 0.5 + 0.025 * 0.5, 0.0025, 0.00025]
    assert rope.frequencies(config, 8).tolist() == pytest.approx(expected, rel=FREQUENCY_TOLERANCE)
    assert rope.softmax_scale(model_of(config, 64)) == pytest.approx(0.125 * 1.2964770, abs=1e-7)


# --- the table ---------------------------------------------------------------------------------------------


def test_table_written_out() -> None:
    table = rope.RotaryTable(torch.tensor([1.0, 0.25]))
    assert table(4).shape == (4, 1, 1, 4)
    assert table(4).dtype == torch.float32
    assert table(4)[:, 0, 0].tolist() == [
        [0.0, 0.0, 0.0, 0.0],
        [1.0, 0.25, 1.0, 0.25],
        [2.0, 0.5, 2.0, 0.5],
        [3.0, 0.75, 3.0, 0.75],
    ]


def test_table_grows_to_the_longest_and_is_sliced_for_the_rest() -> None:
    table = rope.RotaryTable(torch.tensor([1.0, 0.25]))
    first = table(3).clone()
    longer = table(10)
    assert table.table.shape[0] == 10 and torch.equal(longer[:3], first)
    assert torch.equal(table(3), first)
    assert table(3).data_ptr() == longer.data_ptr()  # a view of the same table


def test_table_stays_fp32_and_out_of_checkpoints() -> None:
    table = rope.RotaryTable(torch.tensor([1.0, 0.1])).bfloat16()
    assert table(1 << 12).dtype == torch.float32
    assert table(1 << 12)[-1, 0, 0, 0].item() == 4095.0  # bfloat16 would round it to 4096
    assert table.state_dict() == {}
    assert list(table.parameters()) == []


# --- the rotation of a microbatch --------------------------------------------------------------------------


def test_rotation_written_out() -> None:
    """Positions 0, 1 and, in another document, 1; angles of a quarter turn and of a half turn.  Pairs are (0, 2), (1,
    3)."""
    turned = rope.Rotation.of(torch.tensor([0, 1, 1]), torch.tensor([math.pi / 2, math.pi]), torch.float32)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(3, 2, 4)  # [t, heads, head_dim]
    expected = torch.tensor([[1.0, 2.0, 3.0, 4.0], [-3.0, -2.0, 1.0, -4.0], [-3.0, -2.0, 1.0, -4.0]])[:, None]
    torch.testing.assert_close(turned.apply(x), expected.expand(3, 2, 4), rtol=0.0, atol=1e-6)
    torch.testing.assert_close(turned.undo(turned.apply(x)), x, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(
    "fields",
    [{}, {"interleaved": True}, {"fraction": 0.75, "scaling": "yarn", "factor": 4.0, "original_max_position": 64}],
    ids=["halves", "neighbours", "a part"],
)
def test_undo_is_the_gradient_of_apply(fields: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = model_of(RopeConfig(base=100.0, **fields), 8)
    inv_freq = rope.frequencies(model.rope, model.rotary_dim)
    turned = rope.Rotation.of(torch.arange(50), inv_freq, torch.float32, model.rope)
    x, grad = torch.randn(50, 2, 8, requires_grad=True), torch.randn(50, 2, 8)
    (expected,) = torch.autograd.grad(turned.apply(x), x, grad)
    torch.testing.assert_close(turned.undo(grad), expected)


def test_angles_are_fp32_whatever_is_turned() -> None:
    """In bf16, 1,001,503 would be 999,424, and the angle 1001.503 would be 1000: the cosines are 0.92 and 0.56."""
    turned = rope.Rotation.of(torch.tensor([1_001_503]), torch.tensor([1e-3]), torch.bfloat16)
    assert turned.cos.dtype == turned.sin.dtype == torch.bfloat16
    assert turned.cos.flatten().tolist() == pytest.approx([-0.78688] * 2, rel=2**-8)
    assert turned.sin.flatten().tolist() == pytest.approx([0.61710] * 2, rel=2**-8)
    assert turned.apply(torch.ones(1, 1, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16


# --- a part of each head -----------------------------------------------------------------------------------


def test_a_part_of_each_head_is_rotated_as_in_transformers() -> None:
    """YaRN's temperature multiplies only the rotated elements, not the whole product of query and key."""
    config = RopeConfig(base=100.0, fraction=0.75, scaling="yarn", factor=4.0, original_max_position=64)
    model, positions = model_of(config, 8), torch.arange(50)
    x = torch.randn(1, 2, 50, 8, generator=torch.Generator().manual_seed(4))  # [1, heads, t, 8]
    fields = dict(original_max_position_embeddings=64, partial_rotary_factor=0.75)
    parameters = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, **fields}
    theirs = Qwen3NextConfig(head_dim=8, hidden_size=16, num_attention_heads=2, rope_parameters=parameters)
    cos, sin = Qwen3NextRotaryEmbedding(theirs)(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    inv_freq = rope.frequencies(model.rope, model.rotary_dim)
    assert inv_freq.shape == (3,)
    rotation = rope.Rotation.of(positions, inv_freq, torch.float32, model.rope)
    torch.testing.assert_close(rotation.apply(x[0].transpose(0, 1)), expected[0].transpose(0, 1), rtol=0.0, atol=1e-5)
    assert rope.softmax_scale(model) == rope.plain_scale(model)
    assert rope.RotaryTable(inv_freq)(4).shape == (4, 1, 1, 6)


@pytest.mark.parametrize("fraction, problem", [(0.1, "rotates 0 of 8"), (0.4, "rotates 3 of 8")])
def test_an_odd_part_is_refused(fraction: float, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        model_of(RopeConfig(fraction=fraction), 8)
