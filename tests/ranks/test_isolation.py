"""Documents never leak: what one document holds changes nothing for its neighbours in the pack."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sft.batch import Sample
from tests.builders import answer
from tests.ranks import scenarios
from tests.ranks.layouts import THREE
from tests.ranks.pool import RankPool

# A document alone is padded and tiled like in a pack, but matrices have other heights: fp32 rounding only.
LOSS_TOLERANCE = 1e-6

LAYOUTS = [
    (1, []),
    (2, ["parallel.cp=2"]),
    (4, ["parallel.cp=4"]),
    (2, ["parallel.tp=2", "parallel.sequence_parallel=true"]),
    (2, ["parallel.pp=2"]),
    (3, ["parallel.pp=3", *THREE]),  # the middle stage sees neither tokens nor loss
    (2, ["parallel.cp=2", "train.recompute=full"]),
]
Ranks = Callable[[int], RankPool]


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
    multiple = 48 if "data.doc_multiple=48" in overrides else 32
    ends = np.cumsum([-(-n // multiple) * multiple for n in (50, 70, 90)])
    total = int(ends[-1])
    before, after = whole(results, 0, total), whole(results, 1, total)
    middle = slice(ends[0], ends[1])
    assert (before[: ends[0]] == after[: ends[0]]).all()
    assert (before[ends[1] :] == after[ends[1] :]).all()
    assert (before[middle][:69] != after[middle][:69]).mean() > 0.9  # the test would see a change


@pytest.mark.parametrize(
    "world_size,overrides", LAYOUTS[:6:2], ids=lambda v: " ".join(v) if isinstance(v, list) else str(v)
)
def test_a_document_does_not_know_where_in_the_pack_it_is(ranks: Ranks, world_size: int, overrides: list[str]) -> None:
    a, b = document(50, 1), document(70, 2)
    results = ranks(world_size).run(scenarios.token_losses, overrides, [[b], [a, b]])
    start = 96 if "data.doc_multiple=48" in overrides else 64
    length = 96  # both multiples round 70 up to it
    alone, second = whole(results, 0, length), whole(results, 1, start + length)[start:]
    np.testing.assert_allclose(second[:69], alone[:69], rtol=LOSS_TOLERANCE)


@pytest.mark.parametrize(
    "world_size,overrides",
    [
        (1, []),
        (2, ["parallel.cp=2"]),
        (2, ["parallel.cp=2", "train.recompute=full"]),
        (1, ["train.recompute=selective"]),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else str(v),
)
def test_no_gradient_reaches_an_unsupervised_neighbour(ranks: Ranks, world_size: int, overrides: list[str]) -> None:
    """Tokens 0-99 occur in unsupervised documents only; their embeddings must get a gradient of exactly 0."""
    for result in ranks(world_size).run(embedding_gradient, overrides):
        assert (result[:100] == 0).all()
        assert (np.abs(result[100:]).sum(axis=1) > 0).mean() > 0.2


def embedding_gradient(overrides: list[str]) -> np.ndarray:
    with scenarios.running(overrides) as engine:
        for chunk in engine.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        pack = [
            document(60, 1, 0, 100, supervised=False),
            document(70, 2, 100, 301),
            document(40, 3, 0, 100, supervised=False),
        ]
        engine._run([scenarios.microbatch_of(engine, pack)], forward_only=False)
        names = dict(engine.chunks[0].named_parameters())
        gradient: np.ndarray = names["module.embedding.word_embeddings.weight"].main_grad.clone().numpy()
        return gradient[: scenarios.VOCAB]
