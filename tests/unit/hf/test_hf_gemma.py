"""config.json <-> `model.*` of Gemma 3 and 4: heads and positions of each kind of layer, and what LoRA refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from sft.config import RopeConfig
from sft.config.lora import LoraConfig
from sft.errors import ConfigError
from sft.hf.architecture import architecture
from sft.layers.kinds import model_of_kind
from sft.weights.lora.targets import select
from tests.unit.fixtures.hf import back, model_of, refusal
from tests.unit.hf.released import config

TINY = config(
    "gemma_4_26b_a4b text",
    rope_parameters=...,
    **dict(hidden_size=32, intermediate_size=64, moe_intermediate_size=24, num_experts=4, top_k_experts=2),
    **dict(num_attention_heads=8, num_key_value_heads=4, head_dim=8, global_head_dim=16, num_hidden_layers=6),
    **dict(layer_types=["sliding_attention"] * 5 + ["full_attention"], vocab_size=301),
)


def test_heads_of_each_kind_of_layer() -> None:
    model = model_of(config("gemma_4_31b"))
    full, window = (model_of_kind(model, model.kind_of(layer)) for layer in (6, 5))
    assert (full.resolved_head_dim, full.resolved_query_groups, full.full_attention.projects_values) == (512, 4, False)
    assert (window.resolved_head_dim, window.resolved_query_groups) == (256, 16)
    assert window.full_attention.projects_values
    assert (full.sliding_window, window.sliding_window) == (None, 1024)
    assert (full.rotary_dim, full.rope.base, window.rotary_dim) == (512, 1e6, 256)
    assert window.rope == RopeConfig(base=1e4)
    assert model_of_kind(model_of(config("gemma_3_27b")), "window attention").resolved_head_dim == 128


def test_heads_as_transformers_saves_them(tmp_path: Path) -> None:
    """In per_layer_config, layers without a window have their own heads; transformers writes no names with `global`."""
    transformers.Gemma4TextConfig(**TINY).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    own = {"head_dim": 16, "num_key_value_heads": 2}
    assert saved["per_layer_config"] == {"5": own} and "global_head_dim" not in saved
    assert model_of(saved) == model_of(TINY)
    assert "per_layer_config has layers [4]" in refusal(saved | {"per_layer_config": {"4": own}})
    assert "per_layer_config has sliding_window" in refusal(saved | {"per_layer_config": {"5": {"sliding_window": 4}}})


LINEAR = ({"rope.scaling": "linear", "rope.factor": 16.0}, {"rope_type": "linear", "rope_theta": 1e6, "factor": 16.0})
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 5e6, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    "content,changes,written",
    [
        (config("gemma3_1b"), *LINEAR),
        (config("gemma_3_27b"), *LINEAR),
        (TINY, {"rope.base": 5e6, "rope.fraction": 0.5}, PROPORTIONAL),
    ],
    ids=["text", "vision", "gemma4"],
)
def test_changed_positions_are_read_by_transformers(
    tmp_path: Path, content: dict[str, Any], changes: dict[str, Any], written: dict[str, Any]
) -> None:
    """A recipe may scale the positions of full attention; the positions of layers with windows stay the same."""
    (tmp_path / "config.json").write_text(json.dumps(back(content, **changes)))
    theirs: Any = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs = getattr(theirs, "text_config", theirs)
    full, window = (theirs.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    assert {key: full[key] for key in written} == written
    assert (window["rope_type"], window["rope_theta"]) == ("default", 1e4)


def test_lora_adapts_the_router_and_refuses_experts_by_name() -> None:
    """PEFT's all-linear includes the router, which is a Linear; the files store all experts in one tensor."""
    found = architecture(TINY, "config.json")

    def adapted(targets: list[str], exclude: list[str]) -> set[str]:
        lora = LoraConfig(rank=2, targets=targets, exclude=exclude)
        weights = select(lora, found.model, found.family.mappings(found.model, found.vocab_size))
        return {name.rpartition(".")[2] for weight in weights for name in weight.linears()}

    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    linears = attention | {"gate_proj", "up_proj", "down_proj"}
    assert adapted(["all-linear"], []) == linears | {"proj"}
    assert adapted(["all-linear"], ["router.proj"]) == linears
    with pytest.raises(ConfigError, match="hold all experts of a layer in one tensor"):
        adapted(["experts.gate_up_proj"], [])
