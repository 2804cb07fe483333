"""The two comparisons of a model with transformers: the loss of every token, and the gradient of every parameter."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
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
from tests.ranks.pool import Ranks
from tests.unit.fixtures import hf

Layout = tuple[int, Sequence[str]]  # number of ranks, overrides of the recipe
# Gradients of the decay of linear attention are sums over all tokens that cancel.  Ours are at most 1.9e-5 from those
# in float64; transformers' own in fp32, with several seeds, 6e-6 to 8e-5.
DECAYS, DECAY_TOLERANCE = (".A_log", ".dt_bias"), 3e-5


@dataclass(frozen=True)
class Model(Reference):
    """A model of transformers in the folder `source`, and the recipe of its sizes."""

    source: Path
    recipe: list[str]


Models = Callable[[str], Model]


def saved_once(factory: pytest.TempPathFactory, table: Mapping[str, Mapping[str, Any]]) -> Models:
    """The models of `table`, which holds arguments of `hf.save` by name.  Each is made when a test first names it."""

    @cache
    def get(name: str) -> Model:
        source = hf.save(factory.mktemp("model") / "source", **table[name])
        return Model(str(source), hf.load(source).train(), source, recipe_of(source))

    return get


def skewed_packs() -> list[list[Sample]]:
    """Samples supervised in their last quarter only: packed, and each alone."""
    corpus = scenarios.SkewedCorpus((200, 37, 64, 5, 90))
    return [[corpus.sample(i) for i in pack] for pack in (*PACKS, (0,), (1,), (2,), (3,), (4,))]


Around = Sequence[Callable[..., Any]]  # functions that call the function after them, with what it gets


def compare_token_losses(
    ranks: Ranks, model: Model, layout: Layout, packs: list[list[Sample]], around: Around = ()
) -> None:
    world_size, overrides = layout
    results = ranks(world_size).run(*around, packed_losses, [*model.recipe, *overrides], model.folder, packs)
    check_losses(results, model, packs)


def compare_gradients(
    ranks: Ranks,
    model: Model,
    layout: Layout,
    packs: list[list[Sample]],
    decay_tolerance: float = DECAY_TOLERANCE,
    around: Around = (),
) -> None:
    """The mean loss over the supervised tokens of all packs, and its gradients, each of its norm."""
    world_size, overrides = layout
    reference = in_float64(model.model)
    expected_loss, count = backward(reference, [sample for pack in packs for sample in pack])
    results = ranks(world_size).run(*around, chunked_gradients, [*model.recipe, *overrides], model.folder, packs)
    for result in results:
        assert result["num_tokens"] == count
        assert result["loss"] == pytest.approx(expected_loss, rel=MEAN_LOSS_TOLERANCE)
    gradients, expected = in_stored_names(model.source, results), stored_gradients(reference)
    assert gradients.keys() == expected.keys()
    decays = {name for name in expected if name.endswith(DECAYS)}
    for names, tolerance in ((decays, decay_tolerance), (expected.keys() - decays, GRADIENT_TOLERANCE)):
        check_parameters({n: gradients[n] for n in names}, {n: expected[n] for n in names}, tolerance)
