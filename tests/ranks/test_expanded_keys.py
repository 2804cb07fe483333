"""Latent attention of the te backend on a CPU, with a plain attention in place of Transformer Engine's.

Token losses and gradients are those of transformers.  tests/standin runs Transformer Engine's own.
"""

from typing import Any

import pytest

from sft.batch import Sample
from tests.ranks import scenarios
from tests.ranks.hf_comparison import Models, compare_gradients, compare_token_losses, saved_once
from tests.ranks.hf_models import PACKS
from tests.ranks.layouts import LATENT, LOSS_TOLERANCE, NORM_TOLERANCE
from tests.ranks.pool import Ranks
from tests.ranks.te_attention import with_plain_attention

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
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return saved_once(tmp_path_factory, MODELS)


@pytest.fixture(scope="module")
def packs() -> list[list[Sample]]:
    corpus = scenarios.SkewedCorpus((200, 37, 64, 5, 90))
    return [[corpus.sample(i) for i in pack] for pack in PACKS]


@pytest.mark.parametrize(
    "name,world_size,overrides", [*CASES, *(pytest.param(*case, marks=pytest.mark.grid) for case in GRID)], ids=str
)
def test_losses_and_gradients_are_those_of_transformers(
    ranks: Ranks, models: Models, packs: list[list[Sample]], name: str, world_size: int, overrides: list[str]
) -> None:
    layout, around = (world_size, overrides), [with_plain_attention]
    compare_token_losses(ranks, models(name), layout, packs, around)
    compare_gradients(ranks, models(name), layout, packs, around=around)


def test_without_sequence_parallelism_gradients_of_all_heads_are_summed(ranks: Ranks) -> None:
    """Which experts need, so transformers' models of this kind cannot show it."""
    (plain,) = ranks(1).run(scenarios.train, LATENT, [0, 1])
    for result in ranks(2).run(with_plain_attention, scenarios.train, [*LATENT, "parallel.tp=2"], [0, 1]):
        assert result["loss"] == pytest.approx(plain["loss"], rel=LOSS_TOLERANCE)
        assert result["grad_norm"] == pytest.approx(plain["grad_norm"], rel=NORM_TOLERANCE)
