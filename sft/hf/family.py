"""What is said of a family of models: which of its tensors is which of Megatron's, read in both directions.

A rule names a tensor as our model stores it (under Transformer Engine's names, where a norm belongs to the projection
behind it) and the tensors of theirs that it is made of, with their shapes in letters:

    v vocabulary    h hidden size    f MLP width    x experts    e width of an expert's MLP
    q query heads * head width    k key heads * head width    d head width

`spans` says how their rows lie in ours.  The families themselves are in `families.py`; what config.json says is
`architecture.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sft.config import ModelConfig

# Where their names have the number of a layer, and of an expert in it; ours stack all layers along a first axis, and
# the experts of each along a second.
LAYER, EXPERT = "{i}", "{e}"
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

    @property
    def in_layers(self) -> bool:
        return LAYER in self.theirs[0][0]

    @property
    def in_experts(self) -> bool:
        return EXPERT in self.theirs[0][0]


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
    """One of our tensors, in one layer, of one expert, and the tensors that it is made of.

    stack: how many layers our whole tensor has, and how many experts, where it has those axes
    """

    key: str
    layer: int | None
    expert: int | None
    stack: tuple[int, ...]
    parts: tuple[Part, ...]
    form: Form
    num_groups: int

    @property
    def first(self) -> tuple[int, ...]:
        """Where it is in the stack."""
        return tuple(number for number in (self.layer, self.expert) if number is not None)

    @property
    def row(self) -> tuple[int, ...]:
        """The shape of a row: () where rows are numbers."""
        return self.parts[0].shape[1:]

    def shape(self, num_rows: int | None = None) -> tuple[int, ...]:
        """Of our whole tensor.  num_rows: with padding"""
        return (*self.stack, self.num_rows if num_rows is None else num_rows, *self.row)

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
    """One `model_type`: its tensors, its config.json, and what transformers takes where that is silent.

    kind: what the name of the family says of our model; keys: what config.json does, ours below `model` -> theirs
    options: values of config.json under which the model computes what ours does
    """

    model_type: str
    class_name: str
    rules: tuple[Rule, ...]
    kind: Mapping[str, Any]
    keys: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of theirs, which mean the same
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()  # tensors that old files have and nobody reads

    def items(self, model: ModelConfig, vocab_size: int) -> Iterator[Item]:
        """Every tensor of the model, outer ones first, then layer by layer, expert by expert."""
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
                        yield _item(rule, layer, expert, model, sizes)


def _item(rule: Rule, layer: int | None, expert: int | None, model: ModelConfig, sizes: Mapping[str, int]) -> Item:
    def part(name: str, shape: str) -> Part:
        numbered = name.replace(LAYER, str(layer)).replace(EXPERT, str(expert))
        return Part(numbered, tuple(sizes[letter] for letter in shape.split()))

    counts = ((layer, model.num_layers), (expert, sizes["x"]))
    return Item(
        key=rule.ours,
        layer=layer,
        expert=expert,
        stack=tuple(count for number, count in counts if number is not None),
        parts=tuple(part(name, shape) for name, shape in rule.theirs),
        form=rule.form,
        num_groups=model.resolved_query_groups,
    )
