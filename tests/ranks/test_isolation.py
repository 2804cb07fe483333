"""Documents never leak: what one document holds changes nothing for its neighbours in the pack."""

from typing import Any

import numpy as np
import pytest

from sft.batch import Sample
from tests.builders import answer
from tests.ranks import scenarios
from tests.ranks.layouts import GEMMA, LATENT, LINEAR, MODELS, WINDOWS
from tests.ranks.pool import Ranks

# A document alone is padded and tiled like in a pack, but matrices have other heights: fp32 rounding only.
LOSS_TOLERANCE = 1e-6

# Layers 1, 2 and 4 have windows and a rotary base of their own; layer 3 has no rotary positions.
KINDS = [
    "model.rope={window_base: 1e3, skip_layers: [3]}",
    "model.attention_sinks=true",
    "model.attention_softcap=5",
    "model.logits_softcap=10",
    "model.init_std=0.3",  # sinks are drawn with it
]
LAYOUTS = [
    (1, []),
    (2, ["parallel.tp=2", "parallel.sequence_parallel=true"]),
    (4, ["parallel.cp=4"]),
    (4, ["parallel.pp=4"]),  # the middle stages see neither tokens nor loss
    (2, ["parallel.cp=2", "train.recompute=full"]),
    (4, ["parallel.cp=4", *WINDOWS]),  # whose halos begin where the document begins
    (4, ["parallel.cp=2", "parallel.pp=2", *WINDOWS, "train.recompute=selective"]),
    (4, ["parallel.cp=2", "parallel.tp=2", *GEMMA, "train.recompute=selective"]),
    (4, ["parallel.cp=4", *WINDOWS, *KINDS]),
    (4, ["parallel.cp=2", "parallel.tp=2", "parallel.sequence_parallel=true", *MODELS["gemma4"], "parallel.ep=2"]),
    (4, ["parallel.cp=4", *LINEAR]),  # documents of 64 and 96 tokens are long
    (4, ["parallel.cp=4", *LINEAR, "run.precision=bf16"]),  # the first is short
    (4, ["parallel.cp=2", "parallel.pp=2", *LINEAR, "train.recompute=selective"]),
    (4, ["parallel.cp=2", "parallel.tp=2", "parallel.sequence_parallel=true", *LATENT]),
    (4, ["parallel.cp=4", *LATENT, "run.precision=bf16", "train.recompute=full"]),
    (4, ["parallel.cp=2", "parallel.tp=2", "parallel.sequence_parallel=true", *MODELS["routers"], "parallel.ep=2"]),
]


def document(length: int, seed: int, first: int = 0, last: int = scenarios.VOCAB, supervised: bool = True) -> Sample:
    return answer(length, length * supervised, seed=seed, first=first, last=last)


def whole(results: list[Any], pack: int, length: int) -> np.ndarray:
    """Per-token losses of a pack, put back into pack order from the ranks that have them."""
    losses = np.full(length, np.nan, dtype=np.float32)
    for result in results:
        if result[pack] is not None:
            where, values = result[pack]
            losses[where] = values
    assert not np.isnan(losses).any()
    return losses


@pytest.mark.parametrize("world_size,overrides", LAYOUTS, ids=lambda v: " ".join(v) if isinstance(v, list) else str(v))
def test_replacing_one_document_leaves_the_others_bitwise_unchanged(
    ranks: Ranks, world_size: int, overrides: list[str]
) -> None:
    a, b, c, other = document(50, 1), document(70, 2), document(90, 3), document(70, 4)
    results = ranks(world_size).run(scenarios.token_losses, overrides, [[a, b, c], [a, other, c]])
    before, after = whole(results, 0, 64 + 96 + 96), whole(results, 1, 64 + 96 + 96)
    assert (before[:64] == after[:64]).all()
    assert (before[160:] == after[160:]).all()
    assert (before[64:133] != after[64:133]).mean() > 0.9  # the test would see a change


@pytest.mark.parametrize(
    "world_size,overrides", LAYOUTS[:3], ids=lambda v: " ".join(v) if isinstance(v, list) else str(v)
)
def test_a_document_does_not_know_where_in_the_pack_it_is(ranks: Ranks, world_size: int, overrides: list[str]) -> None:
    a, b = document(50, 1), document(70, 2)
    results = ranks(world_size).run(scenarios.token_losses, overrides, [[b], [a, b]])
    alone, second = whole(results, 0, 96), whole(results, 1, 64 + 96)[64:]
    np.testing.assert_allclose(second[:69], alone[:69], rtol=LOSS_TOLERANCE)
