"""Which tensor of a Hugging Face model is which of Megatron's, one table a family, read in both directions.

A rule names a tensor as our model stores it (under Transformer Engine's names, where a norm belongs to the projection
behind it) and the tensors of theirs that it is made of, with their shapes in letters:

    v vocabulary    h hidden size    f MLP width
    q query heads * head width    k key heads * head width    d head width

`spans` says how their rows lie in ours.  Does not read files; what config.json says is `architecture.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sft.config import ModelConfig

LAYER = "{i}"  # where their names have the number of a layer; ours stack all layers along a first axis
Form = Literal["rows", "groups", "vocabulary"]


@dataclass(frozen=True)
class Rule:
    """form: how theirs become one of ours.

    rows        one below the other (gate and up in linear_fc1)
    groups      queries, keys and values by query group: its query heads, its key, its value, then the next group
    vocabulary  rows of padding below
    """

    ours: str
    theirs: tuple[tuple[str, str], ...]  # name and shape
    form: Form = "rows"
    is_head: bool = False  # stored only where the output is not tied to the embedding


@dataclass(frozen=True)
class Part:
    """One of their tensors."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Span:
    """Rows of one of their tensors and where they lie in ours; part None: rows of zeros."""

    part: int | None
    start: int
    num_rows: int
    at: int


@dataclass(frozen=True)
class Item:
    """One of our tensors, in one layer, and the tensors that it is made of."""

    key: str
    layer: int | None
    parts: tuple[Part, ...]
    form: Form
    num_groups: int

    def spans(self, num_rows: int | None = None) -> list[Span]:
        """In the order of our rows.  num_rows: of ours, with padding.

        groups, 4 query heads and 2 key heads of width 1:
        q0 q1 k0 v0 q2 q3 k1 v1 -> (q, 0, 2, at 0) (k, 0, 1, at 2) (v, 0, 1, at 3) (q, 2, 2, at 4) ...
        """
        found, at = [], 0
        cuts = self.num_groups if self.form == "groups" else 1
        for cut in range(cuts):
            for i, part in enumerate(self.parts):
                rows = part.shape[0] // cuts
                found.append(Span(i, cut * rows, rows, at))
                at += rows
        if num_rows is not None and num_rows > at:
            found.append(Span(None, 0, num_rows - at, at))
        return found

    @property
    def num_rows(self) -> int:
        """Of ours, without padding."""
        return sum(part.shape[0] for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`: its tensors, and what transformers takes for what its config.json does not say.

    options: values of config.json under which the model computes what ours does
    """

    model_type: str
    class_name: str
    rules: tuple[Rule, ...]
    qkv_bias: bool = False
    qk_norm: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()  # tensors that old files have and nobody reads

    def items(self, model: ModelConfig, vocab_size: int) -> Iterator[Item]:
        """Every tensor of the model, outer ones first, then layer by layer."""
        sizes = {
            "v": vocab_size,
            "h": model.hidden_size,
            "f": model.ffn_hidden_size,
            "q": model.num_attention_heads * model.resolved_head_dim,
            "k": model.resolved_query_groups * model.resolved_head_dim,
            "d": model.resolved_head_dim,
        }
        rules = [rule for rule in self.rules if not (rule.is_head and model.tie_embeddings)]
        for layer in (None, *range(model.num_layers)):
            for rule in rules:
                if (LAYER in rule.theirs[0][0]) is (layer is not None):
                    yield Item(
                        key=rule.ours,
                        layer=layer,
                        parts=tuple(_part(name, shape, layer, sizes) for name, shape in rule.theirs),
                        form=rule.form,
                        num_groups=model.resolved_query_groups,
                    )


def _part(name: str, shape: str, layer: int | None, sizes: Mapping[str, int]) -> Part:
    return Part(name.replace(LAYER, str(layer)), tuple(sizes[letter] for letter in shape.split()))


_OURS, _THEIRS = "decoder.layers", f"model.layers.{LAYER}"
_OUTER = (
    Rule("embedding.word_embeddings.weight", (("model.embed_tokens.weight", "v h"),), "vocabulary"),
    Rule("decoder.final_layernorm.weight", (("model.norm.weight", "h"),)),
    Rule("output_layer.weight", (("lm_head.weight", "v h"),), "vocabulary", is_head=True),
)
_LAYER = (
    Rule(f"{_OURS}.self_attention.linear_qkv.layer_norm_weight", ((f"{_THEIRS}.input_layernorm.weight", "h"),)),
    Rule(
        f"{_OURS}.self_attention.linear_qkv.weight",
        (
            (f"{_THEIRS}.self_attn.q_proj.weight", "q h"),
            (f"{_THEIRS}.self_attn.k_proj.weight", "k h"),
            (f"{_THEIRS}.self_attn.v_proj.weight", "k h"),
        ),
        "groups",
    ),
    Rule(f"{_OURS}.self_attention.linear_proj.weight", ((f"{_THEIRS}.self_attn.o_proj.weight", "h q"),)),
    Rule(f"{_OURS}.mlp.linear_fc1.layer_norm_weight", ((f"{_THEIRS}.post_attention_layernorm.weight", "h"),)),
    Rule(
        f"{_OURS}.mlp.linear_fc1.weight",
        ((f"{_THEIRS}.mlp.gate_proj.weight", "f h"), (f"{_THEIRS}.mlp.up_proj.weight", "f h")),
    ),
    Rule(f"{_OURS}.mlp.linear_fc2.weight", ((f"{_THEIRS}.mlp.down_proj.weight", "h f"),)),
)
_QKV_BIAS = Rule(
    f"{_OURS}.self_attention.linear_qkv.bias",
    (
        (f"{_THEIRS}.self_attn.q_proj.bias", "q"),
        (f"{_THEIRS}.self_attn.k_proj.bias", "k"),
        (f"{_THEIRS}.self_attn.v_proj.bias", "k"),
    ),
    "groups",
)
_QK_NORM = (
    Rule(f"{_OURS}.self_attention.q_layernorm.weight", ((f"{_THEIRS}.self_attn.q_norm.weight", "d"),)),
    Rule(f"{_OURS}.self_attention.k_layernorm.weight", ((f"{_THEIRS}.self_attn.k_norm.weight", "d"),)),
)

# Whatever the family.  The first value is what transformers takes where config.json is silent.
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0.0, None),
    "partial_rotary_factor": (None, 1.0),
    "quantization_config": (None,),
    "auto_map": (None,),  # code of its own
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
}
_NO_BIAS: dict[str, tuple[Any, ...]] = {"attention_bias": (False,)}  # it is one on the output projection too
_QWEN: dict[str, tuple[Any, ...]] = {**_OPTIONS, "use_sliding_window": (False,)}
_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}

_ALL = (
    Family(
        model_type="llama",
        class_name="LlamaForCausalLM",
        rules=(*_OUTER, *_LAYER),
        defaults=_DEFAULTS,
        options={**_OPTIONS, **_NO_BIAS, "mlp_bias": (False,)},
        unread=(f"{_THEIRS}.self_attn.rotary_emb.inv_freq",),  # Llama 2
    ),
    Family(
        model_type="mistral",
        class_name="MistralForCausalLM",
        rules=(*_OUTER, *_LAYER),
        defaults={**_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
        options={**_OPTIONS, "sliding_window": (None,)},
    ),
    Family(
        model_type="qwen2",
        class_name="Qwen2ForCausalLM",
        rules=(*_OUTER, *_LAYER, _QKV_BIAS),
        qkv_bias=True,
        defaults={**_DEFAULTS, "num_key_value_heads": 32},
        options=_QWEN,
    ),
    Family(
        model_type="qwen3",
        class_name="Qwen3ForCausalLM",
        rules=(*_OUTER, *_LAYER, *_QK_NORM),
        qk_norm=True,
        defaults={**_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128},
        options={**_QWEN, **_NO_BIAS},
    ),
)
FAMILIES = {family.model_type: family for family in _ALL}
