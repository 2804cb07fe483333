"""Describes a family of models by a table that maps its Hugging Face tensors to ours.  Import and export use the table.

A rule names one tensor of our model, and the parts of Hugging Face tensors that it consists of.  `layers/weights.py`
has our names, and explains the letters of a shape.  If all layers are of one kind, one tensor of ours has all layers
along its first axis.  Otherwise each layer has its own tensors.  One tensor of ours has all experts of a layer.

`TensorMapping.spans` gives the rows of our tensor that come from each Hugging Face tensor.  `families/` declares the
families.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any, Literal, get_args

from sft.config import ModelConfig
from sft.config.halves import MlpKind
from sft.config.mixer_section import LayerKind
from sft.hf.model_keys import PLAIN, Computed
from sft.hf.tensor_view import EXPERT, LAYER, HfTensor, HfView, View
from sft.layers.kinds import model_of_kind
from sft.layers.weights import sizes_of

_LAYERS, _MTP_LAYER = "decoder.layers.", "mtp.layers.0.transformer_layer."
_NUMBER = re.compile(r"model\.layers\.(\d+)\.")  # matches the number of a layer
# Ends of the names of embedding and output weight in a block for multi-token prediction.
_EMBEDDINGS, _HEADS = ("embed_tokens.weight",), ("shared_head.head.weight", "shared_head.output.weight")
Form = Literal["rows", "groups", "vocabulary"]


@dataclass(frozen=True)
class Rule:
    """One of our tensors, and the views of Hugging Face tensors that our tensor consists of.

    form says how the views are combined:
    rows        concatenated along rows (gate and up in linear_fc1)
    groups      for each query group: its query heads, then its key head, then its value head
    vocabulary  one view, followed by rows of padding
    """

    ours: str
    views: tuple[View, ...]
    form: Form = "rows"
    is_head: bool = False  # stored only if the output is not tied to the embedding
    kind: LayerKind | None = None  # kind of the layers that have the tensor; None: all layers
    mlp: MlpKind | None = None  # MLP of the layers that have the tensor; None: all layers
    is_buffer: bool = False  # no gradient reaches the tensor, and no optimizer changes it
    needs: str = ""  # key below `model` that is true in models with this tensor; "": all models have it

    @property
    def in_layers(self) -> bool:
        return LAYER in self.views[0].name

    @property
    def in_experts(self) -> bool:
        return EXPERT in self.views[0].name or self.views[0].stacks_experts


@dataclass(frozen=True, kw_only=True)
class MtpBlock:
    """The tensors of the block for multi-token prediction, which ends in a layer like those of the model."""

    layer: str  # first part of the names of the layer's tensors; LAYER stands for the number of layers of the model
    own: tuple[Rule, ...]  # rules of the tensors around the layer

    def rules(self, layer_rules: tuple[Rule, ...], model: ModelConfig) -> Iterator[Rule]:
        """The rules of the block.  layer_rules: rules of the model's layers; the block uses those of the last layer"""
        yield from self.own
        for rule in layer_rules:
            if rule.in_layers and _has(model, model.num_layers, rule):
                first = rule.views[0].name.partition(f".{LAYER}.")[0]
                views = (replace(v, name=v.name.replace(f"{first}.{LAYER}", self.layer, 1)) for v in rule.views)
                yield replace(rule, ours=rule.ours.replace(_LAYERS, _MTP_LAYER, 1), views=tuple(views))


@dataclass(frozen=True)
class RowSpan:
    """Copies `num_rows` rows of a view, from its row `start` on, to our tensor, from row `target` on."""

    source: int | None  # index of the view in `TensorMapping.sources`; None: rows of zeros
    start: int
    num_rows: int
    target: int


@dataclass(frozen=True)
class TensorMapping:
    """The part of one of our tensors for one layer and expert, and the Hugging Face views of which it consists."""

    key: str
    layer: int | None  # counted from 0; None: the tensor is outside of layers
    expert: int | None  # counted from 0; None: the tensor is outside of experts
    stack: tuple[int, ...]  # sizes of the layer axis and the expert axis of our whole tensor, if it has them
    stack_index: tuple[int, ...]  # the layer and the expert, as indices on these axes
    sources: tuple[HfView, ...]
    form: Form
    num_groups: int
    is_buffer: bool = False

    @property
    def parameter(self) -> str:
        """The weight of the model that holds our tensor: `in_proj.weight` holds `in_proj.weight.query` and others."""
        name, is_part, _ = self.key.partition(".weight.")
        return f"{name}.weight" if is_part else self.key

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row; () if the tensor is a vector."""
        return self.sources[0].shape[1:]

    def shape(self, num_rows: int | None = None) -> tuple[int, ...]:
        """Shape of our whole tensor, with all layers and experts.  num_rows: rows with padding; None: no padding"""
        return (*self.stack, self.num_rows if num_rows is None else num_rows, *self.row_shape)

    def shape_like(self, stored: tuple[int, ...] | None) -> tuple[int, ...]:
        """The expected shape of our tensor.  A vocabulary may have as many rows of padding as the stored one."""
        shape = self.shape()
        is_padded = stored is not None and stored[0] > shape[0] and stored[1:] == shape[1:]
        return stored if self.form == "vocabulary" and is_padded and stored else shape

    def spans(self, num_rows: int | None = None) -> list[RowSpan]:
        """The sources of all rows of our tensor, in row order.  num_rows: number of these rows, with padding

        Example: form "groups", 4 query heads and 2 key heads of width 1.  The rows of our tensor are
        q0 q1 k0 v0 q2 q3 k1 v1.  The spans (view, start, num_rows, target) are (q, 0, 2, 0), (k, 0, 1, 2),
        (v, 0, 1, 3), (q, 2, 2, 4), ...
        """
        spans: list[RowSpan] = []
        target = 0
        num_groups = self.num_groups if self.form == "groups" else 1
        for group in range(num_groups):
            for source, view in enumerate(self.sources):
                group_rows = view.num_rows // num_groups
                step = min(group_rows, view.rows_of_run)  # rows of a span are at equal distances in the stored tensor
                for start in range(group * group_rows, (group + 1) * group_rows, step):
                    spans.append(RowSpan(source, start, step, target))
                    target += step
        if num_rows is not None and num_rows > target:
            spans.append(RowSpan(None, 0, num_rows - target, target))
        return spans

    @property
    def num_rows(self) -> int:
        """Number of rows of our tensor, without padding."""
        return sum(view.num_rows for view in self.sources)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`: its tensors, the keys of its config.json, and defaults for keys that the file omits."""

    model_type: str
    class_name: str
    rules: tuple[Rule, ...]
    implied: Mapping[str, Any]  # keys of `model.*` whose values follow from the model_type alone
    keys: Mapping[str, str]  # our key below `model` -> the key of config.json
    # Our key below `model` -> how config.json expresses it, if not by one key with the same value.
    computed: Mapping[str, Computed] = field(default_factory=dict)
    # Key of `rope_parameters` that the family must have -> our key below `model.rope`.
    rope_keys: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)  # key of config.json -> another name of the same key
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # key of config.json -> supported values
    lacks: Mapping[str, str] = field(default_factory=dict)  # key of `options` -> what our model lacks for other values
    scalings: tuple[str, ...] = ("none", "linear", "llama3", "yarn")  # rope.scaling that transformers supports
    other_rules: tuple[tuple[Rule, ...], ...] = ()  # alternative rules, for files with other names or shapes
    # Whether the keys of the language model are in the group text_config of config.json.
    text_config: Literal["none", "required", "optional"] = "none"
    text_type: str = ""  # model_type in text_config, for a family whose language model may be of several types
    has_mrope: bool = False  # whether positions have sections for time, height and width, which are equal for text
    # The value if config.json has no partial_rotary_factor; None: the family always rotates whole heads.
    rope_fraction: float | None = None
    rope_width: str = ""  # key with the rotated elements of a head, if config.json has no partial_rotary_factor
    # Whether rope_parameters has a group for each type of layer.  Only the group of full attention may have a scaling.
    rope_by_layer_type: bool = False
    # The rotary base of layers with a window, if config.json has no such groups: its key, and the value if the key is
    # absent.  None: the base of the other layers.
    window_theta: tuple[str, float] | None = None
    longest: str = "max_position_embeddings"  # key of config.json: the longest text that the model was trained for
    # Adds the keys of today's transformers to the keys of the language model in files of older forms.
    renewed: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    passed_through: tuple[str, ...] = ()  # patterns of names of tensors that are kept and not trained: `visual.*`
    has_mtp_layers: bool = False  # whether files may have layers after the model's last one, for multi-token prediction
    mtp: MtpBlock | None = None  # the block for multi-token prediction that a model may train; None: unknown

    @property
    def name(self) -> str:
        """The key of the family in `FAMILIES`, such as qwen3 or mistral3/mistral."""
        return f"{self.model_type}/{self.text_type}" if self.text_type else self.model_type

    @property
    def fixed(self) -> dict[str, Any]:
        """Keys of `model.*` that are equal in all models of the family, and their values."""
        own = {*self.keys, *self.computed, *(f"rope.{name}" for name in self.rope_keys.values())}
        own |= {"rope.window_base", "rope.window_fraction"} if self.rope_by_layer_type else set()
        own |= {"rope.fraction"} if self.rope_fraction is not None else set()
        own |= {"rope.mscale_all_dim"} if self.has_latents else set()
        return {key: value for key, value in {**PLAIN, **self.implied}.items() if key not in own}

    @property
    def has_latents(self) -> bool:
        """Whether the layers of the family have latent attention."""
        return "latent_attention.kv_lora_rank" in self.keys

    @property
    def embedding(self) -> str:
        """The name of the input embedding."""
        return next(rule.views[0].name for rule in self.rules if rule.form == "vocabulary" and not rule.is_head)

    @property
    def head(self) -> str:
        """The name of the output weight, which a tied model does not store."""
        return next(rule.views[0].name for rule in self.rules if rule.is_head)

    def stored_as(self, shapes: Mapping[str, tuple[int, ...]], model: ModelConfig, vocab_size: int) -> "Family":
        """The family with the rules that fit the stored tensors as its `rules`: its own, or one of `other_rules`.

        If none fits, returns the family unchanged.
        shapes: the shapes of all stored tensors, by name
        """
        for rules in (self.rules, *self.other_rules) if self.other_rules else ():
            family = replace(self, rules=rules)
            tensors = views_by_tensor(family.mappings(model, vocab_size))
            if all(shapes.get(tensor.name) == tensor.shape for tensor in tensors):
                return family
        return self

    def passes_through(self, name: str, num_layers: int) -> bool:
        """Whether the tensor of this name may be passed through, in a model of `num_layers` layers."""
        number = _NUMBER.match(name) if self.has_mtp_layers else None
        is_mtp = number is not None and int(number[1]) >= num_layers
        return is_mtp or any(fnmatchcase(name, pattern) for pattern in self.passed_through)

    def mappings(self, model: ModelConfig, vocab_size: int) -> Iterator[TensorMapping]:
        """The mappings of all tensors: outside of layers, then of each layer and expert, then of the MTP block."""
        by_kind = {kind: sizes_of(model_of_kind(model, kind), vocab_size) for kind in get_args(LayerKind)}
        rules = self._rules(self.rules, model)
        for layer in (None, *range(model.num_layers)):
            sizes = by_kind[model.kind_of((layer or 0) + 1)]
            for rule in rules:
                if rule.in_layers is (layer is not None) and _has(model, layer, rule):
                    yield from _mappings_of(rule, layer, model, sizes)
        if model.has_mtp and self.mtp is not None:
            for rule in self._rules(tuple(self.mtp.rules(self.rules, model)), model):
                yield from _mappings_of(rule, None, model, sizes)

    def _rules(self, rules: tuple[Rule, ...], model: ModelConfig) -> list[Rule]:
        rules = tuple(rule for rule in rules if not (rule.is_head and model.tie_embeddings))
        return [rule for rule in rules if not rule.needs or attrgetter(rule.needs)(model)]

    def copies(self, model: ModelConfig, names: Collection[str]) -> dict[str, str]:
        """Stored `names` that may have the values of a trained tensor: name -> name of this tensor.

        They are the output weight of a tied model, and embedding and output weight in a block for multi-token
        prediction, which belong to the model: servers share one tensor between model and block.
        """
        embedding, head = self.embedding, self.head
        output = embedding if model.tie_embeddings else head
        copies = {name: output for name in names if name == head and model.tie_embeddings}
        for name in names:
            if name.endswith((*_EMBEDDINGS, *_HEADS)) and self.passes_through(name, model.num_layers):
                copies[name] = embedding if name.endswith(_EMBEDDINGS) else output
        return copies


def _mappings_of(
    rule: Rule, layer: int | None, model: ModelConfig, sizes: Mapping[str, int]
) -> Iterator[TensorMapping]:
    """The mappings of a rule in one layer: one for each expert if the rule is of experts, else one.

    layer: counted from 0; None outside of the model's layers
    sizes: size for each letter of a shape
    """
    # decoder.layers.mlp.linear_fc2.weight, layer 3 -> decoder.layers.3.mlp.linear_fc2.weight
    has_own_key = layer is not None and not model.stacks_layers
    key = rule.ours.replace(_LAYERS, f"{_LAYERS}{layer}.", 1) if has_own_key else rule.ours
    for expert in range(sizes["x"]) if rule.in_experts else (None,):
        axes = [(layer, model.num_layers)] if layer is not None and model.stacks_layers else []
        numbered = [*axes, *([(expert, sizes["x"])] if expert is not None else [])]
        number = model.num_layers if layer is None else layer  # the number of the MTP block in files
        yield TensorMapping(
            key=key,
            layer=layer,
            expert=expert,
            stack=tuple(count for _, count in numbered),
            stack_index=tuple(index for index, _ in numbered),
            sources=tuple(view.of(number, expert, sizes) for view in rule.views),
            form=rule.form,
            num_groups=sizes["g"],
            is_buffer=rule.is_buffer,
        )


def _has(model: ModelConfig, layer: int | None, rule: Rule) -> bool:
    """Whether the rule applies to a layer, counted from 0, of this mixer and MLP.  layer: None outside of layers"""
    number = (layer or 0) + 1
    mlp = model.mlp_kind_of(number)
    return layer is None or (rule.kind in (None, model.kind_of(number)) and rule.mlp in (None, mlp))


def views_by_tensor(mappings: Iterable[TensorMapping]) -> dict[HfTensor, list[tuple[TensorMapping, int]]]:
    """Every stored tensor, and the views that it consists of: for each, a mapping and the view's index in its sources.

    Together, the views contain every element of the tensor once.
    """
    views: dict[HfTensor, list[tuple[TensorMapping, int]]] = {}
    for mapping in mappings:
        for number, view in enumerate(mapping.sources):
            views.setdefault(view.tensor, []).append((mapping, number))
    return views
