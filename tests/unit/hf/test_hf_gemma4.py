"""config.json <-> `model.*` of Gemma 4, its parameters, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sft.config import ModelConfig, RopeConfig
from sft.config.full_attention import FullAttentionConfig
from sft.config.lora import LoraConfig
from sft.errors import ConfigError
from sft.hf.architecture import architecture, nested, write_back
from sft.layers.flops import active_parameters, num_parameters
from sft.layers.kinds import layer_groups, model_of_kind
from sft.weights.lora.targets import select
from tests.builders import RECIPE, parsed, refusal_lines
from tests.unit.fixtures.hf import refusal, released

# Written from public descriptions of the two releases, not copied from their files.
GEMMA4_31B, _26B_A4B = released("gemma_4_31b"), released("gemma_4_26b_a4b")
GEMMA4_26B_A4B = {**_26B_A4B["text_config"], "architectures": ["Gemma4ForCausalLM"]}  # without towers
ROPE = GEMMA4_26B_A4B["rope_parameters"]
TINY = {
    **{key: value for key, value in GEMMA4_26B_A4B.items() if key != "rope_parameters"},
    **dict(hidden_size=32, intermediate_size=64, moe_intermediate_size=24, num_experts=4, top_k_experts=2),
    **dict(num_attention_heads=8, num_key_value_heads=4, head_dim=8, global_head_dim=16, num_hidden_layers=6),
    **dict(layer_types=["sliding_attention"] * 5 + ["full_attention"], vocab_size=301),
}


def model_of(content: dict[str, Any]) -> ModelConfig:
    return architecture(content, "config.json").model


def test_the_31b() -> None:
    """Every sixth layer has 4 key heads of 512 that are also values; the others have 16 of 256."""
    model = model_of(GEMMA4_31B)
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.vocab_size) == (60, 5376, 21504, 262144)
    assert model.full_attention == FullAttentionConfig(head_dim=512, num_query_groups=4, keys_as_values=True)
    assert model.rope == RopeConfig(base=1e6, scaling="proportional", fraction=0.25, window_base=1e4)
    assert (model.sliding_window, [len(g.numbers) for g in layer_groups(model) if g.mixer.window is None]) == (
        1024,
        [10],
    )
    assert (model.qk_norm, model.value_norm, model.layer_scalar, model.attention_multiplier) == (True, True, True, 1.0)
    assert (model.norm_placement, model.norm_zero_centered, model.activation) == ("both", False, "geglu")
    assert model.logits_softcap == 30.0 and model.tie_embeddings and model.moe.num_experts is None
    assert num_parameters(model, 262144) == 30_697_345_280  # "30.7B"


def test_heads_of_each_kind_of_layer() -> None:
    model = model_of(GEMMA4_31B)
    full, window = (model_of_kind(model, model.kind_of(layer)) for layer in (6, 5))
    assert (full.resolved_head_dim, full.resolved_query_groups, full.full_attention.num_kv_projections) == (512, 4, 1)
    assert (window.resolved_head_dim, window.resolved_query_groups) == (256, 16)
    assert window.full_attention.num_kv_projections == 2
    assert (full.sliding_window, window.sliding_window) == (None, 1024)
    assert (full.rotary_dim, full.rope.base, window.rotary_dim) == (512, 1e6, 256)
    assert window.rope == RopeConfig(base=1e4)
    assert model_of_kind(model_of(released("gemma_3_27b")), "window attention").resolved_head_dim == 128


def test_the_26b_a4b() -> None:
    model = model_of(GEMMA4_26B_A4B)
    moe = model.moe
    assert (moe.num_experts, moe.top_k, moe.ffn_hidden_size, moe.shared_ffn_hidden_size) == (128, 8, 704, 2112)
    assert moe.own_norms and moe.normalize_top_k and model.ffn_hidden_size == 2112
    total, active = num_parameters(model, 262144), active_parameters(model, 262144)
    assert (total, active) == (25_233_141_760, 3_822_530_560)  # "26B", "A4B"


@pytest.mark.parametrize("content", [GEMMA4_31B["text_config"], GEMMA4_26B_A4B], ids=["dense", "mixture"])
def test_parameters_are_those_of_transformers(content: dict[str, Any]) -> None:
    config = transformers.Gemma4TextConfig(**{k: v for k, v in content.items() if k not in ("architectures",)})
    with torch.device("meta"):
        theirs = transformers.Gemma4ForCausalLM(config)
    theirs.tie_weights()
    assert num_parameters(model_of(content), 262144) == sum(p.numel() for p in theirs.parameters())


def test_heads_as_transformers_saves_them(tmp_path: Path) -> None:
    """per_layer_config has the heads of layers without a window, and transformers writes no names with `global`."""
    config = transformers.Gemma4TextConfig(**{k: v for k, v in TINY.items() if k != "architectures"})
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["per_layer_config"] == {"5": {"head_dim": 16, "num_key_value_heads": 2}}
    assert "global_head_dim" not in saved
    assert model_of(saved) == model_of(TINY)
    own = {"5": {"head_dim": 16, "num_key_value_heads": 2}}
    assert "per_layer_config has layers [4]" in refusal(saved | {"per_layer_config": {"4": own["5"]}})
    assert "per_layer_config has sliding_window" in refusal(saved | {"per_layer_config": {"5": {"sliding_window": 4}}})


def test_changed_positions_are_read_by_transformers(tmp_path: Path) -> None:
    values = architecture(TINY, "config.json").values | {"rope.base": 5e6, "rope.fraction": 0.5}
    now = ModelConfig.model_validate(nested(values))
    written = write_back(TINY, now, "config.json", dtype="bfloat16", seq_length=None)
    assert write_back(TINY, model_of(TINY), "config.json", dtype="bfloat16", seq_length=None) == TINY | {
        "torch_dtype": "bfloat16"
    }
    (tmp_path / "config.json").write_text(json.dumps(written))
    theirs: Any = transformers.AutoConfig.from_pretrained(tmp_path)
    full, window = (theirs.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    assert (full["rope_type"], full["rope_theta"], full["partial_rotary_factor"]) == ("proportional", 5e6, 0.5)
    assert (window["rope_type"], window["rope_theta"]) == ("default", 1e4)
    assert model_of(written) == now


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"hidden_size_per_layer_input": 256}, "256, an embedding for each layer (E2B, E4B), is not supported"),
        ({"hidden_size_per_layer_input": ...}, "256 (the default of transformers), an embedding for each layer"),
        ({"num_kv_shared_layers": 20}, "20, layers with the keys of other layers (E2B, E4B), is not supported"),
        ({"use_double_wide_mlp": True}, "use_double_wide_mlp = true is not supported"),
        ({"use_bidirectional_attention": "all"}, 'use_bidirectional_attention = "all" is not supported'),
        ({"attention_bias": True}, "attention_bias = true is not supported"),
        ({"num_experts": None}, "num_experts is missing, but enable_moe_block = true"),
        ({"layer_types": ["sliding_attention"] * 6}, "layer_types ends with sliding_attention"),
        (
            {"rope_parameters": ROPE | {"full_attention": {"rope_type": "linear", "factor": 4.0}}},
            "only with proportion",
        ),
        ({"rope_parameters": ROPE | {"full_attention": ROPE["full_attention"] | {"factor": 8.0}}}, "factor = 8.0"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_is_refused(changes: dict[str, Any], why: str) -> None:
    content = {key: value for key, value in {**TINY, **changes}.items() if value is not ...}
    assert why in refusal(content)


def test_lora_refuses_the_router_and_experts_by_name() -> None:
    """PEFT's all-linear has the router, which we multiply in fp32; the files hold all experts in one tensor."""
    found = architecture(TINY, "config.json")

    def adapted(targets: list[str], exclude: list[str]) -> set[str]:
        lora = LoraConfig(rank=2, targets=targets, exclude=exclude)
        weights = select(lora, found.family, found.model, found.vocab_size)
        return {name.rpartition(".")[2] for weight in weights for name in weight.linears()}

    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert adapted(["all-linear"], ["router.proj"]) == attention | {"gate_proj", "up_proj", "down_proj"}
    with pytest.raises(ConfigError, match="cannot adapt model.layers.0.router.proj: the router multiplies"):
        adapted(["all-linear"], [])
    with pytest.raises(ConfigError, match="hold all experts in one tensor"):
        adapted(["experts.gate_up_proj"], [])


KINDS = [
    "model.value_norm=true",
    "model.layer_scalar=true",
    "model.rope.scaling=proportional",
]


@pytest.mark.parametrize("key", KINDS)
def test_transformer_engine_lacks_it(key: str) -> None:
    """auto takes the portable backend, and FP8, which only Transformer Engine has, is refused."""
    named = key.removesuffix("=true").replace("=", " = ")
    assert any(named in line for line in refusal_lines(RECIPE, key, "attention.backend=te"))
    assert any("run.fp8" in line for line in refusal_lines(RECIPE, key, "run.fp8=delayed"))
    assert parsed(key).config.attention.backend == "auto"


WINDOWS = ["model.sliding_window=16", "model.sliding_window_layers=[1]", "model.value_norm=true"]


@pytest.mark.parametrize(
    "keys, why",
    [
        (["model.full_attention.head_dim=16"], "needs layers of both kinds"),
        ([*WINDOWS, "model.full_attention.num_query_groups=3"], "does not divide"),
        ([*WINDOWS, "model.full_attention.head_dim=7"], "odd"),
        ([*WINDOWS, "model.full_attention.head_dim=16"], "needs rope.window_base"),
        ([*WINDOWS, "model.value_norm=false", "model.full_attention.keys_as_values=true"], "needs value_norm = true"),
        (["model.rope.scaling=proportional", "model.rope.interleaved=true"], "scaling = proportional"),
        (["model.rope.scaling=proportional", "model.rope.factor=2"], "has no effect with scaling = proportional"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_keys_that_do_not_fit(keys: list[str], why: str) -> None:
    assert any(why in line for line in refusal_lines(RECIPE, *keys))
