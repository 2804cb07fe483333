"""Declares families with multi-head latent attention: DeepSeek-V3, Kimi-K2 to K2.6, Moonlight, GLM-4.7-Flash, and
Mistral Small 4.

    projection of the token   norm             up projection   output of the up projection, for each head
    q_a_proj                  q_a_layernorm    q_b_proj        query: part without and part with rotary positions
    kv_a_proj_with_mqa        kv_a_layernorm   kv_b_proj       part of the key without rotary positions; value

kv_a_proj_with_mqa also computes the part of the key with rotary positions, which all heads share.  Without q_lora_rank,
q_proj replaces q_a_proj and q_b_proj.  routed.py has the rules of routers and experts with sigmoid scores.  Mistral
Small 4 has softmax scores, and its files store the experts of a layer as stacked tensors.
"""

from dataclasses import replace

from sft.hf.families.routed import ROUTER_KEYS, SIGMOID, dense_layers, layer_rules, routed, shared_width
from sft.hf.families.rules import (
    DEFAULTS,
    KEYS,
    NEXT_LAYER,
    NO_BIAS,
    OPTIONS,
    mlp,
    outer,
    shared_expert,
    stacked_experts,
)
from sft.hf.family import Family, Rule
from sft.hf.model_keys import Computed
from sft.hf.tensor_view import LAYER, View

_OURS = "decoder.layers.self_attention"
_LATENT = "latent_attention"
_NAMES = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LATENT_KEYS = {
    **{key: name for key, name in KEYS.items() if key not in ("head_dim", "num_query_groups")},
    **{f"{_LATENT}.{name}": name for name in _NAMES},
    "rope.interleaved": "rope_interleave",
}


_SOFTMAX = {"qkv_bias": False, "qk_norm": False, "head_dim": None, f"{_LATENT}.norm_epsilon": 1e-6}
LATENT_IMPLIED = {**SIGMOID, **_SOFTMAX}


def latent_attention(model: str = "model", block: str = "self_attn", output: str = "o_proj") -> tuple[Rule, ...]:
    """The rules of latent attention.

    block: name of the attention module in its layer; output: name of the output projection in it
    """
    layer = f"{model}.layers.{LAYER}"

    def rule(ours: str, name: str, shape: str, needs: str = "") -> Rule:
        view = View(f"{layer}.{block}.{name}.weight", shape)
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
        rule("linear_gate_proj.weight", "g_proj", "a h", "head_gate"),
        rule("linear_proj.weight", output, "h O"),
    )


def mistral4_rules(model: str = "model", head: str = "lm_head.weight") -> tuple[Rule, ...]:
    experts = (*stacked_experts(model), *shared_expert("shared_experts", None, model))
    return (
        *outer(model, head),
        *latent_attention(model),
        *layer_rules("dense", *mlp(model)),
        *layer_rules("experts", *experts),
    )


def _layers(model: str = "model", head: str = "lm_head.weight") -> tuple[Rule, ...]:
    return (*outer(model, head), *latent_attention(model), *routed(model))


# num_key_value_heads has no effect: kv_b_proj has keys and values for every head.
LATENT_GROUPS = Computed("num_attention_heads", lambda content: content.get("num_attention_heads"))
_SIZES = {"qk_rope_head_dim": 64, "kv_lora_rank": 512, "rope_interleave": True, "norm_topk_prob": True}

_DEEPSEEK = Family(
    model_type="deepseek_v3",  # Moonlight also has this model_type
    class_name="DeepseekV3ForCausalLM",
    rules=_layers(),
    implied=LATENT_IMPLIED,
    keys={**LATENT_KEYS, **ROUTER_KEYS},
    computed={"num_query_groups": LATENT_GROUPS, "moe.shared_ffn_hidden_size": shared_width(2048)},
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
        # auto_map is accepted: the repositories contain code for the models, but transformers has its own.
        **{key: allowed for key, allowed in {**OPTIONS, **NO_BIAS}.items() if key != "auto_map"},
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    has_mtp_layers=True,
    mtp=NEXT_LAYER,
)

MISTRAL4 = Family(
    model_type="mistral4",
    class_name="Mistral4ForCausalLM",
    rules=mistral4_rules(),
    implied=_SOFTMAX,
    keys={**LATENT_KEYS, **{key: name for key, name in ROUTER_KEYS.items() if not key.endswith("_groups")}},
    computed={"num_query_groups": LATENT_GROUPS, "moe.shared_ffn_hidden_size": shared_width(2048)},
    rope_keys={"llama_4_scaling_beta": "query_scale_beta"},
    aliases={"n_routed_experts": "num_local_experts"},
    defaults={
        **DEFAULTS,
        **_SIZES,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    options={**OPTIONS, **NO_BIAS, "n_group": (1,), "topk_group": (1,)},
    scalings=("yarn",),
)

LATENT = (
    _DEEPSEEK,
    replace(_DEEPSEEK, model_type="kimi_k2"),  # transformers has no such type; its files name the class of DeepSeek
    # Kimi-K2.5, 2.6 and later: Kimi-K2 beside a vision tower.
    replace(
        _DEEPSEEK,
        model_type="kimi_k25",
        class_name="Kimi_K25ForConditionalGeneration",
        rules=_layers("language_model.model", "language_model.lm_head.weight"),
        defaults={**_DEEPSEEK.defaults, "tie_word_embeddings": True},
        text_config="required",
        passed_through=("vision_tower.*", "mm_projector.*"),
        has_mtp_layers=False,
        mtp=None,
    ),
    Family(
        model_type="glm4_moe_lite",
        class_name="Glm4MoeLiteForCausalLM",
        rules=_DEEPSEEK.rules,
        implied=LATENT_IMPLIED,
        keys={**LATENT_KEYS, **{key: name for key, name in ROUTER_KEYS.items() if key != "moe.dense_layers"}},
        computed={
            "num_query_groups": LATENT_GROUPS,
            "moe.shared_ffn_hidden_size": shared_width(1536),
            "moe.dense_layers": dense_layers(),
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
    MISTRAL4,
)
