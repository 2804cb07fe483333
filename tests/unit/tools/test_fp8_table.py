"""The matrices in FP8: written out for three families, and compared with the split over tp."""

import pytest

from sft.estimate.layer_work import NOT_IN_FP8
from sft.hf.families import FAMILIES
from sft.layers.weights import TABLE
from tools import fp8_table
from tools.printed_page import DOCS

GATED = ("linear_fc1", "linear_fc2", "experts.linear_fc1", "experts.linear_fc2")
SHARED = ("shared_experts.linear_fc1", "shared_experts.linear_fc2")
LATENT = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj (1)", "linear_gate_proj", "linear_proj")


@pytest.mark.parametrize(
    "family, in_fp8, in_bf16",
    [
        ("qwen3", ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"), ()),
        ("deepseek_v3", (*LATENT, *GATED, *SHARED), ("linear_q_down_proj", "linear_kv_down_proj", "router")),
        (
            "nemotron_h",
            ("linear_qkv", "linear_proj", "in_proj", "out_proj", *GATED, *SHARED),
            ("router", "fc1_latent_proj", "fc2_latent_proj"),
        ),
    ],
)
def test_matrices_written_out(family: str, in_fp8: tuple[str, ...], in_bf16: tuple[str, ...]) -> None:
    assert fp8_table.matrices(FAMILIES[family]) == (in_fp8, in_bf16)


def test_a_matrix_that_every_rank_has_whole_is_in_bf16() -> None:
    """Transformer Engine's modules divide their weights over tp; all other modules hold whole weights."""
    for weight in TABLE:
        if weight.role == "matrix":
            assert (weight.part in NOT_IN_FP8) == (weight.split == ""), weight.key


def test_the_page_has_the_formats_of_each_recipe() -> None:
    page = (DOCS / "concepts/memory.md").read_text(encoding="utf-8")
    rows = [[cell.strip(" `") for cell in line.split("|")] for line in page.splitlines()]
    hybrid, plain = "E4M3, gradients E5M2", "E4M3"
    written = {"delayed": hybrid, "tensorwise": hybrid, "blockwise": plain, "mxfp8": plain}
    assert {recipe: fp8_table.formats(recipe) for recipe in fp8_table.RECIPES} == written
    assert {row[1]: row[3] for row in rows if len(row) > 3 and row[1] in written} == written
    assert not any("fp4" in key for recipe in written for key in fp8_table.fp8.fields(recipe))
