"""Compares models with transformers, on any layout: the loss of every token, and the gradient of every parameter."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from sft.batch import Sample
from tests.ranks.hf_models import (
    GRADIENT_TOLERANCE,
    MEAN_LOSS_TOLERANCE,
    backward,
    check_token_losses,
    chunked_gradients,
    expected_losses,
    in_float64,
    in_stored_names,
    packed_losses,
    recipe_of,
    stored_gradients,
)
from tests.ranks.layouts import CP, EP, PP, SHARDED, SP, TP
from tests.ranks.pool import Ranks
from tests.ranks.scenarios import check_parameters
from tests.unit.fixtures import families, hf, vision

Layout = tuple[int, Sequence[str]]  # number of ranks, overrides of the recipe
# The gradient of the decay of linear attention is a sum over all tokens whose terms cancel.  Our gradients differ by at
# most 1.9e-5 from gradients in float64; those of transformers in fp32, with several seeds, by 6e-6 to 8e-5.
DECAY_TOLERANCE = 3e-5
# `+full` or `+selective` at the end of a layout's name sets recomputation.
LAYOUTS: dict[str, Layout] = {
    "one": (1, []),
    "tp": (2, SP),
    "tp_whole": (2, TP),  # every rank holds all tokens between layers
    "tp_tiles": (2, [*SP, "train.mlp_tile=32"]),
    "cp": (2, CP),
    "pp": (2, PP),
    "ep": (2, EP),
    "dp": (2, []),
    "dp_sharded": (2, SHARDED),
    "tp_ep": (2, [*SP, *EP]),
    "cp_ep": (2, [*CP, *EP]),
    "tp4": (4, ["parallel.tp=4", "parallel.sequence_parallel=true"]),
    "cp4": (4, ["parallel.cp=4"]),
    "cp_dp": (4, CP),
    "tp_dp": (4, SP),
    "pp_dp": (4, PP),
    "tp_cp": (4, [*SP, *CP]),  # more ranks than key heads of linear attention (2)
    "tp_pp": (4, [*SP, *PP]),
    "pp_cp": (4, [*PP, *CP]),
    "tp_whole_cp": (4, [*TP, *CP]),
    "tp_virtual": (4, [*SP, *PP, "parallel.virtual_stages=2"]),
    "tp_cp_ep2": (4, [*SP, *CP, *EP]),
    # With ep 4, no two ranks hold the same expert, so gradients of experts and of the shared expert are summed over
    # different groups.
    "tp_cp_ep": (4, [*SP, *CP, "parallel.ep=4"]),
}


@dataclass(frozen=True)
class Model:
    """A transformers model in the folder `source`, and a recipe with its sizes.

    stored: gives tensors that transformers saves the form that they have in `source`
    """

    source: Path
    model: Any
    recipe: list[str]
    stored: Callable[..., dict[str, torch.Tensor]] = dict

    @cached_property
    def exact(self) -> Any:
        """The model in float64."""
        return in_float64(self.model)


Models = Callable[[str], Model]


def saved_once(factory: pytest.TempPathFactory, table: Mapping[str, Mapping[str, Any]]) -> Models:
    """The models of `table`, which has arguments of `hf.save` or, with a vision tower, of `vision.save` by name.  A
    model is saved when a test first uses it."""

    return cache(lambda name: _saved(factory.mktemp("model") / "source", **table[name]))


def _saved(source: Path, family: str, **fields: Any) -> Model:
    form = form_of(family)
    form.made(source, family, **fields)
    model = form.load(source).train()
    model.get_input_embeddings().padding_idx = None  # transformers gives this row of the embedding no gradient
    stored = vision.transposed_experts if family.endswith("as released") else dict
    return Model(source, model, recipe_of(source), stored)


def form_of(family: str) -> Any:
    """The module that makes and loads models of a family."""
    if family in families.WITHOUT_TYPE:
        return families
    return vision if family.partition(" ")[0] in vision.VISION else hf


def layout_of(text: str) -> Layout:
    """tp+full -> 2 ranks, tp 2 with full recompute"""
    name, _, recompute = text.partition("+")
    world_size, overrides = LAYOUTS[name]
    return world_size, [*overrides, *([f"train.recompute={recompute}"] if recompute else [])]


Around = Sequence[Callable[..., Any]]  # functions that call the function after them with the arguments that they get


def compare_token_losses(
    ranks: Ranks, model: Model, layout: Layout, packs: list[list[Sample]], around: Around = ()
) -> None:
    world_size, overrides = layout
    results = ranks(world_size).run(*around, packed_losses, [*model.recipe, *overrides], str(model.source), packs)
    check_token_losses(results, expected_losses(model.exact, packs), packs)


@dataclass(frozen=True)
class Expected:
    """What transformers computes in float64: the mean loss over the supervised tokens, their number, and gradients."""

    loss: float
    num_tokens: int
    gradients: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, model: Model, texts: Sequence[Sample]) -> "Expected":
        loss, count = backward(model.exact, texts)
        return cls(loss, count, model.stored(stored_gradients(model.exact)))


def check_gradients(
    results: list[Any],
    model: Model,
    expected: Expected,
    decay_tolerance: float = DECAY_TOLERANCE,
    tolerance: float = GRADIENT_TOLERANCE,
) -> float:
    """Checks the results of `chunked_gradients` on all ranks: the mean loss, and each gradient by its norm.  Returns
    the largest difference over a gradient's norm, without decays."""
    for result in results:
        assert result["num_tokens"] == expected.num_tokens
        assert result["loss"] == pytest.approx(expected.loss, rel=MEAN_LOSS_TOLERANCE)
    return check_parameters(in_stored_names(model.source, results), expected.gradients, tolerance, decay_tolerance)


def compare_gradients(
    ranks: Ranks,
    model: Model,
    layout: Layout,
    packs: list[list[Sample]],
    decay_tolerance: float = DECAY_TOLERANCE,
    around: Around = (),
    tolerance: float = GRADIENT_TOLERANCE,
    texts: Sequence[Sample] | None = None,
) -> None:
    """Compares the mean loss over the supervised tokens of all packs, and each gradient.

    texts: what transformers computes, one after the other; None: the samples of all packs
    """
    world_size, overrides = layout
    recipe = [*model.recipe, *overrides]
    results = ranks(world_size).run(*around, chunked_gradients, recipe, str(model.source), packs)
    expected = Expected.of(model, texts or [sample for pack in packs for sample in pack])
    check_gradients(results, model, expected, decay_tolerance, tolerance)
