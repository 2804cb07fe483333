"""How rows of their tensors lie in ours, and which tensors a family has."""

import pytest

from sft.config import ModelConfig
from sft.convert.match import by_layer
from sft.convert.to_megatron import blocks
from sft.hf.family import FAMILIES, Item, Part, Span
from tests.unit.fixtures import hf

MODEL = ModelConfig(num_layers=2, hidden_size=8, ffn_hidden_size=12, num_attention_heads=4, num_query_groups=2)


def item(form: str, *rows: int) -> Item:
    parts = tuple(Part(f"part{i}", (count, 8)) for i, count in enumerate(rows))
    return Item(key="ours", layer=0, parts=parts, form=form, num_groups=2)  # type: ignore[arg-type]


def test_groups_written_out() -> None:
    """Four query heads of width 1 and two key heads: q0 q1 k0 v0 q2 q3 k1 v1."""
    q, k, v = 0, 1, 2
    assert item("groups", 4, 2, 2).spans() == [
        Span(q, 0, 2, 0),
        Span(k, 0, 1, 2),
        Span(v, 0, 1, 3),
        Span(q, 2, 2, 4),
        Span(k, 1, 1, 6),
        Span(v, 1, 1, 7),
    ]


def test_rows_are_one_below_the_other() -> None:
    assert item("rows", 3, 3).spans() == [Span(0, 0, 3, 0), Span(1, 0, 3, 3)]


def test_a_vocabulary_is_padded_with_rows_of_zeros() -> None:
    assert item("vocabulary", 5).spans(8) == [Span(0, 0, 5, 0), Span(None, 0, 3, 5)]
    assert item("vocabulary", 8).spans(8) == [Span(0, 0, 8, 0)]


def test_blocks_are_cut_and_put_together() -> None:
    spans = [Span(0, 0, 3, 0), Span(1, 0, 2, 3)]
    assert list(blocks(spans, 2)) == [
        [Span(0, 0, 2, 0)],
        [Span(0, 2, 1, 2), Span(1, 0, 1, 3)],
        [Span(1, 1, 1, 4)],
    ]
    assert list(blocks(spans, 5)) == list(blocks(spans, 100)) == [spans]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", hf.FAMILIES)
def test_a_family_has_the_tensors_of_transformers(family: str, tied: bool) -> None:
    fields = dict(hidden_size=8, intermediate_size=12, num_attention_heads=4, num_key_value_heads=2, head_dim=2)
    theirs = {name: tuple(p.shape) for name, p in hf.build(family, tied=tied, **fields).named_parameters()}
    model = MODEL.model_copy(update={"tie_embeddings": tied})
    items = list(FAMILIES[family].items(model, hf.VOCAB))
    found = {part.name: part.shape for one in items for part in one.parts}
    assert found == theirs
    assert len(found) == sum(len(one.parts) for one in items)


def test_names_are_told_by_layer() -> None:
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1, 2, 5)] + ["model.layers.7.x", "lm_head.weight"]
    assert by_layer(names) == [
        "lm_head.weight",
        "model.layers.*.mlp.up_proj.weight (layers 0-2, 5)",
        "model.layers.*.x (layer 7)",
    ]
