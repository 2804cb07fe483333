"""Multi-head latent attention beyond test_hf_variants.py: ranks that have all tokens between layers."""

import numpy as np

from tests.ranks import scenarios
from tests.ranks.layouts import LATENT, LOSS_TOLERANCE, NORM_TOLERANCE
from tests.ranks.pool import Ranks


def test_ranks_that_have_all_tokens_sum_the_gradients_of_all_heads(ranks: Ranks) -> None:
    """Without sequence parallelism, which experts need."""
    (plain,) = ranks(1).run(scenarios.train, LATENT, [0, 1])
    for result in ranks(2).run(scenarios.train, [*LATENT, "parallel.tp=2"], [0, 1]):
        np.testing.assert_allclose(result["loss"], plain["loss"], rtol=LOSS_TOLERANCE)
        np.testing.assert_allclose(result["grad_norm"], plain["grad_norm"], rtol=NORM_TOLERANCE)
