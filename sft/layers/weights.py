"""The weights of a layer: the one table of their names, sizes and roles.

Its rows are in the files of `mixers/` and `mlps/`.  The table determines parameters, FLOPs, the matrix products of an
estimate, the weights that tensor and expert parallelism split, initial values, the Linears that LoRA adapts, and the
order in which backward reaches weights.  The rules in `sft/hf/families` translate these weights to the names and shapes
of Hugging Face.  A test compares the shapes of these rules with this table.

Letters stand for the sizes in a shape.  The file of a mixer explains the letters that only its layers use:

    v vocabulary    h hidden size    f MLP width    x experts    e width of an expert's MLP
    q query heads * head width    k key heads * head width    d head width    s width of the shared expert    1 one
    F rows of an MLP's first projection: f, with a gate 2 f; E and R: those of an expert and of the shared expert
    W width of the tokens that experts read
    P rows of the projection to queries, their gates, keys and values
    0 one, as an axis of which a view takes the only element
    o key heads * width of a value    O query heads * width of a value
    a query heads    g key heads    X experts, as the axis of a tensor that has a matrix or a vector for each expert
"""

import re
from functools import lru_cache

from sft.config import ModelConfig
from sft.layers.mixers import MIXERS
from sft.layers.mixers.softmax import qkv_rows
from sft.layers.mlps import MLPS
from sft.layers.weight import LayerWeight, expert_width, has_gate, has_output_norms

AFTER_MIXER = (LayerWeight("post_self_attn_layernorm.weight", "h", "norm", step=4, has=has_output_norms),)
AFTER_MLP = (
    LayerWeight("post_mlp_layernorm.weight", "h", "norm", step=7, has=has_output_norms),
    LayerWeight("layer_scalar", "1", "ones", step=7, has="layer_scalar", is_buffer=True),
)
_OF_MIXERS = dict.fromkeys(weight for mixer in MIXERS.values() for weight in mixer.weights)  # mixers may share weights
TABLE = (*_OF_MIXERS, *AFTER_MIXER, *(weight for mlp in MLPS.values() for weight in mlp.weights), *AFTER_MLP)
_BY_KEY = {weight.key: weight for weight in TABLE}
_IN_LAYER = re.compile(r"^(decoder\.layers|mtp\.layers\.0\.transformer_layer)\.(\d+\.)?")


def is_of_layer(key: str) -> bool:
    """Whether a checkpoint's key names a weight of a layer; False for the embedding, the head and the final norm."""
    return _find(key) is not None


def weight_of(key: str) -> LayerWeight:
    """The row of the table for a checkpoint's key, or for a name within a layer.

    decoder.layers.3.self_attention.in_proj.weight.query -> self_attention.in_proj.weight
    """
    weight = _find(key)
    assert weight is not None, f"{key} is no weight of a layer"
    return weight


def name_in_layer(key: str) -> str:
    """A checkpoint's key without its layer: decoder.layers.3.mlp.linear_fc1.weight -> mlp.linear_fc1.weight"""
    return _IN_LAYER.sub("", key)


@lru_cache(maxsize=100_000)
def _find(key: str) -> LayerWeight | None:
    key = name_in_layer(key)
    return _BY_KEY.get(key) or _BY_KEY.get(key.rpartition(".")[0])


def sizes_of(model: ModelConfig, vocab_size: int = 0) -> dict[str, int]:
    """The sizes of a model by letter: {"h": 4096, ...}."""
    queries = model.num_attention_heads * model.resolved_head_dim
    keys = model.resolved_query_groups * model.resolved_head_dim
    projections = 1 + has_gate(model)
    sizes = {
        "v": vocab_size,
        "h": model.hidden_size,
        "f": model.ffn_hidden_size,
        "x": model.moe.num_experts or 0,
        "X": model.moe.num_experts or 0,
        "e": model.resolved_expert_ffn,
        "F": projections * model.ffn_hidden_size,
        "E": projections * model.resolved_expert_ffn,
        "W": expert_width(model),
        "R": projections * (model.moe.shared_ffn_hidden_size or 0),
        "q": queries,
        "k": keys,
        "o": model.resolved_query_groups * model.resolved_value_head_dim,
        "O": model.num_attention_heads * model.resolved_value_head_dim,
        "P": qkv_rows(model),
        "d": model.resolved_head_dim,
        "a": model.num_attention_heads,
        "g": model.resolved_query_groups,
        "s": model.moe.shared_ffn_hidden_size or 0,
        "1": 1,
        "0": 1,
    }
    for mixer in MIXERS.values():
        own = mixer.sizes(model)
        assert not sizes.keys() & own.keys(), f"{mixer.kind} uses letters that stand for other sizes, too"
        sizes |= own
    return sizes
