"""Declares families with multi-head latent attention: DeepSeek-V3, Kimi-K2, Moonlight, and GLM-4.7-Flash.

    projection of the token            norm                 up projection, by head
    q_a_proj                           q_a_layernorm        q_b_proj              query: plain part, rotary part
    kv_a_proj_with_mqa                 kv_a_layernorm       kv_b_proj             plain part of the key, value
      latent, rotary key of all heads

Without q_lora_rank, q_proj replaces q_a_proj and q_b_proj.  The rules of routers and experts are in routed.py.
"""

from dataclasses import replace

from sft.hf.families.routed import DENSE_FIRST, ROUTER_KEYS, SIGMOID, routed, shared_width
from sft.hf.families.rules import DEFAULTS, KEYS, NEXT_LAYER, NO_BIAS, OPTIONS, outer
from sft.hf.family import Family, Rule
from sft.hf.model_keys import Computed
from sft.hf.tensor_view import LAYER, View

_OURS = "decoder.layers.self_attention"
_LATENT = "latent_attention"
_NAMES = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_KEYS = {
    **{key: name for key, name in KEYS.items() if key not in ("head_dim", "num_query_groups")},
    **{f"{_LATENT}.{name}": name for name in _NAMES},
    "rope.interleaved": "rope_interleave",
}


_IMPLIED = {**SIGMOID, "qkv_bias": False, "qk_norm": False, "head_dim": None, f"{_LATENT}.norm_epsilon": 1e-6}


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


# num_key_value_heads has no effect: kv_b_proj has keys and values for every head.
_GROUPS = Computed("num_attention_heads", lambda content: content.get("num_attention_heads"))
_SIZES = {"qk_rope_head_dim": 64, "kv_lora_rank": 512, "rope_interleave": True, "norm_topk_prob": True}

_DEEPSEEK = Family(
    model_type="deepseek_v3",  # Moonlight, too
    class_name="DeepseekV3ForCausalLM",
    rules=(*outer(), *_attention(), *routed()),
    implied=_IMPLIED,
    keys={**_KEYS, **ROUTER_KEYS},
    computed={"num_query_groups": _GROUPS, "moe.shared_ffn_hidden_size": shared_width(2048)},
    aliases={"n_routed_experts": "num_local_experts"},
    defaults={
        **DEFAULTS,
        **_SIZES,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
    },
    options={
        # Repositories of these models contain code of the models, which transformers has too.
        **{key: allowed for key, allowed in {**OPTIONS, **NO_BIAS}.items() if key != "auto_map"},
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    has_mtp_layers=True,
    mtp=NEXT_LAYER,
)

LATENT = (
    _DEEPSEEK,
    replace(_DEEPSEEK, model_type="kimi_k2"),  # transformers has no such type; its files name the class of DeepSeek
    Family(
        model_type="glm4_moe_lite",
        class_name="Glm4MoeLiteForCausalLM",
        rules=_DEEPSEEK.rules,
        implied=_IMPLIED,
        keys={**_KEYS, **{key: name for key, name in ROUTER_KEYS.items() if key != "moe.dense_layers"}},
        computed={
            "num_query_groups": _GROUPS,
            "moe.shared_ffn_hidden_size": shared_width(1536),
            "moe.dense_layers": DENSE_FIRST,
        },
        aliases={"n_routed_experts": "num_local_experts"},
        defaults={
            **DEFAULTS,
            **_SIZES,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
        },
        options={**OPTIONS, **NO_BIAS},
        has_mtp_layers=True,
        mtp=NEXT_LAYER,
    ),
)
