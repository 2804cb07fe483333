"""gpt-oss: its config.json, the positions of its tensors in ours, and its number of parameters."""

from pathlib import Path

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sft.config import ModelConfig, MoeConfig, RopeConfig
from sft.errors import ConfigError
from sft.hf.architecture import architecture, read
from sft.hf.family import RowSpan, TensorMapping
from sft.hf.tensor_view import HfTensor, HfView, View
from sft.layers.flops import TrainFlops, num_parameters
from sft.mcore.attention import rope
from sft.mcore.checkpoint_io.megatron_arguments import model_arguments
from tests.unit.fixtures import hf
from tests.unit.fixtures.hf import back, model_of

FREQUENCY_TOLERANCE = 1e-6  # relative; fp32, the same formula
RELEASED = hf.released("gpt_oss_20b")
ROPE = RopeConfig(base=150000.0, scaling="yarn", factor=32.0, original_max_position=4096, truncate=False)


def test_gpt_oss_20b_as_released() -> None:
    model = model_of(RELEASED)
    assert model == ModelConfig(
        num_layers=24,
        hidden_size=2880,
        ffn_hidden_size=2880,
        num_attention_heads=64,
        num_query_groups=8,
        head_dim=64,
        vocab_size=201088,
        norm_epsilon=1e-5,
        qkv_bias=True,
        attention_output_bias=True,
        attention_sinks=True,
        mlp_bias=True,
        activation="clamped_swiglu",
        activation_limit=7.0,
        activation_alpha=1.702,
        sliding_window=128,
        sliding_window_layers=list(range(1, 24, 2)),
        rope=ROPE,
        moe=MoeConfig(num_experts=32, top_k=4, router_bias=True),
    )


def test_only_matrices_are_multiplied() -> None:
    """Parameters in products of a layer: q and o 2 x 2880 x 4096, k and v 2 x 2880 x 512, router 2880 x 32, 4 experts;
    without biases and sinks."""
    found = architecture(RELEASED, "config.json")
    layer = 2 * 2880 * 4096 + 2 * 2880 * 512 + 2880 * 32 + 4 * 3 * 2880 * 2880
    assert TrainFlops.of(found.model, found.vocab_size).per_token == 6 * 24 * layer


def test_the_positions_are_those_of_transformers() -> None:
    config = transformers.GptOssConfig(**{k: v for k, v in RELEASED.items() if k != "quantization_config"})
    config.standardize_rope_params()
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    model = model_of(RELEASED)
    torch.testing.assert_close(rope.frequencies(model.rope, 64), expected, rtol=FREQUENCY_TOLERANCE, atol=0)
    assert rope.softmax_scale(model) == pytest.approx(factor**2 / 8, rel=FREQUENCY_TOLERANCE)
    rounded = rope.frequencies(model.rope.model_copy(update={"truncate": True}), 64)
    assert float((rounded / expected - 1).abs().max()) > 0.01


def test_megatron_lm_is_told_the_same() -> None:
    model = model_of(RELEASED)
    found = model_arguments(model, padded_vocab_size=201088, positions=131072, bf16=True)
    expected = {
        **dict(add_bias_linear=True, add_qkv_bias=True, softmax_type="learnable", swiglu=False, quick_geglu=True),
        **dict(glu_linear_offset=1.0, activation_func_clamp_value=7.0, window_size=(127, 0), num_experts=32),
        **dict(window_attn_skip_freq=[1, 0] * 12, moe_router_topk=4, moe_router_pre_softmax=False),
    }
    assert {name: found[name] for name in expected} == expected
    plain = model_arguments(model_of(hf.llama()), padded_vocab_size=1, positions=1, bf16=True)
    assert (plain["add_bias_linear"], plain["softmax_type"], plain["swiglu"]) == (False, "vanilla", True)
    assert "quick_geglu" not in plain


def test_biases_that_config_json_has_as_one_key_are_equal() -> None:
    with pytest.raises(ConfigError, match="qkv_bias = true and model.attention_output_bias = false differ, but atten"):
        back(hf.llama(), qkv_bias=True)
    assert back(hf.llama(), qkv_bias=True, attention_output_bias=True)["attention_bias"] is True


def test_rows_that_take_turns_written_out() -> None:
    """A tensor [experts, h, 6] whose last axis alternates gate and up: the up projection of expert 2 is columns 1, 3
    and 5."""
    sizes = {"h": 8, "X": 4, "e": 3}
    gate, up = (View("gate_up", "X h e+e", part, transposed=True, blocks="e").of(0, 2, sizes) for part in (0, 1))
    assert gate == HfView(HfTensor("gate_up", (4, 8, 6)), (2,), 0, 3, transposed=True, num_blocks=3)
    assert up == HfView(HfTensor("gate_up", (4, 8, 6)), (2,), 1, 3, transposed=True, num_blocks=3)
    assert [up.row(number) for number in range(3)] == [1, 3, 5] and up.shape == (3, 8)
    assert (up.step, up.rows_of_run) == (2, 3)
    bias = View("bias", "X e+e", 1, blocks="e").of(0, 2, sizes)
    assert bias == HfView(HfTensor("bias", (4, 6)), (2,), 1, 3, num_blocks=3) and bias.shape == (3,)
    mapping = TensorMapping("fc1", 0, 2, (1, 4), (0, 2), (gate, up), "rows", 2)
    assert mapping.spans() == [RowSpan(0, 0, 3, 0), RowSpan(1, 0, 3, 3)]  # a span for each part, not for each row


def test_a_router_is_no_stack_of_experts() -> None:
    found = architecture(hf.released("gpt_oss_20b", num_hidden_layers=1, layer_types=...), "config.json")
    mappings = {m.key: m for m in found.family.mappings(found.model, 10) if m.stack_index in ((0,), (0, 31))}
    layer, ours = "model.layers.0", "decoder.layers"
    assert mappings[f"{ours}.mlp.router.weight"].sources[0].tensor == HfTensor(f"{layer}.mlp.router.weight", (32, 2880))
    assert mappings[f"{ours}.mlp.router.weight"].shape() == (1, 32, 2880)
    bias = mappings[f"{ours}.mlp.experts.experts.linear_fc2.bias"]
    assert bias.sources[0] == HfView(HfTensor(f"{layer}.mlp.experts.down_proj_bias", (32, 2880)), (31,), 0, 2880)
    assert bias.shape() == (1, 32, 2880)
    sinks = mappings[f"{ours}.self_attention.core_attention.softmax_offset"]
    assert sinks.sources[0].tensor == HfTensor(f"{layer}.self_attn.sinks", (64,))


@pytest.mark.parametrize("family", ["llama", "granite", "smollm3"])
@pytest.mark.parametrize("attention,mlp", [(True, True), (True, False), (False, True)])
def test_optional_biases(tmp_path: Path, family: str, attention: bool, mlp: bool) -> None:
    """Files have the biases of the config, and the right number of elements."""
    source = hf.save(tmp_path / "source", family, attention_bias=attention, mlp_bias=mlp)
    found = architecture(read(source), "config.json")
    model = found.model
    assert (model.qkv_bias, model.attention_output_bias, model.mlp_bias) == (attention, attention, mlp)
    stored = {name: tuple(tensor.shape) for name, tensor in hf.tensors(source).items()}
    views = [view.tensor for m in found.family.mappings(model, hf.VOCAB) for view in m.sources]
    assert {tensor.name: tensor.shape for tensor in views} == stored
    assert num_parameters(model, hf.VOCAB) == sum(tensor.numel() for tensor in hf.tensors(source).values())
