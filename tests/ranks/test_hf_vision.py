"""The language model of a checkpoint with a vision tower has, for text, the token losses of transformers.

Families that transformers has only with a tower are also compared by their gradients.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.hf_comparison import (
    Case,
    Models,
    compare_gradients,
    compare_token_losses,
    layout_of,
    pairs,
    saved_once,
    skewed_packs,
)
from tests.ranks.hf_models import check_losses, packed_losses, packs_of, recipe_of
from tests.ranks.layouts import CP, EP, PP, SP, TP
from tests.ranks.pool import Ranks
from tests.unit.fixtures import vision

CASES: list[Any] = [
    ("qwen2_vl with flat keys", PP),
    ("qwen2_5_vl with flat keys", TP),
    ("qwen2_5_vl", CP),
    ("qwen3_vl", TP),
    ("qwen3_vl_moe as released", EP),
    ("qwen3_vl_moe as released", [*SP, *EP]),
    ("qwen3_vl_moe", [*CP, *EP]),
    ("mistral3", PP),
    ("ministral3", CP),
    pytest.param("mistral3/mistral4", [*CP, *EP], marks=pytest.mark.grid),
    ("gemma3", PP),
    ("gemma4", EP),
    ("gemma4_unified", CP),
    ("qwen3_5", CP),
    ("kimi_k25", [*CP, *EP]),
    ("exaone4_5", CP),
    pytest.param("qwen3_5_moe", EP, marks=pytest.mark.grid),
]  # the grid of test_hf_export.py has all of them


@pytest.mark.parametrize("name,overrides", CASES, ids=lambda v: " ".join(v) if isinstance(v, list) else str(v))
def test_every_token_has_the_loss_that_transformers_gives_it(
    ranks: Ranks, tmp_path: Path, name: str, overrides: list[str]
) -> None:
    """Weights read from the files; samples in packs, and a sample alone."""
    source = vision.made(tmp_path / "source", name, tied=name in ("mistral3", "gemma3", "gemma4"))
    packs = packs_of()
    packs.append(packs[0][:1])
    results = ranks(2).run(packed_losses, recipe_of(source) + overrides, str(source), packs)
    check_losses(results, vision.load(source), packs)


ONLY_WITH_TOWER: dict[str, Case] = {
    "muse_glimmer": Case(
        dict(family="muse_glimmer"),
        losses="one",
        more_losses="pp cp tp tp_whole",
        gradients="tp_cp+selective tp_virtual",
        more_gradients="one tp tp_tiles cp_dp tp_dp pp_dp cp4+selective tp_whole_cp+full",
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return saved_once(tmp_path_factory, {name: case.model for name, case in ONLY_WITH_TOWER.items()})


@pytest.mark.parametrize("name,layout", pairs(ONLY_WITH_TOWER, "losses"))
def test_every_token_of_a_family_with_a_tower_has_the_loss_of_transformers(
    ranks: Ranks, models: Models, name: str, layout: str
) -> None:
    compare_token_losses(ranks, models(name), layout_of(layout), skewed_packs())


@pytest.mark.parametrize("name,layout", pairs(ONLY_WITH_TOWER, "gradients"))
def test_every_gradient_of_a_family_with_a_tower_is_that_of_transformers(
    ranks: Ranks, models: Models, name: str, layout: str
) -> None:
    compare_gradients(ranks, models(name), layout_of(layout), skewed_packs()[:2])
