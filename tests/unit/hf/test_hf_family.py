"""The positions of a family's tensors in our tensors, and the tensors that a family has."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sft.config import ModelConfig, MoeConfig
from sft.config.linear_attention import LinearAttentionConfig
from sft.hf.architecture import architecture, read
from sft.hf.families import FAMILIES
from sft.hf.family import RowSpan, TensorMapping, views_by_tensor
from sft.hf.tensor_check import fold_by_layer
from sft.hf.tensor_view import HfTensor, HfView, View
from sft.weights.import_hf import split_into_blocks
from tests.unit.fixtures import hf

MODEL = ModelConfig(num_layers=2, hidden_size=8, ffn_hidden_size=12, num_attention_heads=4, num_query_groups=2)


def whole(name: str, *shape: int) -> HfView:
    return HfView(HfTensor(name, shape), (), 0, shape[0])


def item(form: str, *rows: int) -> TensorMapping:
    sources = tuple(whole(f"part{i}", count, 8) for i, count in enumerate(rows))
    place: dict[str, Any] = dict(layer=0, expert=None, stack=(2,), stack_index=(0,))
    return TensorMapping(key="ours", **place, sources=sources, form=form, num_groups=2)  # type: ignore[arg-type]


def test_groups_written_out() -> None:
    """Four query heads of width 1 and two key heads: q0 q1 k0 v0 q2 q3 k1 v1."""
    q, k, v = 0, 1, 2
    assert item("groups", 4, 2, 2).spans() == [
        RowSpan(q, 0, 2, 0),
        RowSpan(k, 0, 1, 2),
        RowSpan(v, 0, 1, 3),
        RowSpan(q, 2, 2, 4),
        RowSpan(k, 1, 1, 6),
        RowSpan(v, 1, 1, 7),
    ]


def test_a_vocabulary_is_padded_with_rows_of_zeros() -> None:
    assert item("vocabulary", 5).spans(8) == [RowSpan(0, 0, 5, 0), RowSpan(None, 0, 3, 5)]
    assert item("vocabulary", 8).spans(8) == [RowSpan(0, 0, 8, 0)]


def test_blocks_are_cut_and_put_together() -> None:
    spans = [RowSpan(0, 0, 3, 0), RowSpan(1, 0, 2, 3)]
    assert list(split_into_blocks(spans, 2)) == [
        [RowSpan(0, 0, 2, 0)],
        [RowSpan(0, 2, 1, 2), RowSpan(1, 0, 1, 3)],
        [RowSpan(1, 1, 1, 4)],
    ]
    assert list(split_into_blocks(spans, 5)) == list(split_into_blocks(spans, 100)) == [spans]


SIZES = {"q": 6, "k": 2, "h": 8, "x": 4, "X": 4, "e": 3}


def test_a_view_of_rows_written_out() -> None:
    """Rows of queries, keys and values in one tensor: rows 0-5, 6-7, 8-9."""
    views = [View("layers.{i}.qkv", "q+k+k h", part).of(1, None, SIZES) for part in range(3)]
    assert [(view.first, view.num_rows, view.shape) for view in views] == [
        (0, 6, (6, 8)),
        (6, 2, (2, 8)),
        (8, 2, (2, 8)),
    ]
    assert {view.tensor for view in views} == {HfTensor("layers.1.qkv", (10, 8))}
    assert not any(view.is_whole or view.index for view in views)
    assert View("o", "h q").of(1, None, SIZES).is_whole


def test_a_view_of_an_expert_written_out() -> None:
    """All experts in one tensor [experts, h, gate and up]: the up projection of expert 2 is its last three columns."""
    gate, up = (View("layers.{i}.gate_up", "X h e+e", part, transposed=True).of(0, 2, SIZES) for part in (0, 1))
    assert gate == HfView(HfTensor("layers.0.gate_up", (4, 8, 6)), (2,), 0, 3, transposed=True)
    assert up == HfView(HfTensor("layers.0.gate_up", (4, 8, 6)), (2,), 3, 3, transposed=True)
    assert gate.shape == up.shape == (3, 8) and not gate.is_whole
    assert not View("square", "h h", transposed=True).of(None, None, SIZES).is_whole


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", hf.FAMILIES)
def test_a_family_has_the_tensors_of_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    """The tensors of the family's files; in memory, transformers has the experts as one tensor."""
    tied = tied and family not in hf.UNTIED_FAMILIES
    fields = dict(hidden_size=8, intermediate_size=12, num_attention_heads=4, num_key_value_heads=2, head_dim=2)
    fields |= dict(num_attention_heads_per_layer=[4, 2]) if family == "laguna" else {}
    partial = (*hf.LINEAR_FAMILIES, *hf.ROUTED_FAMILIES, *hf.OWN_WINDOW_FAMILIES, *hf.ROTATED_FAMILIES)
    fields |= dict(head_dim=8) if family in partial else {}  # a quarter or half of a head is rotated
    fields |= dict(head_dim=...) if family in hf.LATENT_FAMILIES else {}
    theirs = load_file(hf.save(tmp_path, family, tied=tied, **fields) / "model.safetensors")
    experts = {"qwen3_moe": MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=24)}
    plain = ("mixtral", "olmoe", "granitemoe", "granitemoe_swa", "gpt_oss")
    experts |= dict.fromkeys(plain, MoeConfig(num_experts=4, top_k=2))
    experts["qwen2_moe"] = experts["qwen3_moe"].model_copy(update={"shared_ffn_hidden_size": 40, "shared_gate": True})
    model = MODEL.model_copy(update={"tie_embeddings": tied, "moe": experts.get(family, MoeConfig())})
    if family in (
        *partial,
        *hf.LATENT_FAMILIES,
        *("gemma4_text", "gemma4_unified_text", "nemotron_h", "granitemoehybrid", "afmoe", "dots1"),
    ):
        model = architecture(read(tmp_path), "config.json").model
    views = views_by_tensor(FAMILIES[family].mappings(model, hf.VOCAB))
    assert {one.name: one.shape for one in views} == {name: tuple(one.shape) for name, one in theirs.items()}
    hf.assert_covered_once(views)


def test_experts_written_out() -> None:
    """Two layers of two experts of width 3: four items for each of two keys, gate rows above up rows."""
    moe = MoeConfig(num_experts=2, top_k=1, ffn_hidden_size=3, normalize_top_k=False)
    items = list(FAMILIES["mixtral"].mappings(MODEL.model_copy(update={"moe": moe}), 5))
    prefix, theirs = "decoder.layers.mlp.experts.experts", "model.layers.{}.block_sparse_moe.experts.{}.w{}.weight"
    up = [one for one in items if one.key == f"{prefix}.linear_fc1.weight"]
    down = [one for one in items if one.key == f"{prefix}.linear_fc2.weight"]
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [one.stack_index for one in up] == [one.stack_index for one in down] == places
    for one, place in zip(up, places):
        assert one.sources == (whole(theirs.format(*place, 1), 3, 8), whole(theirs.format(*place, 3), 3, 8))
        assert one.spans() == [RowSpan(0, 0, 3, 0), RowSpan(1, 0, 3, 3)]
        assert one.shape() == (2, 2, 6, 8)
    for one, place in zip(down, places):
        assert one.sources == (whole(theirs.format(*place, 2), 8, 3),) and one.shape() == (2, 2, 8, 3)
    router, _ = [one for one in items if one.key == "decoder.layers.mlp.router.weight"]
    assert router.sources == (whole("model.layers.0.block_sparse_moe.gate.weight", 2, 8),)
    assert (router.stack_index, router.shape()) == ((0,), (2, 2, 8))
    norm, _ = [one for one in items if one.key == "decoder.layers.pre_mlp_layernorm.weight"]
    assert norm.sources == (whole("model.layers.0.post_attention_layernorm.weight", 8),) and norm.row_shape == ()
    assert not any(".mlp.linear_fc" in one.key for one in items)


def test_names_are_told_by_layer_and_expert() -> None:
    """However many there are: layers with the same experts share one line."""
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1, 2, 5)] + ["model.layers.7.x", "lm_head.weight"]
    assert fold_by_layer(names) == [
        "lm_head.weight",
        "model.layers.*.mlp.up_proj.weight (layers 0-2, 5)",
        "model.layers.*.x (layer 7)",
    ]
    expert = "model.layers.{}.mlp.experts.{}.up_proj.weight".format
    names = [expert(layer, i) for layer in range(48) for i in range(128) if (layer, i) != (7, 3)]
    assert fold_by_layer(names) == [
        "model.layers.*.mlp.experts.*.up_proj.weight (layers 0-6, 8-47; experts 0-127)",
        "model.layers.*.mlp.experts.*.up_proj.weight (layer 7; experts 0-2, 4-127)",
    ]


def test_a_dense_layer_written_out() -> None:
    """Query, key and value rows by group; gate rows above up rows."""
    mappings = {mapping.key: mapping for mapping in FAMILIES["qwen2"].mappings(MODEL, 5)}
    layers, theirs = "decoder.layers", "model.layers.1"
    qkv = mappings[f"{layers}.self_attention.linear_qkv.weight"]
    assert qkv.sources == tuple(
        whole(f"{theirs}.self_attn.{name}_proj.weight", rows, 8) for name, rows in (("q", 8), ("k", 4), ("v", 4))
    )
    assert (qkv.form, qkv.num_groups) == ("groups", 2)
    bias = mappings[f"{layers}.self_attention.linear_qkv.bias"]
    assert [source.name for source in bias.sources] == [f"{theirs}.self_attn.{name}_proj.bias" for name in "qkv"]
    fc1 = mappings[f"{layers}.mlp.linear_fc1.weight"]
    assert fc1.sources == tuple(whole(f"{theirs}.mlp.{name}_proj.weight", 12, 8) for name in ("gate", "up"))
    assert fc1.spans() == [RowSpan(0, 0, 12, 0), RowSpan(1, 0, 12, 12)]


def test_a_view_of_blocks_written_out() -> None:
    """Two heads of width 2, each with rows of queries, then rows of gates: rows 2, 3, 6 and 7 are gates."""
    view = View("q_proj", "q+q h", part=1, blocks="a").of(0, None, {"q": 4, "h": 8, "a": 2})
    assert view == HfView(HfTensor("q_proj", (8, 8)), (), 2, 4, num_blocks=2)
    assert [view.row(number) for number in range(4)] == [2, 3, 6, 7] and view.rows_of_block == 2
    assert view.shape == (4, 8) and not view.is_whole


def test_a_span_lies_in_one_block() -> None:
    """One group of two heads of width 2 with gates, keys and values of width 2."""
    queries, gates = (HfView(HfTensor("q_proj", (8, 8)), (), 2 * part, 4, num_blocks=2) for part in range(2))
    place: dict[str, Any] = dict(key="ours", layer=0, expert=None, stack=(), stack_index=())
    sources = (queries, gates, whole("k", 2, 8), whole("v", 2, 8))
    spans = TensorMapping(**place, sources=sources, form="groups", num_groups=1).spans()
    assert spans[:3] == [RowSpan(0, 0, 2, 0), RowSpan(0, 2, 2, 2), RowSpan(1, 0, 2, 4)]
    assert spans[3:] == [RowSpan(1, 2, 2, 6), RowSpan(2, 0, 2, 8), RowSpan(3, 0, 2, 10)]


def test_layers_of_several_kinds_have_tensors_of_their_own() -> None:
    """Layer 1 has linear attention; rules for other kinds of layers are left out, and no axis is stacked."""
    linear = LinearAttentionConfig(layers=[1], num_key_heads=1, num_value_heads=1)
    model = MODEL.model_copy(update={"linear_attention": linear})
    family = FAMILIES["llama"]
    rules = [replace(rule, kind="full attention" if "qkv" in rule.ours else None) for rule in family.rules]
    items = list(replace(family, rules=tuple(rules)).mappings(model, 5))
    assert all(mapping.stack == mapping.stack_index == () for mapping in items)
    keys = [mapping.key for mapping in items if mapping.layer is not None]
    assert [key for key in keys if "linear_qkv.weight" in key] == ["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert [key for key in keys if "linear_proj" in key] == [
        f"decoder.layers.{layer}.self_attention.linear_proj.weight" for layer in range(2)
    ]
