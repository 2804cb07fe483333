"""Whole models with linear attention on documents of 1 to 2,048 tokens, around chunks of 64, against transformers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ranks import scenarios
from tests.ranks.hf_models import (
    GRADIENT_TOLERANCE,
    MEAN_LOSS_TOLERANCE,
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
CORPUS = scenarios.SkewedCorpus((1, 63, 64, 65, 2047, 2048))
PACKS = [[CORPUS.sample(i) for i in pack] for pack in ([2, 0, 5, 1, 3], [4, 1, 0])]
ALONE = [[CORPUS.sample(i)] for i in range(6)]
# Sums over all tokens that cancel; measured at most 9e-6, and with another seed 3.5e-5, where transformers has 3.1e-5.
DECAYS, DECAY_TOLERANCE = (".A_log", ".dt_bias"), 2e-5


@dataclass(frozen=True)
class Model(Reference):
    """A model of transformers, and the recipe of its sizes."""

    recipe: list[str]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def get(family: str) -> Model:
        if family not in made:
            source = hf.save(tmp_path_factory.mktemp("model") / "source", family, seed=SEED)
            recipe = [*recipe_of(source), "data.seq_length=4096"]
            made[family] = Model(str(source), hf.load(source).train(), recipe)
        return made[family]

    return get


def in_grid(cheap: tuple[str, int] | None) -> list[object]:
    cases = [(family, cp) for family in ("qwen3_5_text", "qwen3_next") for cp in (1, 2, 4)]
    return [pytest.param(*case, marks=[] if case == cheap else pytest.mark.grid) for case in cases]


@pytest.mark.parametrize("family,cp", in_grid(("qwen3_5_text", 2)))
def test_token_losses_of_packs(ranks: Ranks, models: Callable[[str], Model], family: str, cp: int) -> None:
    """With cp 4, the document of one token, padded to 32, travels as tokens; all others pass states."""
    model = models(family)
    results = ranks(cp).run(packed_losses, [*model.recipe, f"parallel.cp={cp}"], model.folder, PACKS)
    check_losses(results, model, PACKS)


@pytest.mark.parametrize("family,cp", in_grid(None))
def test_token_losses_of_documents_alone(ranks: Ranks, models: Callable[[str], Model], family: str, cp: int) -> None:
    model = models(family)
    results = ranks(cp).run(packed_losses, [*model.recipe, f"parallel.cp={cp}"], model.folder, ALONE)
    check_losses(results, model, ALONE)


@pytest.mark.parametrize("family,cp", in_grid(None))
def test_loss_and_every_gradient(ranks: Ranks, models: Callable[[str], Model], family: str, cp: int) -> None:
    model = models(family)
    results = ranks(cp).run(chunked_gradients, [*model.recipe, f"parallel.cp={cp}"], model.folder, PACKS)
    reference = in_float64(model.model)
    expected_loss, count = backward(reference, [sample for pack in PACKS for sample in pack])
    for result in results:
        assert result["num_tokens"] == count
        assert result["loss"] == pytest.approx(expected_loss, rel=MEAN_LOSS_TOLERANCE)
    gradients, expected = in_stored_names(Path(model.folder), results), stored_gradients(reference)
    assert gradients.keys() == expected.keys()
    decays = {name for name in expected if name.endswith(DECAYS)}
    for names, tolerance in ((decays, DECAY_TOLERANCE), (expected.keys() - decays, GRADIENT_TOLERANCE)):
        check_parameters({n: gradients[n] for n in names}, {n: expected[n] for n in names}, tolerance)
