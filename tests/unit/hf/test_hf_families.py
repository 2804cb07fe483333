"""Released models of single families: what their config.json means to us, and what is refused."""

from typing import Any

import pytest

from sft.config import ModelConfig, RopeConfig
from sft.errors import ConfigError
from sft.hf.architecture import architecture, nested, write_back
from sft.hf.families import FAMILIES
from sft.hf.families.unsupported import _MISSING
from sft.hf.family import views_by_tensor
from tests.unit.fixtures.hf import refusal, released


def test_phi_4_as_released() -> None:
    model = architecture(released("phi_4"), "config.json").model
    sizes = (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.num_attention_heads)
    assert sizes == (40, 5120, 17920, 40)
    assert (model.resolved_query_groups, model.resolved_head_dim, model.vocab_size) == (10, 128, 100352)
    assert model.rope == RopeConfig(base=250000.0) and not model.tie_embeddings and not model.qkv_bias


def test_phi_4_stores_joint_projections() -> None:
    """Rows of 40 query heads, 10 key heads and 10 value heads of width 128; gate above up."""
    model = architecture(released("phi_4", num_hidden_layers=1), "config.json").model
    mappings = list(FAMILIES["phi3"].mappings(model, 100352))
    shapes = {tensor.name: tensor.shape for tensor in views_by_tensor(mappings)}
    layer = "model.layers.0"
    assert shapes == {
        "model.embed_tokens.weight": (100352, 5120),
        "model.norm.weight": (5120,),
        "lm_head.weight": (100352, 5120),
        f"{layer}.input_layernorm.weight": (5120,),
        f"{layer}.self_attn.qkv_proj.weight": (7680, 5120),
        f"{layer}.self_attn.o_proj.weight": (5120, 5120),
        f"{layer}.post_attention_layernorm.weight": (5120,),
        f"{layer}.mlp.gate_up_proj.weight": (35840, 5120),
        f"{layer}.mlp.down_proj.weight": (5120, 17920),
    }
    by_key = {mapping.key: [(view.first, view.num_rows) for view in mapping.sources] for mapping in mappings}
    assert by_key["decoder.layers.self_attention.linear_qkv.weight"] == [(0, 5120), (5120, 1280), (6400, 1280)]
    assert by_key["decoder.layers.mlp.linear_fc1.weight"] == [(0, 17920), (17920, 17920)]


def test_seed_oss_as_released() -> None:
    """Heads that are wider together than the model; its dropout matters to no model but one in training."""
    model = architecture(released("seed_oss_36b"), "config.json").model
    assert (model.num_layers, model.num_attention_heads, model.resolved_head_dim, model.hidden_size) == (
        64,
        80,
        128,
        5120,
    )
    assert model.qkv_bias and model.rope == RopeConfig(base=1e7) and model.resolved_query_groups == 8


@pytest.mark.parametrize(
    "content,why",
    [
        (released("phi_4", rope_scaling={"type": "longrope"}), 'rope_type = "longrope" is not supported'),
        (released("phi_4", rope_scaling={"type": "su"}), 'rope_type = "su" is not supported'),
        (
            released("phi_4", rope_scaling={"type": "yarn", "factor": 4.0}),
            'rope_type = "yarn", but transformers computes a phi3 model only with none',
        ),
        (released("phi_4", partial_rotary_factor=0.75), "partial_rotary_factor = 0.75 is not supported"),
        (released("phi_4", resid_pdrop=0.1), "resid_pdrop = 0.1 is not supported, only 0.0"),
        (released("seed_oss_36b", attention_out_bias=True), "attention_out_bias = true is not supported, only false"),
        (released("seed_oss_36b", attention_bias=False), "attention_bias = false is not supported, only true"),
        (released("seed_oss_36b", mlp_bias=True), "mlp_bias = true is not supported, only false"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_options_that_our_model_lacks(content: dict[str, Any], why: str) -> None:
    assert why in refusal(content)


def test_positions_that_transformers_would_not_compute_are_not_written() -> None:
    content = released("phi_4")
    scaled = {"rope.scaling": "yarn", "rope.factor": 4.0, "rope.original_max_position": 16384}
    now = ModelConfig.model_validate(nested(architecture(content, "config.json").values | scaled))
    with pytest.raises(ConfigError, match="model.rope.scaling = yarn, but transformers computes a phi3 model only"):
        write_back(content, now, "config.json", dtype="bfloat16", seq_length=None)


def test_an_unsupported_family_is_told_what_it_needs() -> None:
    assert refusal({"model_type": "dots1"}).startswith(
        'config.json: model_type = "dots1" is not supported: it needs a table of its tensors beside a router with '
        "sigmoid scores, and windows in some layers, which this trainer does not have.  The nearest family is "
        "glm4_moe.  Supported: llama, "
    )
    assert all(nearest in FAMILIES and named not in FAMILIES for named, (_, nearest) in _MISSING.items())


def test_experts_of_granite_are_rows_of_one_tensor() -> None:
    """Gate above up, as in our tensor; nothing is transposed."""
    content = {
        **{"model_type": "granitemoe", "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 3},
        **{"num_attention_heads": 2, "vocab_size": 10, "num_local_experts": 4, "num_experts_per_tok": 2},
    }
    model = architecture(content, "config.json").model
    mappings = [one for one in FAMILIES["granitemoe"].mappings(model, 10) if one.stack_index == (1, 3)]
    views = [view for mapping in mappings for view in mapping.sources]
    block = "model.layers.1.block_sparse_moe"
    assert [(view.name, view.tensor.shape, view.index, view.first, view.shape) for view in views] == [
        (f"{block}.input_linear.weight", (4, 6, 8), (3,), 0, (3, 8)),
        (f"{block}.input_linear.weight", (4, 6, 8), (3,), 3, (3, 8)),
        (f"{block}.output_linear.weight", (4, 8, 3), (3,), 0, (8, 3)),
    ]
    assert not any(view.transposed for view in views)


def test_clipping_is_refused() -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 3, "num_attention_heads": 2}
    sizes |= {"vocab_size": 10}
    assert "clip_qkv = 8 is not supported" in refusal({**sizes, "model_type": "olmoe", "clip_qkv": 8})
