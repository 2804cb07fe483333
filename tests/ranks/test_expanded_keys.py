"""Latent attention of the te backend on a CPU, with a plain attention in place of Transformer Engine's.

Token losses and gradients are those of transformers.  tests/standin runs Transformer Engine's own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sft.batch import Sample
from tests.ranks import scenarios
from tests.ranks.hf_models import (
    GRADIENT_TOLERANCE,
    MEAN_LOSS_TOLERANCE,
    PACKS,
    Reference,
    backward,
    check_losses,
    check_parameters,
    chunked_gradients,
    in_float64,
    in_stored_names,
    packed_losses,
    recipe_of,
    stored_gradients,
)
from tests.ranks.layouts import LATENT, LOSS_TOLERANCE, NORM_TOLERANCE
from tests.ranks.pool import RankPool
from tests.ranks.te_attention import with_plain_attention
from tests.unit.fixtures import hf

Ranks = Callable[[int], RankPool]
CP, PP = ["parallel.cp=2"], ["parallel.pp=2"]
TP = ["parallel.tp=2", "parallel.sequence_parallel=true"]
MODELS: dict[str, dict[str, Any]] = {
    "deepseek": dict(family="deepseek_v3"),
    "moonlight": dict(family="deepseek_v3", q_lora_rank=None, rms_norm_eps=1e-2, n_group=1, topk_group=1)
    | dict(rope_parameters=dict(rope_type="default", rope_theta=5e4)),
}
CASES: list[tuple[str, int, list[str]]] = [
    ("moonlight", 2, [*CP, "train.recompute=selective"]),
    ("deepseek", 4, [*TP, *CP]),
]
GRID: list[tuple[str, int, list[str]]] = [
    ("deepseek", 1, []),
    ("deepseek", 2, [*CP, "train.recompute=full"]),
    ("deepseek", 2, [*TP, "train.recompute=selective"]),
    ("moonlight", 2, ["parallel.distributed_optimizer=true"]),
    ("moonlight", 2, [*TP, "parallel.ep=2"]),
    ("moonlight", 2, PP),
    ("deepseek", 4, ["parallel.cp=4"]),
    ("deepseek", 4, [*PP, *CP, "train.recompute=full"]),
    ("moonlight", 4, [*TP, *PP]),
    ("moonlight", 4, [*TP, *CP, "parallel.ep=4"]),
]


@pytest.fixture(scope="module")
def packs() -> list[list[Sample]]:
    corpus = scenarios.SkewedCorpus((200, 37, 64, 5, 90))
    return [[corpus.sample(i) for i in pack] for pack in PACKS]


@pytest.mark.parametrize(
    "name,world_size,overrides", [*CASES, *(pytest.param(*case, marks=pytest.mark.grid) for case in GRID)], ids=str
)
def test_losses_and_gradients_are_those_of_transformers(
    ranks: Ranks, tmp_path: Path, packs: list[list[Sample]], name: str, world_size: int, overrides: list[str]
) -> None:
    source = hf.save(tmp_path / "source", **MODELS[name])
    model, recipe, pool = hf.load(source).train(), [*recipe_of(source), *overrides], ranks(world_size)
    losses = pool.run(with_plain_attention, packed_losses, recipe, str(source), packs)
    check_losses(losses, Reference(str(source), model), packs)
    reference = in_float64(model)
    expected_loss, count = backward(reference, [sample for pack in packs for sample in pack])
    results = pool.run(with_plain_attention, chunked_gradients, recipe, str(source), packs)
    for result in results:
        assert result["num_tokens"] == count
        assert result["loss"] == pytest.approx(expected_loss, rel=MEAN_LOSS_TOLERANCE)
    check_parameters(in_stored_names(source, results), stored_gradients(reference), GRADIENT_TOLERANCE)


def test_without_sequence_parallelism_gradients_of_all_heads_are_summed(ranks: Ranks) -> None:
    """Which experts need, so transformers' models of this kind cannot show it."""
    (plain,) = ranks(1).run(scenarios.train, LATENT, [0, 1])
    for result in ranks(2).run(with_plain_attention, scenarios.train, [*LATENT, "parallel.tp=2"], [0, 1]):
        assert result["loss"] == pytest.approx(plain["loss"], rel=LOSS_TOLERANCE)
        assert result["grad_norm"] == pytest.approx(plain["grad_norm"], rel=NORM_TOLERANCE)
