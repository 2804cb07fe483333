"""Latent attention beyond test_hf_variants.py: on the te backend, and on ranks that hold all tokens between layers.

On a CPU, the te backend has a plain attention in place of Transformer Engine's.  tests/standin runs that of Transformer
Engine.
"""

from typing import Any

import numpy as np
import pytest

from tests.ranks import scenarios
from tests.ranks.hf_comparison import Models, compare_gradients, compare_token_losses, saved_once
from tests.ranks.hf_models import packs_of
from tests.ranks.layouts import CP, EP, LATENT, LOSS_TOLERANCE, NORM_TOLERANCE, PP, SHARDED, SP, TP
from tests.ranks.pool import Ranks
from tests.ranks.te_attention import with_plain_attention

MODELS: dict[str, dict[str, Any]] = {
    "deepseek": dict(family="deepseek_v3"),
    "moonlight": dict(family="deepseek_v3", q_lora_rank=None, rms_norm_eps=1e-2, n_group=1, topk_group=1)
    | dict(rope_parameters=dict(rope_type="default", rope_theta=5e4)),
}
CASES: list[tuple[str, int, list[str]]] = [
    ("moonlight", 2, [*CP, "train.recompute=selective"]),
    ("deepseek", 4, [*SP, *CP]),
]
GRID: list[tuple[str, int, list[str]]] = [
    ("deepseek", 1, []),
    ("deepseek", 2, [*CP, "train.recompute=full"]),
    ("deepseek", 2, [*SP, "train.recompute=selective"]),
    ("moonlight", 2, SHARDED),
    ("moonlight", 2, [*SP, *EP]),
    ("moonlight", 2, PP),
    ("deepseek", 4, ["parallel.cp=4"]),
    ("deepseek", 4, [*PP, *CP, "train.recompute=full"]),
    ("moonlight", 4, [*SP, *PP]),
    ("moonlight", 4, [*SP, *CP, "parallel.ep=4"]),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return saved_once(tmp_path_factory, MODELS)


@pytest.mark.parametrize(
    "name,world_size,overrides", [*CASES, *(pytest.param(*case, marks=pytest.mark.grid) for case in GRID)], ids=str
)
def test_losses_and_gradients_are_those_of_transformers(
    ranks: Ranks, models: Models, name: str, world_size: int, overrides: list[str]
) -> None:
    layout, around = (world_size, overrides), [with_plain_attention]
    compare_token_losses(ranks, models(name), layout, packs_of(), around)
    compare_gradients(ranks, models(name), layout, packs_of(), around=around)


@pytest.mark.parametrize("around", [[], [with_plain_attention]], ids=["portable", "te"])
def test_ranks_that_have_all_tokens_sum_the_gradients_of_all_heads(ranks: Ranks, around: list[Any]) -> None:
    """This needs a model without sequence parallelism.  Experts need it, so transformers models with latent attention
    cannot cover this case."""
    (plain,) = ranks(1).run(scenarios.train, LATENT, [0, 1])
    for result in ranks(2).run(*around, scenarios.train, [*LATENT, *TP], [0, 1]):
        np.testing.assert_allclose(result["loss"], plain["loss"], rtol=LOSS_TOLERANCE)
        np.testing.assert_allclose(result["grad_norm"], plain["grad_norm"], rtol=NORM_TOLERANCE)
