"""Families with linear attention: token losses and gradients are those of transformers, on every layout.

The models have layers of both kinds, keys and values of unequal width, and two value heads for each key head.
"""

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
SEED = 8  # see `hf.LINEAR`
# Gradients of the decay are sums over all tokens that cancel.  Ours are at most 1.9e-5 from those in float64;
# transformers' own in fp32, with several seeds, 6e-6 to 8e-5.
DECAYS, DECAY_TOLERANCE = (".A_log", ".dt_bias"), 3e-5
TP, CP, PP = ["parallel.tp=2", "parallel.sequence_parallel=true"], ["parallel.cp=2"], ["parallel.pp=2"]
SELECTIVE, FULL = ["train.recompute=selective"], ["train.recompute=full"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "tp_whole": (2, ["parallel.tp=2", *FULL]),  # every rank has all tokens between layers
    "dp": (2, SELECTIVE),
    "pp": (2, PP),
    "cp4": (4, ["parallel.cp=4", *SELECTIVE]),
    # tp x cp = 4 is more than the two key heads.
    "tp_cp": (4, [*TP, *CP]),
    "tp_cp_ep": (4, [*TP, *CP, "parallel.ep=2", *SELECTIVE]),
    "tp_virtual": (4, [*TP, *PP, "parallel.virtual_stages=2", *SELECTIVE]),
}
MODELS: dict[str, dict[str, Any]] = {name: dict(family=name) for name in hf.LINEAR_FAMILIES}


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
            source = hf.save(tmp_path_factory.mktemp("model") / "source", seed=SEED, **MODELS[name])
            made[name] = Model(str(source), hf.load(source).train(), source, recipe_of(source))
        return made[name]

    return get


@pytest.fixture(scope="module")
def packs() -> list[list[Sample]]:
    """Samples supervised in their last quarter only: packed, and each alone."""
    corpus = scenarios.SkewedCorpus((200, 37, 64, 5, 90))
    return [[corpus.sample(i) for i in pack] for pack in (*PACKS, (0,), (3,), (4,))]


CASES = [("qwen3_5_text", "one"), ("qwen3_5_text", "tp_cp"), ("qwen3_next", "one")]
MIXED = [("qwen3_5_text", "tp_whole"), ("qwen3_5_text", "cp4"), ("qwen3_5_text", "tp_virtual")]
MIXED += [("qwen3_next", "tp_cp_ep"), ("qwen3_5_moe_text", "pp")]
DENSE = ("tp_whole", "tp_cp", "tp_virtual")  # experts need sequence parallelism, and here ep
MIXTURES = ("tp_cp_ep",)
GRID = [
    (name, layout)
    for name in MODELS
    for layout in LAYOUTS
    if layout not in (DENSE if name != "qwen3_5_text" else MIXTURES)
]


def in_grid(cases: list[tuple[str, str]]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.grid) for case in GRID if case not in cases]


# A forward pass of one pack cannot fill two virtual stages.
@pytest.mark.parametrize("name,layout", CASES + in_grid([*CASES, ("qwen3_5_text", "tp_virtual")]))
def test_every_token_has_the_loss_that_transformers_gives_it(
    ranks: Ranks, models: Callable[[str], Model], packs: list[list[Sample]], name: str, layout: str
) -> None:
    model, (world_size, overrides) = models(name), LAYOUTS[layout]
    results = ranks(world_size).run(packed_losses, model.recipe + overrides, model.folder, packs)
    check_losses(results, model, packs)


@pytest.mark.parametrize("name,layout", MIXED + in_grid(MIXED))
def test_loss_and_every_gradient_are_those_of_transformers(
    ranks: Ranks, models: Callable[[str], Model], packs: list[list[Sample]], name: str, layout: str
) -> None:
    model, together, (world_size, overrides) = models(name), packs[:2], LAYOUTS[layout]
    reference = in_float64(model.model)
    expected_loss, count = backward(reference, [sample for pack in together for sample in pack])
    results = ranks(world_size).run(chunked_gradients, model.recipe + overrides, model.folder, together)
    for result in results:
        assert result["num_tokens"] == count
        assert result["loss"] == pytest.approx(expected_loss, rel=MEAN_LOSS_TOLERANCE)
    gradients, expected = in_stored_names(model.source, results), stored_gradients(reference)
    for names, tolerance in (
        ({name for name in expected if name.endswith(DECAYS)}, DECAY_TOLERANCE),
        ({name for name in expected if not name.endswith(DECAYS)}, GRADIENT_TOLERANCE),
    ):
        own, theirs = ({name: found[name] for name in found if name in names} for found in (gradients, expected))
        check_parameters(own, theirs, tolerance)
    assert gradients.keys() == expected.keys()
