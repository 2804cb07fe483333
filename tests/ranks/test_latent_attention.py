"""Multi-head latent attention: token losses and gradients are those of transformers, on every layout."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
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
from tests.unit.fixtures import hf

Ranks = Callable[[int], RankPool]
CP, PP = ["parallel.cp=2"], ["parallel.pp=2"]
TP = ["parallel.tp=2", "parallel.sequence_parallel=true"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "one_selective": (1, ["train.recompute=selective"]),
    "cp": (2, [*CP, "train.recompute=selective"]),
    "tp": (2, TP),
    "ep": (2, ["parallel.ep=2"]),
    "tp_ep": (2, [*TP, "parallel.ep=2"]),
    "cp_ep": (2, [*CP, "parallel.ep=2", "train.recompute=selective"]),
    "pp": (2, PP),
    "dp": (2, ["parallel.distributed_optimizer=true"]),
    "cp4": (4, ["parallel.cp=4"]),
    "tp_cp": (4, [*TP, *CP, "train.recompute=full"]),
    "tp_cp_ep": (4, [*TP, *CP, "parallel.ep=4"]),
    "tp4": (4, ["parallel.tp=4", "parallel.sequence_parallel=true"]),
    "pp_cp": (4, [*PP, *CP, "train.recompute=full"]),
    "tp_pp": (4, [*TP, *PP, "train.recompute=selective"]),
    "dp_cp": (4, CP),
    "dp_tp": (4, TP),
    "dp_pp": (4, PP),
}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek": dict(family="deepseek_v3"),
    "moonlight": dict(family="deepseek_v3", q_lora_rank=None, rms_norm_eps=1e-2, n_group=1, topk_group=1)
    | dict(rope_parameters=dict(rope_type="default", rope_theta=5e4)),
    "flash": dict(family="glm4_moe_lite"),
    # A latent of 84 numbers; keys and values of a rank have 136 with tp 1, and 68 with tp 2.
    "wide": dict(family="deepseek_v3", kv_lora_rank=80, rope_interleave=False, first_k_dense_replace=0),
}


@dataclass(frozen=True)
class Model(Reference):
    """A model of transformers in the folder `source`, and the recipe of its sizes."""

    source: Path
    recipe: list[str]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def get(name: str) -> Model:
        if name not in made:
            source = hf.save(tmp_path_factory.mktemp("model") / "source", **MODELS[name])
            made[name] = Model(str(source), hf.load(source).train(), source, recipe_of(source))
        return made[name]

    return get


@pytest.fixture(scope="module")
def packs() -> list[list[Sample]]:
    """Samples supervised in their last quarter only."""
    corpus = scenarios.SkewedCorpus((200, 37, 64, 5, 90))
    return [[corpus.sample(i) for i in pack] for pack in PACKS]


@pytest.mark.parametrize("name,layout", [("deepseek", "one"), ("moonlight", "cp"), ("wide", "tp_cp")])
def test_every_token_has_the_loss_that_transformers_gives_it(
    ranks: Ranks, models: Callable[[str], Model], packs: list[list[Sample]], name: str, layout: str
) -> None:
    model, (world_size, overrides) = models(name), LAYOUTS[layout]
    results = ranks(world_size).run(packed_losses, model.recipe + overrides, model.folder, packs)
    check_losses(results, model, packs)


CASES = [
    *[("deepseek", layout) for layout in ("one", "cp", "tp", "ep", "tp_cp_ep", "tp_pp")],
    *[("moonlight", layout) for layout in ("one_selective", "tp_ep", "pp", "dp", "pp_cp")],
    *[("wide", layout) for layout in ("tp_cp", "dp_tp")],
    ("flash", "cp_ep"),
]
GRID = [
    (name, layout)
    for name, layouts in {
        "deepseek": ("one_selective", "pp", "dp", "cp4", "tp_cp", "tp4", "dp_cp", "dp_tp", "dp_pp", "cp_ep", "tp_ep"),
        "moonlight": ("one", "cp", "tp", "cp4", "tp4", "tp_cp", "tp_pp", "dp_cp"),
        "flash": ("one", "tp", "cp", "pp", "dp", "ep", "tp_cp_ep"),
        "wide": ("one", "cp", "tp", "tp_pp"),
    }.items()
    for layout in layouts
]


@pytest.mark.parametrize("name,layout", [*CASES, *(pytest.param(*case, marks=pytest.mark.grid) for case in GRID)])
def test_loss_and_every_gradient_are_those_of_transformers(
    ranks: Ranks, models: Callable[[str], Model], packs: list[list[Sample]], name: str, layout: str
) -> None:
    model, (world_size, overrides) = models(name), LAYOUTS[layout]
    reference = in_float64(model.model)
    expected_loss, count = backward(reference, [sample for pack in packs for sample in pack])
    results = ranks(world_size).run(chunked_gradients, model.recipe + overrides, model.folder, packs)
    for result in results:
        assert result["num_tokens"] == count
        assert result["loss"] == pytest.approx(expected_loss, rel=MEAN_LOSS_TOLERANCE)
    check_parameters(in_stored_names(model.source, results), stored_gradients(reference), GRADIENT_TOLERANCE)


def test_ranks_that_have_all_tokens_sum_the_gradients_of_all_heads(ranks: Ranks) -> None:
    """Without sequence parallelism, which experts need."""
    (plain,) = ranks(1).run(scenarios.train, LATENT, [0, 1])
    for result in ranks(2).run(scenarios.train, [*LATENT, "parallel.tp=2"], [0, 1]):
        np.testing.assert_allclose(result["loss"], plain["loss"], rtol=LOSS_TOLERANCE)
        np.testing.assert_allclose(result["grad_norm"], plain["grad_norm"], rtol=NORM_TOLERANCE)
