"""Rules for tensors, keys of config.json, defaults and options that families share.

The argument `model` is the first part of Hugging Face names.  `sft/layers/weights.py` explains the letters of a shape,
and `sft/hf/tensor_view.py` the notation of shapes with + and blocks.
"""

from dataclasses import replace
from typing import Any

from sft.config.mixer_section import LayerKind
from sft.hf.family import MtpBlock, Rule
from sft.hf.tensor_view import EXPERT, LAYER, View

_OURS, _MTP = "decoder.layers", "mtp.layers.0"


def outer(model: str = "model", head: str = "lm_head.weight") -> tuple[Rule, ...]:
    """The rules of embedding, final norm and output weight."""
    return (
        Rule("embedding.word_embeddings.weight", (View(f"{model}.embed_tokens.weight", "v h"),), "vocabulary"),
        Rule("decoder.final_layernorm.weight", (View(f"{model}.norm.weight", "h"),)),
        Rule("output_layer.weight", (View(head, "v h"),), "vocabulary", is_head=True),
    )


def attention(model: str = "model", norm: str | None = "input_layernorm") -> tuple[Rule, ...]:
    """The rules of attention, without biases.  norm: name of the norm before attention; None: there is none"""
    layer = f"{model}.layers.{LAYER}"
    return (
        *_norm(f"{_OURS}.self_attention.linear_qkv.layer_norm_weight", layer, norm),
        Rule(
            f"{_OURS}.self_attention.linear_qkv.weight",
            (
                View(f"{layer}.self_attn.q_proj.weight", "q h"),
                View(f"{layer}.self_attn.k_proj.weight", "k h"),
                View(f"{layer}.self_attn.v_proj.weight", "o h"),
            ),
            "groups",
        ),
        Rule(f"{_OURS}.self_attention.linear_proj.weight", (View(f"{layer}.self_attn.o_proj.weight", "h O"),)),
    )


def shared_projection(model: str = "model") -> Rule:
    """The rule of linear_qkv in layers that have no v_proj, because keys are also values."""
    layer = f"{model}.layers.{LAYER}.self_attn"
    views = (View(f"{layer}.q_proj.weight", "q h"), View(f"{layer}.k_proj.weight", "k h"))
    return Rule(f"{_OURS}.self_attention.linear_qkv.weight", views, "groups")


def layer_scalar(model: str = "model") -> tuple[Rule, ...]:
    """The rule of the scalar by which the output of a layer is multiplied."""
    return (Rule(f"{_OURS}.layer_scalar", (View(f"{model}.layers.{LAYER}.layer_scalar", "1"),), is_buffer=True),)


def gated_attention(model: str = "model") -> tuple[Rule, ...]:
    """The rules of full attention whose q_proj has, for each head, the rows of the query and then of its gate."""
    norm, qkv, output = attention(model)
    (_, key, value), name = qkv.views, qkv.views[0].name
    queries, gates = (View(name, "q+q h", part, blocks="a") for part in range(2))
    rules = (norm, replace(qkv, views=(queries, gates, key, value)), output)
    return tuple(replace(rule, kind="full attention") for rule in rules)


def head_gated_attention(model: str = "model") -> tuple[Rule, ...]:
    """The rules of attention whose g_proj has one row for the gate of each head."""
    norm, qkv, output = attention(model)
    queries, *others = qkv.views
    gates = View(queries.name.replace("q_proj", "g_proj"), "a h")
    return norm, replace(qkv, views=(queries, gates, *others)), output


def joint_attention() -> tuple[Rule, ...]:
    """The rules of `attention`, for files that store queries, keys and values as one tensor."""
    qkv = tuple(View(f"model.layers.{LAYER}.self_attn.qkv_proj.weight", "q+k+o h", part) for part in range(3))
    norm, _, output = attention()
    return (norm, Rule(f"{_OURS}.self_attention.linear_qkv.weight", qkv, "groups"), output)


def qkv_bias(model: str = "model", *, needs: str = "") -> tuple[Rule, ...]:
    """The rule of the biases of queries, keys and values.  needs: see `Rule`"""
    layer = f"{model}.layers.{LAYER}.self_attn"
    return (
        Rule(
            f"{_OURS}.self_attention.linear_qkv.bias",
            (
                View(f"{layer}.q_proj.bias", "q"),
                View(f"{layer}.k_proj.bias", "k"),
                View(f"{layer}.v_proj.bias", "o"),
            ),
            "groups",
            needs=needs,
        ),
    )


def attention_output_bias(*, needs: str = "") -> tuple[Rule, ...]:
    """The rule of the bias of the output projection of attention.  needs: see `Rule`"""
    bias = View(f"model.layers.{LAYER}.self_attn.o_proj.bias", "h")
    return (Rule(f"{_OURS}.self_attention.linear_proj.bias", (bias,), needs=needs),)


def sinks(name: str = "sinks", kind: LayerKind | None = None) -> tuple[Rule, ...]:
    """The rule of attention sinks.  name: name of the tensor in files; kind: kind of layers with sinks; None: all"""
    view = View(f"model.layers.{LAYER}.self_attn.{name}", "a")
    return (Rule(f"{_OURS}.self_attention.core_attention.softmax_offset", (view,), kind=kind),)


def optional_biases() -> tuple[Rule, ...]:
    """The rules of biases that a model has only if attention_bias or mlp_bias is true in its config.json."""
    layer = f"model.layers.{LAYER}.mlp"
    gate_up = tuple(View(f"{layer}.{name}_proj.bias", "f") for name in ("gate", "up"))
    return (
        *qkv_bias(needs="qkv_bias"),
        *attention_output_bias(needs="attention_output_bias"),
        Rule(f"{_OURS}.mlp.linear_fc1.bias", gate_up, needs="mlp_bias"),
        Rule(f"{_OURS}.mlp.linear_fc2.bias", (View(f"{layer}.down_proj.bias", "h"),), needs="mlp_bias"),
    )


def qk_norm(
    model: str = "model",
    *,
    names: tuple[str, str] = ("q_norm", "k_norm"),
    across_heads: bool = False,
    kind: LayerKind | None = None,
) -> tuple[Rule, ...]:
    """The rules of norms on queries and keys.

    names: names of the norms in files; across_heads: whether one norm covers all heads together
    kind: kind of the layers with the norms; None: all
    """
    layer = f"{model}.layers.{LAYER}.self_attn"
    queries, keys = ("q", "k") if across_heads else ("d", "d")
    return (
        Rule(f"{_OURS}.self_attention.q_layernorm.weight", (View(f"{layer}.{names[0]}.weight", queries),), kind=kind),
        Rule(f"{_OURS}.self_attention.k_layernorm.weight", (View(f"{layer}.{names[1]}.weight", keys),), kind=kind),
    )


def output_norms(model: str = "model") -> tuple[Rule, ...]:
    """The rules of norms on the outputs of attention and MLP."""
    layer = f"{model}.layers.{LAYER}"
    return (
        *_norm(f"{_OURS}.post_self_attn_layernorm.weight", layer, "post_attention_layernorm"),
        *_norm(f"{_OURS}.post_mlp_layernorm.weight", layer, "post_feedforward_layernorm"),
    )


def _norm(ours: str, layer: str, name: str | None) -> tuple[Rule, ...]:
    return () if name is None else (Rule(ours, (View(f"{layer}.{name}.weight", "h"),)),)


def mlp(model: str = "model", norm: str | None = "post_attention_layernorm") -> tuple[Rule, ...]:
    """The rules of a dense MLP.  norm: name of the norm before the MLP; None: there is none"""
    layer = f"{model}.layers.{LAYER}"
    return (
        *_norm(f"{_OURS}.mlp.linear_fc1.layer_norm_weight", layer, norm),
        Rule(
            f"{_OURS}.mlp.linear_fc1.weight",
            (View(f"{layer}.mlp.gate_proj.weight", "f h"), View(f"{layer}.mlp.up_proj.weight", "f h")),
        ),
        Rule(f"{_OURS}.mlp.linear_fc2.weight", (View(f"{layer}.mlp.down_proj.weight", "h f"),)),
    )


def joint_mlp() -> tuple[Rule, ...]:
    """The rules of `mlp`, for files that store gate and up as one tensor."""
    gate_up = tuple(View(f"model.layers.{LAYER}.mlp.gate_up_proj.weight", "f+f h", part) for part in range(2))
    norm, _, down = mlp()
    return (norm, Rule(f"{_OURS}.mlp.linear_fc1.weight", gate_up), down)


def experts(block: str, gate: str, up: str, down: str, model: str = "model", router: str = "gate") -> tuple[Rule, ...]:
    """The rules of a mixture of experts, which replace `mlp`.

    block: name of the module that contains router and experts; gate, up, down: names of an expert's matrices
    router: name of the router in the module
    """
    layer = f"{model}.layers.{LAYER}"
    expert = f"{layer}.{block}.experts.{EXPERT}"
    return (
        Rule(f"{_OURS}.pre_mlp_layernorm.weight", (View(f"{layer}.post_attention_layernorm.weight", "h"),)),
        Rule(f"{_OURS}.mlp.router.weight", (View(f"{layer}.{block}.{router}.weight", "x h"),)),
        Rule(
            f"{_OURS}.mlp.experts.experts.linear_fc1.weight",
            (View(f"{expert}.{gate}.weight", "e W"), View(f"{expert}.{up}.weight", "e W")),
        ),
        Rule(f"{_OURS}.mlp.experts.experts.linear_fc2.weight", (View(f"{expert}.{down}.weight", "W e"),)),
    )


def correction_bias(block: str, model: str = "model") -> tuple[Rule, ...]:
    """The rule of the correction bias of a router.  block: name of the module that contains the bias"""
    name = f"{model}.layers.{LAYER}.{block}.e_score_correction_bias"
    return (Rule(f"{_OURS}.mlp.router.expert_bias", (View(name, "x"),), is_buffer=True),)


def stacked_experts(
    model: str = "model",
    block: str = "mlp",
    router: str = "gate.weight",
    gate_up: str = "experts.gate_up_proj",
    down: str = "experts.down_proj",
    *,
    transposed: bool = False,
    interleaved: bool = False,
) -> tuple[Rule, ...]:
    """The rules of `experts`, for files that store the experts of a layer as two tensors.

    block: name of the module that contains router and experts; router, gate_up, down: names of tensors in it
    transposed: the tensors are [experts, h, gate and up] and [experts, e, h]; else [experts, gate and up, h] and
        [experts, h, e]
    interleaved: rows of gate and up alternate
    """
    layer = f"{model}.layers.{LAYER}"
    first, second = ("X h e+e", "X e h") if transposed else ("X e+e h", "X h e")
    return (
        Rule(f"{_OURS}.pre_mlp_layernorm.weight", (View(f"{layer}.post_attention_layernorm.weight", "h"),)),
        Rule(f"{_OURS}.mlp.router.weight", (View(f"{layer}.{block}.{router}", "x h"),)),
        Rule(
            f"{_OURS}.mlp.experts.experts.linear_fc1.weight",
            tuple(
                View(f"{layer}.{block}.{gate_up}", first, part, transposed, blocks="e" * interleaved)
                for part in range(2)
            ),
        ),
        Rule(
            f"{_OURS}.mlp.experts.experts.linear_fc2.weight",
            (View(f"{layer}.{block}.{down}", second, transposed=transposed),),
        ),
    )


def interleaved_expert_biases() -> tuple[Rule, ...]:
    """The rules of the biases of router and stacked experts.  Elements of gate and up alternate."""
    layer, ours = f"model.layers.{LAYER}.mlp", f"{_OURS}.mlp"
    gate_up = tuple(View(f"{layer}.experts.gate_up_proj_bias", "X e+e", part, blocks="e") for part in range(2))
    return (
        Rule(f"{ours}.router.bias", (View(f"{layer}.router.bias", "x"),)),
        Rule(f"{ours}.experts.experts.linear_fc1.bias", gate_up),
        Rule(f"{ours}.experts.experts.linear_fc2.bias", (View(f"{layer}.experts.down_proj_bias", "X h"),)),
    )


def shared_expert(
    name: str = "shared_expert", gate: str | None = "shared_expert_gate", model: str = "model", needs: str = ""
) -> tuple[Rule, ...]:
    """The rules of a shared expert.  name, gate: names of its module and its gate, None: no gate; needs: see `Rule`"""
    module, ours = f"{model}.layers.{LAYER}.mlp", f"{_OURS}.mlp.shared_experts"
    projections = [View(f"{module}.{name}.{part}_proj.weight", "s h") for part in ("gate", "up")]
    rules = (
        Rule(f"{ours}.linear_fc1.weight", tuple(projections), needs=needs),
        Rule(f"{ours}.linear_fc2.weight", (View(f"{module}.{name}.down_proj.weight", "h s"),), needs=needs),
    )
    return rules if gate is None else (*rules, Rule(f"{ours}.gate_weight", (View(f"{module}.{gate}.weight", "1 h"),)))


def _around_mtp(embedding_norm: str, hidden_norm: str, projection: str, norm: str) -> tuple[Rule, ...]:
    """The rules of the tensors around the layer of the block for multi-token prediction.

    The arguments are names in files.  Source of the names: vLLM (deepseek_mtp.py, glm4_moe_mtp.py, qwen3_next_mtp.py).
    As in vLLM, hidden states enter the block after the model's final norm.
    """
    return (
        Rule(f"{_MTP}.enorm.weight", (View(f"{embedding_norm}.weight", "h"),)),
        Rule(f"{_MTP}.hnorm.weight", (View(f"{hidden_norm}.weight", "h"),)),
        Rule(f"{_MTP}.eh_proj.weight", (View(f"{projection}.weight", "h h+h"),)),
        Rule(f"{_MTP}.final_layernorm.weight", (View(f"{norm}.weight", "h"),)),
    )


_NEXT = f"model.layers.{LAYER}"
# DeepSeek-V3, GLM-4.5 and later: the block is the layer after the model's last one.  Files may store embedding and
# output weight again in it (`Family.copies`).
NEXT_LAYER = MtpBlock(
    layer=_NEXT,
    own=_around_mtp(f"{_NEXT}.enorm", f"{_NEXT}.hnorm", f"{_NEXT}.eh_proj", f"{_NEXT}.shared_head.norm"),
)
# Qwen3-Next, Qwen3.5 and later: the block has names of its own.
APART = MtpBlock(
    layer="mtp.layers.0",
    own=_around_mtp("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
)

LLAMA_DENSE: dict[str, Any] = {"qkv_bias": False, "qk_norm": False, "moe.num_experts": None}
KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "norm_epsilon": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
EXPERT_KEYS = {  # used by Qwen and by families with the same keys
    "moe.num_experts": "num_experts",
    "moe.top_k": "num_experts_per_tok",
    "moe.ffn_hidden_size": "moe_intermediate_size",
    "moe.normalize_top_k": "norm_topk_prob",
}
# Keys of config.json that most families have -> values that our model supports, first the default of transformers.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0.0, None),
    "partial_rotary_factor": (None, 1.0),
    "auto_map": (None,),  # the repository contains its own model code
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
}
BIAS_KEYS = {"qkv_bias": "attention_bias", "attention_output_bias": "attention_bias", "mlp_bias": "mlp_bias"}
# For families in which attention_bias adds biases to q_proj, k_proj, v_proj and o_proj, which their rules lack.
NO_BIAS: dict[str, tuple[Any, ...]] = {"attention_bias": (False,)}
QWEN_OPTIONS: dict[str, tuple[Any, ...]] = {**OPTIONS, "use_sliding_window": (False,)}
DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
NO_BIAS_DEFAULTS: dict[str, Any] = {"attention_bias": False, "mlp_bias": False}
