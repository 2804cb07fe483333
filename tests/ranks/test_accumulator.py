"""Every logged number, on every layout, equals the result of a float64 loop over samples in one process.

The corpus is skewed: only the last quarter of each sample is supervised, so most context-parallel ranks hold only
tokens of prompts, and one rank holds nearly all tokens of an answer.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sft.layers.flops import AttentionCost, TrainFlops
from sft.metrics.accumulator import SupervisedTokens
from tests.ranks import scenarios
from tests.ranks.pool import Ranks

EDGES = [16, 64, 128]
EDGE_KEYS = ["log.position_edges=[16, 64, 128]", "loss.entropy=true"]
# Both sides get the same values: float64 sums of hundreds of terms in another order.
TOLERANCE = 1e-9
CORRECT_ABOVE = -3.0
LENGTHS = scenarios.LENGTHS[:12]  # five packs

LAYOUTS = [
    (1, []),
    (2, ["parallel.cp=2"]),
    (2, []),
    (2, ["parallel.tp=2", "parallel.sequence_parallel=true"]),
    (4, ["parallel.pp=2", "parallel.virtual_stages=2", "parallel.cp=2"]),
]


# --- on the ranks ------------------------------------------------------------------------------------------


def fed(overrides: list[str], lengths: list[int]) -> dict[str, Any]:
    """The totals of one step over the whole corpus; each rank gets values for the tokens that it holds."""
    with scenarios.running([*EDGE_KEYS, "train.global_batch_size=16", *overrides]) as engine:
        loader = scenarios.loader_of(engine, scenarios.SkewedCorpus(lengths))
        microbatches = loader.microbatches(0)
        flops, tokens = TrainFlops(1.0, 0.0, AttentionCost(1.0)), []
        accumulator = replace(engine._accumulator(loader.sources), flops=flops)
        for mb in microbatches if engine.groups.reports else []:
            rows = np.flatnonzero(mb.loss_weights.numpy())
            samples = np.array([*mb.sample_ids, -1])[np.minimum(mb.documents.numpy().ravel()[rows], len(mb.sample_ids))]
            logprob, entropy = values(samples, mb.position_ids.numpy().ravel()[rows])
            tokens.append(
                SupervisedTokens(
                    objective=-float(logprob.sum()),
                    denominator=len(rows),
                    nll=-logprob,
                    entropy=entropy,
                    correct=logprob > CORRECT_ABOVE,
                    num_rows=len(rows),
                    buckets=accumulator.buckets(mb),
                )
            )
        return vars(accumulator.totals(microbatches, tokens))


def values(sample: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A log-probability in [-8, 0] and an entropy in [0, 5] for any token; they do not depend on the rank."""
    return -4.0 - 4.0 * np.sin(12.9898 * sample + 78.233 * position), 2.5 + 2.5 * np.cos(3.7 * sample + position)


def fed_by_hand(lengths: list[int]) -> dict[str, Any]:
    """The same totals in Python floats, token after token."""
    nll, entropies, correct = [], [], 0
    positions, sources = np.zeros((2, len(EDGES) + 1)), np.zeros((2, 2))
    for i, length in enumerate(lengths):
        own = []
        for place in range(length - 1):
            if place + 1 >= 0.75 * length:
                logprob = -4.0 - 4.0 * math.sin(12.9898 * i + 78.233 * place)
                entropies.append(2.5 + 2.5 * math.cos(3.7 * i + place))
                correct += logprob > CORRECT_ABOVE
                positions[:, sum(place >= edge for edge in EDGES)] += -logprob, 1
                sources[:, i % 2] += -logprob, 1
                own.append(-logprob)
        nll.append(own)
    means = [math.fsum(own) / len(own) for own in nll if own]
    return {
        "nll": math.fsum(x for own in nll for x in own),
        "num_tokens": sum(len(own) for own in nll),
        "num_real_tokens": sum(lengths),
        "num_documents": len(lengths),
        "attention_flops": float(sum(n * n for n in lengths)),
        "sequences": len(means),
        "sequence_nll": math.fsum(means),
        "perplexity": math.fsum(map(math.exp, means)),
        "perplexity_min": math.exp(min(means)),
        "perplexity_max": math.exp(max(means)),
        "entropy": math.fsum(entropies),
        "num_correct": correct,
        "by_position": positions,
        "by_source": sources,
    }


# --- put together ------------------------------------------------------------------------------------------


def check(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in ("num_tokens", "num_real_tokens", "num_documents", "attention_flops", "num_correct"):
        assert found[name] == wanted[name], name
    for name in ("nll", "perplexity", "perplexity_min", "perplexity_max", "sequence_nll", "entropy"):
        assert found[name] == pytest.approx(wanted[name], rel=TOLERANCE), name
    assert found["objective"] == pytest.approx(wanted["nll"], rel=TOLERANCE)
    assert found["denominator"] == wanted["num_tokens"]
    assert found["num_sequences"] == wanted["sequences"]
    for name in ("by_position", "by_source"):
        totals, counts = wanted[name]
        assert list(found[f"num_tokens_{name}"].values()) == counts.tolist(), name
        np.testing.assert_allclose(list(found[f"nll_{name}"].values()), totals, rtol=TOLERANCE)


@pytest.mark.parametrize("world_size, overrides", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param(LENGTHS, id="many"),
        # Only the first sample reaches the last bucket; the second file has one sample, on one rank, and a few of its
        # tokens.
        pytest.param([256, 40, 30, 1, 64], id="a bucket and a file on one rank"),
        pytest.param([2, 3, 5, 4], id="most ranks have nothing to say"),
    ],
)
def test_fed_the_same_values_every_number_is_the_same(
    ranks: Ranks, world_size: int, overrides: list[str], lengths: list[int]
) -> None:
    wanted = fed_by_hand(lengths)
    for found in ranks(world_size).run(fed, overrides, lengths):
        check(found, wanted)
