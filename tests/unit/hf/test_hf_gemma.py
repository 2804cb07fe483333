"""config.json <-> `model.*` of Gemma 2 and 3."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import transformers

from sft.config import ModelConfig, RopeConfig
from sft.hf.architecture import architecture, nested, write_back
from tests.builders import RECIPE, parsed, refusal_lines
from tests.unit.fixtures.hf import refusal, released

SIZES = dict(
    num_hidden_layers=12,
    hidden_size=1152,
    intermediate_size=6912,
    num_attention_heads=4,
    num_key_value_heads=1,
)
GEMMA3_1B = {  # gemma-3-1b-it, but for its 26 layers
    **SIZES,
    "model_type": "gemma3_text",
    "head_dim": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}


def model_of(content: dict[str, Any]) -> ModelConfig:
    return architecture(content, "config.json").model


def test_gemma_3_27b_as_released() -> None:
    """Every sixth layer has full attention, whose positions are scaled by 8; windows have a base of their own."""
    found = architecture(released("gemma_3_27b"), "config.json")
    model = found.model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.vocab_size) == (62, 5376, 21504, 262208)
    assert (model.num_attention_heads, model.resolved_query_groups, model.resolved_head_dim) == (32, 16, 128)
    assert model.rope == RopeConfig(base=1e6, scaling="linear", factor=8.0, window_base=1e4)
    assert model.sliding_window == 1024
    assert model.sliding_window_layers == [number for number in range(1, 63) if number % 6]
    assert (model.norm_placement, model.norm_zero_centered, model.qk_norm) == ("both", True, True)
    assert (model.activation, model.tie_embeddings, model.norm_epsilon) == ("geglu", True, 1e-6)
    assert model.embedding_multiplier == pytest.approx(73.3212111) and model.round_embedding_multiplier
    assert model.attention_multiplier == pytest.approx(1 / math.sqrt(168))
    assert (model.attention_softcap, model.logits_softcap) == (None, None)
    assert found.sources["attention_multiplier"] == "text_config.query_pre_attn_scalar"


def test_gemma_2_says_its_caps_and_layers_by_silence() -> None:
    model = model_of({**SIZES, "model_type": "gemma2"})
    assert (model.attention_softcap, model.logits_softcap) == (50.0, 30.0)
    assert (model.sliding_window, model.sliding_window_layers) == (4096, [1, 3, 5, 7, 9, 11])
    assert not model.qk_norm and model.rope == RopeConfig(base=1e4)
    open_ended = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    uncapped = model_of({**SIZES, "model_type": "gemma2", **open_ended})
    assert (uncapped.attention_softcap, uncapped.logits_softcap) == (None, None)


@pytest.mark.parametrize("content", [GEMMA3_1B, released("gemma_3_27b")], ids=["text", "vision"])
def test_changed_positions_are_read_by_transformers(tmp_path: Path, content: dict[str, Any]) -> None:
    """A recipe may scale the positions of full attention; those of windows stay."""
    values = architecture(content, "config.json").values | {"rope.scaling": "linear", "rope.factor": 16.0}
    now = ModelConfig.model_validate(nested(values))
    written = write_back(content, now, "config.json", dtype="bfloat16", seq_length=None)
    assert write_back(content, model_of(content), "config.json", dtype="bfloat16", seq_length=None) == content | (
        {} if "torch_dtype" in content else {"torch_dtype": "bfloat16"}
    )
    (tmp_path / "config.json").write_text(json.dumps(written))
    theirs: Any = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs = getattr(theirs, "text_config", theirs)
    full, window = (theirs.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    assert (full["rope_type"], full["rope_theta"], full["factor"]) == ("linear", 1e6, 16.0)
    assert (window["rope_type"], window["rope_theta"]) == ("default", 1e4)
    assert model_of(written) == now


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = true is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        ({"hidden_activation": "gelu"}, 'hidden_activation = "gelu" is not supported'),
        ({"attention_bias": True}, "attention_bias = true is not supported"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0 is not a number above 0"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_is_refused(changes: dict[str, Any], why: str) -> None:
    assert why in refusal({**GEMMA3_1B, **changes})


@pytest.mark.parametrize("key", ["model.norm_placement=both", "model.activation=geglu"])
def test_transformer_engine_lacks_it(key: str) -> None:
    """auto takes the portable backend, and FP8, which only Transformer Engine has, is refused."""
    assert any(key.replace("=", " = ") in line for line in refusal_lines(RECIPE, key, "attention.backend=te"))
    assert any("run.fp8" in line for line in refusal_lines(RECIPE, key, "run.fp8=delayed"))
    assert parsed(key).config.attention.backend == "auto"
