"""The weights of a layer: the one table of their names, sizes and roles.

From it follow parameters, FLOPs, the products of an estimate, what tensor and expert parallelism split, initial values,
the Linears that LoRA adapts, and the order in which backward reaches weights.  The rules of Hugging Face
(`sft/hf/families`) have other names and views of the same rows, and a test compares their shapes with this table.

Letters stand for the sizes in a shape:

    v vocabulary    h hidden size    f MLP width    x experts    e width of an expert's MLP
    q query heads * head width    k key heads * head width    d head width    s width of the shared expert    1 one
    P rows of the projection to queries, their gates, keys and values
    a query heads    g key heads    X experts, as the axis of a tensor that has a matrix or a vector for each expert

    of layers with linear attention:
    K key heads * key width    V value heads * value width    n key heads    m value heads    u value width
    c kernel of the convolution

    of latent attention:
    Q width of the latent of queries    L width of the latent of keys and values    C that and the rotary key
    B heads * (part of a key that is not rotated, value)    O heads * value width
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from operator import attrgetter
from typing import Literal, NamedTuple

from sft.config import ModelConfig
from sft.config.model import LayerKind

# Parts of latent attention: products that every rank of tp computes, and the one that makes keys of latents.
DUPLICATED, EXPANDED = "latent attention, duplicated", "latent attention, keys and values"

# matrix    multiplies tokens, and is drawn
# kernel    is drawn, too, and multiplies no tokens
# norm      begins at 1, or at 0 if it is an offset from 1
# bias      begins at 0
# ones      begins at 1
# decay     the logarithm of a rate of decay
Role = Literal["matrix", "kernel", "norm", "bias", "ones", "decay"]
Split = Literal["rows", "columns", ""]  # what each rank of tp has, of experts each rank of etp; "": all of the weight
Condition = Callable[[ModelConfig], object]


class LayerWeight(NamedTuple):
    """A weight of a layer.

    key    its name within a layer; a checkpoint may store its rows in parts, `in_proj.weight.query`
    shape  in letters, of one expert
    part   what a product with it belongs to: "attention", "mlp", "experts", ...; "" if there is no product
    step   when a layer uses it: 0 is the norm before attention, 7 the norm after the MLP
    has    key below `model` that is true in models with this weight, or a condition; "": all models have it
    is_buffer  it gets no gradient, and counts as no parameter
    """

    key: str
    shape: str
    role: Role
    split: Split = ""
    part: str = ""
    step: int = 0
    has: str | Condition = ""
    is_buffer: bool = False

    @property
    def is_of_expert(self) -> bool:
        """Whether each expert has one."""
        return self.key.startswith("mlp.experts.")

    @property
    def module(self) -> str:
        """self_attention.linear_qkv.weight -> self_attention.linear_qkv"""
        return self.key.rpartition(".")[0]

    @property
    def is_linear(self) -> bool:
        """Whether it is the weight of a Linear of Hugging Face; routers are none."""
        return self.role == "matrix" and self.part != "router"

    @property
    def writes_residual(self) -> bool:
        """Whether its product is added to the residual stream."""
        return self.role == "matrix" and self.split == "columns"

    def is_in(self, model: ModelConfig) -> bool:
        """Whether a layer of the model has it, if it has the mixer or the MLP that it belongs to."""
        has = attrgetter(self.has) if isinstance(self.has, str) and self.has else self.has
        return bool(has(model)) if callable(has) else True

    def sizes(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """shape "q+k h" with q 4, k 2, h 8 -> (6, 8)"""
        return tuple(sum(sizes[letter] for letter in axis.split("+")) for axis in self.shape.split())

    def size(self, sizes: Mapping[str, int]) -> int:
        """The number of its numbers."""
        return prod(self.sizes(sizes))


def _pre(model: ModelConfig) -> bool:
    return model.norm_placement != "post"


def _post(model: ModelConfig) -> bool:
    return model.norm_placement != "pre"


def _norms_heads(model: ModelConfig) -> bool:
    return model.qk_norm and not model.qk_norm_across_heads


_QUERY_LATENT, _SHARED = "latent_attention.q_lora_rank", "moe.shared_ffn_hidden_size"
_A, _M, _X = "self_attention", "mlp", "mlp.experts.experts"
_SOFTMAX: tuple[LayerWeight, ...] = (
    LayerWeight(f"{_A}.linear_qkv.layer_norm_weight", "h", "norm", step=0, has=_pre),
    LayerWeight(f"{_A}.linear_qkv.weight", "P h", "matrix", "rows", "attention", 1),
    LayerWeight(f"{_A}.linear_qkv.bias", "P", "bias", "rows", step=1, has="qkv_bias"),
    LayerWeight(f"{_A}.q_layernorm.weight", "d", "norm", step=2, has=_norms_heads),
    LayerWeight(f"{_A}.k_layernorm.weight", "d", "norm", step=2, has=_norms_heads),
    LayerWeight(f"{_A}.q_layernorm.weight", "q", "norm", step=2, has="qk_norm_across_heads"),
    LayerWeight(f"{_A}.k_layernorm.weight", "k", "norm", step=2, has="qk_norm_across_heads"),
    LayerWeight(f"{_A}.core_attention.softmax_offset", "a", "kernel", "rows", step=2, has="attention_sinks"),
    LayerWeight(f"{_A}.linear_proj.weight", "h q", "matrix", "columns", "attention", 3),
    LayerWeight(f"{_A}.linear_proj.bias", "h", "bias", step=3, has="attention_output_bias"),
)
_LATENT: tuple[LayerWeight, ...] = (
    LayerWeight("input_layernorm.weight", "h", "norm", step=0, has=_pre),
    LayerWeight(
        f"{_A}.linear_q_proj.weight", "q h", "matrix", "rows", "attention", 1, "latent_attention.projects_queries"
    ),
    LayerWeight(f"{_A}.linear_q_down_proj.weight", "Q h", "matrix", "", DUPLICATED, 1, _QUERY_LATENT),
    LayerWeight(f"{_A}.linear_q_up_proj.layer_norm_weight", "Q", "norm", step=2, has=_QUERY_LATENT),
    LayerWeight(f"{_A}.linear_q_up_proj.weight", "q Q", "matrix", "rows", "attention", 2, _QUERY_LATENT),
    LayerWeight(f"{_A}.linear_kv_down_proj.weight", "C h", "matrix", "", DUPLICATED, 1),
    LayerWeight(f"{_A}.linear_kv_up_proj.layer_norm_weight", "L", "norm", step=2),
    LayerWeight(f"{_A}.linear_kv_up_proj.weight", "B L", "matrix", "rows", EXPANDED, 2),
    LayerWeight(f"{_A}.linear_proj.weight", "h O", "matrix", "columns", "attention", 3),
)
_LINEAR: tuple[LayerWeight, ...] = (
    LayerWeight(f"{_A}.in_proj.layer_norm_weight", "h", "norm", step=0, has=_pre),
    LayerWeight(f"{_A}.in_proj.weight", "K+K+V+V+m+m h", "matrix", "rows", "linear attention", 1),
    LayerWeight(f"{_A}.conv1d.weight", "K+K+V 1 c", "kernel", "rows", step=2),
    LayerWeight(f"{_A}.A_log", "m", "decay", "rows", step=2),
    LayerWeight(f"{_A}.dt_bias", "m", "ones", "rows", step=2),
    LayerWeight(f"{_A}.out_norm.weight", "u", "ones", step=2),
    LayerWeight(f"{_A}.out_proj.weight", "h V", "matrix", "columns", "linear attention", 3),
)
_AFTER_ATTENTION = (LayerWeight("post_self_attn_layernorm.weight", "h", "norm", step=4, has=_post),)
_DENSE: tuple[LayerWeight, ...] = (
    LayerWeight(f"{_M}.linear_fc1.layer_norm_weight", "h", "norm", step=4, has=_pre),
    LayerWeight(f"{_M}.linear_fc1.weight", "f+f h", "matrix", "rows", "mlp", 5),
    LayerWeight(f"{_M}.linear_fc1.bias", "f+f", "bias", "rows", step=5, has="mlp_bias"),
    LayerWeight(f"{_M}.linear_fc2.weight", "h f", "matrix", "columns", "mlp", 6),
    LayerWeight(f"{_M}.linear_fc2.bias", "h", "bias", step=6, has="mlp_bias"),
)
_EXPERTS: tuple[LayerWeight, ...] = (
    LayerWeight(
        "pre_mlp_layernorm.weight", "h", "norm", step=4, has=lambda model: _pre(model) and not model.moe.own_norms
    ),
    LayerWeight(f"{_M}.router.weight", "x h", "matrix", "", "router", 5),
    LayerWeight(f"{_M}.router.bias", "x", "kernel", step=5, has="moe.router_bias"),
    LayerWeight(f"{_M}.router.expert_bias", "x", "bias", step=5, has="moe.correction_bias", is_buffer=True),
    LayerWeight(f"{_M}.router.input_scale", "h", "ones", step=5, has="moe.own_norms"),
    LayerWeight(f"{_M}.router.expert_scale", "x", "ones", step=5, has="moe.own_norms"),
    LayerWeight(f"{_M}.expert_norm.weight", "h", "norm", step=5, has="moe.own_norms"),
    LayerWeight(f"{_X}.linear_fc1.weight", "e+e h", "matrix", "rows", "experts", 5),
    LayerWeight(f"{_X}.linear_fc1.bias", "e+e", "bias", "rows", step=5, has="mlp_bias"),
    LayerWeight(f"{_X}.linear_fc2.weight", "h e", "matrix", "columns", "experts", 6),
    LayerWeight(f"{_X}.linear_fc2.bias", "h", "bias", step=6, has="mlp_bias"),
    LayerWeight(f"{_M}.expert_output_norm.weight", "h", "norm", step=5, has="moe.own_norms"),
    LayerWeight(f"{_M}.shared_norm.weight", "h", "norm", step=5, has="moe.own_norms"),
    LayerWeight(f"{_M}.shared_experts.linear_fc1.weight", "s+s h", "matrix", "rows", "shared", 5, _SHARED),
    LayerWeight(f"{_M}.shared_experts.linear_fc2.weight", "h s", "matrix", "columns", "shared", 6, _SHARED),
    LayerWeight(f"{_M}.shared_experts.gate_weight", "1 h", "matrix", "", "shared gate", 5, "moe.shared_gate"),
    LayerWeight(f"{_M}.shared_output_norm.weight", "h", "norm", step=5, has="moe.own_norms"),
)
_AFTER_MLP = (
    LayerWeight("post_mlp_layernorm.weight", "h", "norm", step=7, has=_post),
    LayerWeight("layer_scalar", "1", "ones", step=7, has="layer_scalar", is_buffer=True),
)
TABLE = (*_SOFTMAX, *_LATENT, *_LINEAR, *_AFTER_ATTENTION, *_DENSE, *_EXPERTS, *_AFTER_MLP)
_BY_KEY = {weight.key: weight for weight in TABLE}
_IN_LAYER = re.compile(r"^(decoder\.layers|mtp\.layers\.0\.transformer_layer)\.(\d+\.)?")


def weights_of(model: ModelConfig, kind: LayerKind) -> list[LayerWeight]:
    """The weights of a layer of this kind, in the order in which a layer uses its parts; those of experts once.

    model: whose layers all have experts, or none
    """
    mixer = _LATENT if model.latent_attention.is_used else _SOFTMAX
    mixer = _LINEAR if kind == "linear attention" else mixer
    mlp = _DENSE if model.moe.num_experts is None else _EXPERTS
    return [weight for weight in (*mixer, *_AFTER_ATTENTION, *mlp, *_AFTER_MLP) if weight.is_in(model)]


def is_of_layer(key: str) -> bool:
    """Whether a key of a checkpoint means a weight of a layer; False: of the embedding, the head, a last norm."""
    return _find(key) is not None


def weight_of(key: str) -> LayerWeight:
    """The weight that a key of a checkpoint means, or its name within a layer.

    decoder.layers.3.self_attention.in_proj.weight.query -> self_attention.in_proj.weight
    """
    weight = _find(key)
    assert weight is not None, f"{key} is no weight of a layer"
    return weight


@lru_cache(maxsize=100_000)
def _find(key: str) -> LayerWeight | None:
    key = _IN_LAYER.sub("", key)
    return _BY_KEY.get(key) or _BY_KEY.get(key.rpartition(".")[0])


def sizes_of(model: ModelConfig, vocab_size: int = 0) -> dict[str, int]:
    """The sizes of a model, by letter."""
    linear, latent = model.linear_attention, model.latent_attention
    queries = model.num_attention_heads * model.resolved_head_dim
    keys = model.resolved_query_groups * model.resolved_head_dim
    return {
        "v": vocab_size,
        "h": model.hidden_size,
        "f": model.ffn_hidden_size,
        "x": model.moe.num_experts or 0,
        "X": model.moe.num_experts or 0,
        "e": model.resolved_expert_ffn,
        "q": queries,
        "k": keys,
        "P": queries * (1 + model.attention_output_gate) + keys * model.full_attention.num_kv_projections,
        "d": model.resolved_head_dim,
        "a": model.num_attention_heads,
        "g": model.resolved_query_groups,
        "s": model.moe.shared_ffn_hidden_size or 0,
        "K": linear.key_width,
        "V": linear.value_width,
        "n": linear.num_key_heads or 0,
        "m": linear.num_value_heads or 0,
        "u": linear.value_head_dim,
        "c": linear.conv_kernel,
        "Q": latent.q_lora_rank or 0,
        "L": latent.kv_lora_rank or 0,
        "C": latent.compressed_width,
        "B": model.num_attention_heads * (latent.qk_nope_head_dim + latent.v_head_dim),
        "O": model.num_attention_heads * model.value_head_dim,
        "1": 1,
    }
