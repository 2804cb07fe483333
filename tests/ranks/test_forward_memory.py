"""The predicted memory of forward passes against the bytes that torch's CPU allocator counts."""

from collections.abc import Sequence

import numpy as np
import pytest

from sft.batch import Sample
from sft.estimate.forward import forward_memory
from sft.weights.trained import trained_weights
from tests.allocations.categories import peak
from tests.allocations.recorded import cpu_events
from tests.allocations.standing import standing_bytes
from tests.ranks import scenarios
from tests.ranks.counted_memory import ROWS, SMALL, VOCAB
from tests.ranks.pool import Ranks

# An upper bound, which may exceed the count by this share of what the pass itself allocates.
MOST = 1.0
CASES = ["none", "cp 4, wide", "experts", "Mamba-2", "weights"]


class Questions(scenarios.SkewedCorpus):
    """Samples of which only the last five tokens are supervised."""

    def sample(self, sample_id: int) -> Sample:
        tokens = super().sample(sample_id).tokens
        weights = (np.arange(len(tokens)) >= len(tokens) - 5).astype(np.float32)
        return Sample(sample_id=sample_id, tokens=tokens, weights=weights)


def counted(overrides: Sequence[str]) -> tuple[float, float, float]:
    """Bytes of the state of training, of the peak of a forward pass, and the prediction."""
    recipe = [*SMALL, "train.global_batch_size=1", *overrides]
    with scenarios.running(recipe, VOCAB) as engine:
        config = engine.config
        loader = scenarios.loader_of(engine, Questions([config.data.seq_length] * 8, VOCAB))
        engine.train_step(loader.microbatches(0))
        standing = standing_bytes(engine, "cpu")
        microbatches = loader.microbatches(1)
        found = peak(cpu_events(lambda: engine.measure(microbatches, forward_only=True)), standing)
        trained = trained_weights(config, VOCAB)
        expected = forward_memory(config, engine.layout, VOCAB, trained, config.data.seq_length)
        return sum(standing.values()), found.total, expected


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "none" else [pytest.mark.grid]) for name in CASES]
)
def test_a_forward_pass_needs_at_most_the_predicted_bytes(ranks: Ranks, name: str) -> None:
    overrides, num_ranks = ROWS[name]
    standing, total, expected = max(ranks(num_ranks).run(counted, overrides), key=lambda counts: counts[1])
    assert total <= expected <= total + MOST * (total - standing), (standing, total, expected)
