"""Families whose layers have multi-head latent attention: DeepSeek-V3 and what followed its configuration.

    projection of the token            norm                 up projection, by head
    q_a_proj                           q_a_layernorm        q_b_proj              query: plain part, rotary part
    kv_a_proj_with_mqa                 kv_a_layernorm       kv_b_proj             plain part of the key, value
      latent, rotary key of all heads

Without q_lora_rank there is q_proj in place of q_a_proj and q_b_proj.
"""

from collections.abc import Mapping
from typing import Any

from sft.hf.families.rules import DEFAULTS, KEYS, NO_BIAS, OPTIONS, mlp, outer
from sft.hf.family import Family, Rule
from sft.hf.model_keys import Computed
from sft.hf.tensor_view import LAYER, View

_OURS = "decoder.layers.self_attention"
_FIRST, _LATENT = "first_k_dense_replace", "latent_attention"
_NAMES = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_KEYS = {
    **{key: name for key, name in KEYS.items() if key not in ("head_dim", "num_query_groups")},
    **{f"{_LATENT}.{name}": name for name in _NAMES},
    "rope.interleaved": "rope_interleave",
}


_IMPLIED = {"qkv_bias": False, "qk_norm": False, "head_dim": None, f"{_LATENT}.norm_epsilon": 1e-6}


def _attention(model: str = "model") -> tuple[Rule, ...]:
    layer = f"{model}.layers.{LAYER}"

    def rule(ours: str, name: str, shape: str, needs: str = "") -> Rule:
        view = View(f"{layer}.self_attn.{name}.weight", shape)
        return Rule(f"{_OURS}.{ours}", (view,), needs=f"{_LATENT}.{needs}" if needs else "")

    return (
        Rule("decoder.layers.input_layernorm.weight", (View(f"{layer}.input_layernorm.weight", "h"),)),
        rule("linear_q_proj.weight", "q_proj", "q h", "projects_queries"),
        rule("linear_q_down_proj.weight", "q_a_proj", "Q h", "q_lora_rank"),
        rule("linear_q_up_proj.layer_norm_weight", "q_a_layernorm", "Q", "q_lora_rank"),
        rule("linear_q_up_proj.weight", "q_b_proj", "q Q", "q_lora_rank"),
        rule("linear_kv_down_proj.weight", "kv_a_proj_with_mqa", "C h"),
        rule("linear_kv_up_proj.layer_norm_weight", "kv_a_layernorm", "L"),
        rule("linear_kv_up_proj.weight", "kv_b_proj", "B L"),
        rule("linear_proj.weight", "o_proj", "h O"),
    )


def _no_experts(content: Mapping[str, Any]) -> None:
    """None, the number of experts of a model whose layers are all dense."""
    dense, count = content.get(_FIRST, 3), content.get("num_hidden_layers")
    if type(dense) is not int or type(count) is not int or dense < count:
        raise ValueError(
            f"{_FIRST} = {dense} with num_hidden_layers = {count}: only dense layers are supported, because this "
            "trainer has no router with sigmoid scores and expert groups"
        )


def _no_change(value: Any, count: int) -> dict[str, Any]:
    return {}


# num_key_value_heads says nothing: kv_b_proj has keys and values of all heads.
_GROUPS = {
    "num_query_groups": Computed("num_attention_heads", lambda content: content.get("num_attention_heads"), _no_change)
}


LATENT = (
    Family(
        model_type="deepseek_v3",  # Moonlight, too
        class_name="DeepseekV3ForCausalLM",
        rules=(*outer(), *_attention(), *mlp()),
        implied=_IMPLIED,
        keys=_KEYS,
        computed={**_GROUPS, "moe.num_experts": Computed(_FIRST, _no_experts, _no_change)},
        defaults={
            **DEFAULTS,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "rope_interleave": True,
        },
        # Repositories of these models contain code of the models, which transformers has too.
        options={key: allowed for key, allowed in {**OPTIONS, **NO_BIAS}.items() if key != "auto_map"},
    ),
)
