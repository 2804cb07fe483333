"""A family of models: which of its tensors is which of Megatron's.  The same table is read in both directions.

A rule names a tensor of our model (under Transformer Engine's names, where a norm belongs to the projection behind it)
and the Hugging Face tensors that it is made of, with their shapes in letters:

    v vocabulary    h hidden size    f MLP width    x experts    e width of an expert's MLP
    q query heads * head width    k key heads * head width    d head width

`TensorMapping.spans` says how their rows lie in ours.  The families themselves are in `families.py`; `architecture.py`
reads config.json.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sft.config import ModelConfig

# These stand for the number of a layer, and of an expert in it, in the names of Hugging Face.  Our tensors stack all
# layers along a first axis, and the experts of each layer along a second.
LAYER, EXPERT = "{i}", "{e}"
Form = Literal["rows", "groups", "vocabulary"]


@dataclass(frozen=True)
class Rule:
    """One tensor of ours and the Hugging Face tensors, `hf_tensors`, that it is made of.

    form says how hf_tensors are put together:
    rows        one below the other (gate and up in linear_fc1)
    groups      queries, keys and values by query group: its query heads, its key, its value, then the next group
    vocabulary  with rows of padding below
    """

    ours: str
    hf_tensors: tuple[tuple[str, str], ...]  # name and shape
    form: Form = "rows"
    is_head: bool = False  # stored only where the output is not tied to the embedding

    @property
    def in_layers(self) -> bool:
        return LAYER in self.hf_tensors[0][0]

    @property
    def in_experts(self) -> bool:
        return EXPERT in self.hf_tensors[0][0]


@dataclass(frozen=True)
class HfTensor:
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class RowSpan:
    """`num_rows` rows of one Hugging Face tensor, from `start` on, which are rows `target` and on of ours.

    source: number of the tensor in `TensorMapping.sources`; None: rows of zeros
    """

    source: int | None
    start: int
    num_rows: int
    target: int


@dataclass(frozen=True)
class TensorMapping:
    """One of our tensors in one layer, of one expert, and the Hugging Face tensors that it is made of.

    stack: sizes of the layer axis and the expert axis of our whole tensor, where it has them; stack_index: the layer
    and the expert
    """

    key: str
    stack: tuple[int, ...]
    stack_index: tuple[int, ...]
    sources: tuple[HfTensor, ...]
    form: Form
    num_groups: int

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row: () of a vector."""
        return self.sources[0].shape[1:]

    def shape(self, num_rows: int | None = None) -> tuple[int, ...]:
        """Shape of our whole tensor, all layers and experts.  num_rows: with padding"""
        return (*self.stack, self.num_rows if num_rows is None else num_rows, *self.row_shape)

    def spans(self, num_rows: int | None = None) -> list[RowSpan]:
        """What each row of ours is, in their order.  num_rows: of ours, with padding

        groups, 4 query heads and 2 key heads of width 1:
        q0 q1 k0 v0 q2 q3 k1 v1 -> (q, 0, 2, target 0) (k, 0, 1, target 2) (v, 0, 1, target 3) (q, 2, 2, target 4) ...
        """
        spans: list[RowSpan] = []
        target = 0
        num_groups = self.num_groups if self.form == "groups" else 1
        for group in range(num_groups):
            for source, tensor in enumerate(self.sources):
                group_rows = tensor.shape[0] // num_groups
                spans.append(RowSpan(source, group * group_rows, group_rows, target))
                target += group_rows
        if num_rows is not None and num_rows > target:
            spans.append(RowSpan(None, 0, num_rows - target, target))
        return spans

    @property
    def num_rows(self) -> int:
        """Rows of ours, without padding."""
        return sum(tensor.shape[0] for tensor in self.sources)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`: its tensors, the keys of its config.json, and transformers' defaults for keys it omits.

    implied  keys of `model.*` whose values follow from the model_type alone
    keys     our key below `model` -> the key of config.json
    aliases  key of config.json -> another name of the same
    options  keys of config.json, and the values under which the model computes what ours does
    unread   tensors that old files have and no model reads
    """

    model_type: str
    class_name: str
    rules: tuple[Rule, ...]
    implied: Mapping[str, Any]
    keys: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    def mappings(self, model: ModelConfig, vocab_size: int) -> Iterator[TensorMapping]:
        """Every tensor of the model: those outside of layers first, then layer by layer, expert by expert."""
        sizes = {
            "v": vocab_size,
            "h": model.hidden_size,
            "f": model.ffn_hidden_size,
            "x": model.moe.num_experts or 0,
            "e": model.resolved_expert_ffn,
            "q": model.num_attention_heads * model.resolved_head_dim,
            "k": model.resolved_query_groups * model.resolved_head_dim,
            "d": model.resolved_head_dim,
        }
        rules = [rule for rule in self.rules if not (rule.is_head and model.tie_embeddings)]
        for layer in (None, *range(model.num_layers)):
            for rule in rules:
                if rule.in_layers is (layer is not None):
                    for expert in range(sizes["x"]) if rule.in_experts else (None,):
                        axes = ((layer, model.num_layers), (expert, sizes["x"]))
                        numbered = [(number, count) for number, count in axes if number is not None]
                        yield TensorMapping(
                            key=rule.ours,
                            stack=tuple(count for _, count in numbered),
                            stack_index=tuple(number for number, _ in numbered),
                            sources=tuple(
                                HfTensor(
                                    name.replace(LAYER, str(layer)).replace(EXPERT, str(expert)),
                                    tuple(sizes[letter] for letter in shape.split()),
                                )
                                for name, shape in rule.hf_tensors
                            ),
                            form=rule.form,
                            num_groups=model.resolved_query_groups,
                        )
