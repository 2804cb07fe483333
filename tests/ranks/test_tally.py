"""Every number that is logged, on every layout, against a float64 loop over samples in one process.

The corpus is skewed: each sample is supervised in its last quarter only, so most context-parallel ranks hold
prompt only and one holds nearly all of an answer.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.ranks import scenarios
from tests.ranks.pool import RankPool

EDGES = [16, 64, 128]
EDGE_KEYS = ["log.position_edges=[16, 64, 128]", "loss.entropy=true"]
# The model in fp32: per-token losses are off by 1e-6 between layouts; sums of them less.
TOLERANCE = 1e-6

LAYOUTS = [
    (1, []),
    (2, ["parallel.cp=2"]),
    (2, []),
    (4, ["parallel.cp=4"]),
    (4, ["parallel.cp=2"]),
    (4, []),
    (2, ["parallel.tp=2", "parallel.sequence_parallel=true"]),
    (2, ["parallel.pp=2"]),
    (4, ["parallel.pp=2", "parallel.virtual_stages=2", "parallel.cp=2"]),
]
layouts = pytest.mark.parametrize("world_size, overrides", LAYOUTS, ids=str)

Ranks = Callable[[int], RankPool]


# --- on the ranks ------------------------------------------------------------------------------------------


def evaluated(overrides: list[str], lengths: list[int]) -> dict[str, Any]:
    """Totals of one evaluation over the whole corpus, from random weights, which no layout changes."""
    with scenarios.running([*EDGE_KEYS, *overrides]) as engine:
        loader = scenarios.loader_of(engine, scenarios.SkewedCorpus(lengths))
        batches = [engine.evaluate(mbs, sources=loader.sources) for mbs in loader.eval_batches()]
        totals = sum(batches[1:], start=batches[0])
        return {**vars(totals), "peaks": None}


def by_hand(lengths: list[int]) -> dict[str, Any]:
    """The same from the losses of each sample alone, added up in a loop."""
    corpus = scenarios.SkewedCorpus(lengths)
    nll, positions, sources = [], np.zeros((2, len(EDGES) + 1)), np.zeros((2, 2))
    with scenarios.running(EDGE_KEYS) as engine:
        for i in range(len(corpus)):
            sample = corpus.sample(i)
            losses = engine.token_losses(scenarios.microbatch_of(engine, [sample]))
            assert losses is not None
            own = []
            for place in range(len(sample.tokens) - 1):
                if sample.loss_mask[place + 1]:
                    value = float(losses[place])
                    bucket = sum(place >= edge for edge in EDGES)
                    positions[:, bucket] += value, 1
                    sources[:, i % 2] += value, 1
                    own.append(value)
            nll.append(own)
    means = [math.fsum(own) / len(own) for own in nll if own]
    return {
        "nll": math.fsum(x for own in nll for x in own),
        "num_tokens": sum(len(own) for own in nll),
        "num_real_tokens": sum(lengths),
        "num_documents": len(lengths),
        "sum_of_squares": sum(n * n for n in lengths),
        "sequences": len(means),
        "sequence_nll": math.fsum(means),
        "perplexity": math.fsum(map(math.exp, means)),
        "perplexity_min": math.exp(min(means)),
        "perplexity_max": math.exp(max(means)),
        "by_position": positions,
        "by_source": sources,
    }


# --- put together ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> dict[str, Any]:
    (found,) = ranks(1).run(by_hand, scenarios.LENGTHS)
    return found


def check(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in ("num_tokens", "num_real_tokens", "num_documents", "sum_of_squares"):
        assert found[name] == wanted[name], name
    for name in ("nll", "perplexity_min", "perplexity_max"):
        assert found[name] == pytest.approx(wanted[name], rel=TOLERANCE), name
    assert found["loss"] == pytest.approx(wanted["nll"], rel=TOLERANCE)
    assert found["denominator"] == wanted["num_tokens"]
    for name in ("sequence_nll", "perplexity"):
        assert found[name].count == wanted["sequences"]
        assert found[name].total == pytest.approx(wanted[name], rel=TOLERANCE), name
    for name in ("by_position", "by_source"):
        totals, counts = wanted[name]
        assert [ratio.count for ratio in found[name]] == counts.tolist(), name
        np.testing.assert_allclose([ratio.total for ratio in found[name]], totals, rtol=TOLERANCE)


@layouts
def test_totals_are_those_of_a_loop_over_samples(
    ranks: Ranks, reference: dict[str, Any], world_size: int, overrides: list[str]
) -> None:
    for found in ranks(world_size).run(evaluated, overrides, scenarios.LENGTHS):
        check(found, reference)
        assert reference["perplexity_min"] > 1  # nothing is learnt yet
        assert 0.9 * math.log(301) < found["entropy"] / found["num_tokens"] <= math.log(301)


@pytest.mark.parametrize("world_size, overrides", [(1, []), (4, ["parallel.cp=4"]), (4, ["parallel.cp=2"]), (4, [])])
@pytest.mark.parametrize("batch", [4, 12])
def test_no_sample_is_dropped_or_counted_twice(
    ranks: Ranks, reference: dict[str, Any], world_size: int, overrides: list[str], batch: int
) -> None:
    """Global batches that divide nothing: the last one is filled up with packs of no sample."""
    size = [f"train.global_batch_size={batch}"]
    check(ranks(world_size).run(evaluated, [*overrides, *size], scenarios.LENGTHS)[0], reference)


@pytest.mark.parametrize("overrides", [[], ["parallel.cp=4"]], ids=["dp 4", "cp 4"])
def test_one_sample_on_four_ranks(ranks: Ranks, overrides: list[str]) -> None:
    """An evaluation set smaller than the data-parallel size; a sequence that spans four ranks, with unequal counts."""
    (wanted,) = ranks(1).run(by_hand, [250])
    for found in ranks(4).run(evaluated, overrides, [250]):
        check(found, wanted)
        assert found["perplexity"].count == 1
        assert found["perplexity_min"] == found["perplexity_max"] == pytest.approx(found["perplexity"].total)
