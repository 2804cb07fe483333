"""How often a training step waits for the GPU: a few times a step, and never between its kernels."""

import pytest

from tests.standin import launch
from tests.standin.steps import FREE

CASE = "0.6b:32k:one"
EACH = 3  # waits of a microbatch: objective, log-probabilities, correctness (Engine._supervised_tokens)
STEP = 5  # of a step besides: twice what the objective is divided by, twice tallies, once the norm of the gradient


@pytest.mark.parametrize("way", ["selective", "none", "full", "selective+offload", "selective+tile4k"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_step_waits_a_few_times_and_its_passes_never(microbatches: int, way: str) -> None:
    """Twice over: torch's own guard would raise, and the stand-in counts what that does not see."""
    overrides = [launch.PORTABLE, f"train.global_batch_size={microbatches}"]
    (found,) = launch.steps(f"{CASE}:{way}", overrides, also={FREE: "1"})
    assert found["passes"]["kernels"] > 1000 * microbatches, found
    assert found["passes"]["waits"] == 0, found
    assert found["step"]["waits"] <= STEP + EACH * microbatches, found


TE_WAYS = ("p2p", "all_gather", "a2a")


@pytest.mark.parametrize(
    "way",
    [[launch.PORTABLE], *(pytest.param([launch.TE, f"parallel.cp_comm={w}"], marks=launch.NEEDS_TE) for w in TE_WAYS)],
    ids=" ".join,
)
def test_passes_under_context_parallelism_wait_neither(way: list[str]) -> None:
    overrides = [*way, "parallel.cp=2"]
    for found in launch.steps(CASE, overrides, ranks=2, also={FREE: "1"}):
        assert found["passes"]["waits"] == 0, found
