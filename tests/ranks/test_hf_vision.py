"""The language model of a checkpoint with a vision tower has, for text, the token losses of transformers."""

from pathlib import Path
from typing import Any

import pytest

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
