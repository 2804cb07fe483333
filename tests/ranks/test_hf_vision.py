"""The language model of a checkpoint with a vision tower gives text the losses that transformers gives it."""

from pathlib import Path
from typing import Any

import pytest

from sft.batch import Sample
from tests.ranks import scenarios
from tests.ranks.hf_models import PACKS, Reference, check_losses, packed_losses, recipe_of
from tests.ranks.pool import Ranks
from tests.unit.fixtures import vision

CP, EP, TP, PP = ["parallel.cp=2"], ["parallel.ep=2"], ["parallel.tp=2"], ["parallel.pp=2"]
SP = ["parallel.sequence_parallel=true"]


CASES: list[Any] = [
    ("qwen2_vl with flat keys", 2, PP),
    ("qwen2_5_vl with flat keys", 2, TP),
    ("qwen2_5_vl", 2, CP),
    ("qwen3_vl", 2, TP),
    ("qwen3_vl_moe as released", 2, EP),
    ("qwen3_vl_moe as released", 2, [*TP, *SP, *EP]),
    ("qwen3_vl_moe", 2, [*CP, *EP]),
    ("mistral3", 2, PP),
    ("ministral3", 2, CP),
    ("gemma3", 2, PP),
    ("gemma4", 2, EP),
    ("gemma4_unified", 2, CP),
    ("qwen3_5", 2, CP),
    pytest.param("qwen3_5_moe", 2, EP, marks=pytest.mark.grid),
    *(
        pytest.param(name, 2, layout, marks=pytest.mark.grid)
        for name in vision.VISION
        for layout in (CP, [*TP, *SP], PP)
    ),
]


@pytest.mark.parametrize(
    "name,world_size,overrides", CASES, ids=lambda v: " ".join(v) if isinstance(v, list) else str(v)
)
def test_every_token_has_the_loss_that_transformers_gives_it(
    ranks: Ranks, tmp_path: Path, name: str, world_size: int, overrides: list[str]
) -> None:
    """Straight from the files; packed, and a sample alone."""
    source = vision.made(tmp_path / "source", name, tied=name in ("mistral3", "gemma3", "gemma4"))
    corpus = scenarios.SkewedCorpus((200, 37, 64, 5, 90))
    packs: list[list[Sample]] = [[corpus.sample(i) for i in pack] for pack in (*PACKS, (0,))]
    results = ranks(world_size).run(packed_losses, recipe_of(source) + overrides, str(source), packs)
    check_losses(results, Reference(str(source), vision.load(source)), packs)
