"""Multi-head latent attention: token losses and gradients are those of transformers, on every layout."""

from collections.abc import Callable
from dataclasses import dataclass
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
    "tp_whole": (2, ["parallel.tp=2"]),  # every rank has all tokens between layers
    "pp": (2, PP),
    "dp": (2, ["parallel.distributed_optimizer=true"]),
    "cp4": (4, ["parallel.cp=4"]),
    "tp_cp": (4, [*TP, *CP, "train.recompute=full"]),
    "tp_whole_cp": (4, ["parallel.tp=2", *CP]),
    "tp4": (4, ["parallel.tp=4", "parallel.sequence_parallel=true"]),
    "pp_cp": (4, [*PP, *CP, "train.recompute=full"]),
    "tp_pp": (4, [*TP, *PP, "train.recompute=selective"]),
    "dp_cp": (4, CP),
    "dp_tp": (4, TP),
    "dp_pp": (4, PP),
}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek": {},
    "moonlight": dict(q_lora_rank=None, rope_parameters=dict(rope_type="default", rope_theta=5e4), rms_norm_eps=1e-2),
    # A latent of 84 numbers; keys and values of a rank have 136 with tp 1, and 68 with tp 2.
    "wide": dict(kv_lora_rank=80, rope_interleave=False),
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
            source = hf.save(tmp_path_factory.mktemp("model") / "source", "deepseek_v3", **MODELS[name])
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
    *[("deepseek", layout) for layout in ("one", "cp", "tp", "tp_cp", "tp_pp")],
    *[("moonlight", layout) for layout in ("one_selective", "tp_whole", "pp", "dp", "pp_cp")],
    *[("wide", layout) for layout in ("tp_cp", "dp_tp")],
]
GRID = [
    (name, layout)
    for name, layouts in {
        "deepseek": ("one_selective", "tp_whole", "pp", "dp", "cp4", "tp_whole_cp", "tp4", "dp_cp", "dp_tp", "dp_pp"),
        "moonlight": ("one", "cp", "tp", "cp4", "tp4", "tp_cp", "tp_pp", "dp_cp"),
        "wide": ("one", "cp", "tp", "tp_whole", "tp_whole_cp", "tp_pp"),
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
