"""Memory that torch's allocator reserves, in the environment that users get, against what it has allocated.

Packs differ in length, so the allocator's blocks do too.  What is reserved and not allocated is lost to a run.
"""

import pytest

from tests.standin import launch

H100_BYTES = 85_029_158_912


@pytest.mark.parametrize(
    "case, packs, num_steps, most",
    [
        # Without expandable segments, the first runs out of memory in its second step, and the second reserves 1.11.
        ("1.7b:84k:longmix:selective", 8, 10, 1.05),
        ("1.7b:64k:longmix:selective", 2, 20, 1.03),
    ],
)
def test_little_is_reserved_beyond_what_is_allocated(case: str, packs: int, num_steps: int, most: float) -> None:
    overrides = [launch.PORTABLE, f"train.global_batch_size={packs}"]
    sized = {"STANDIN_BYTES": str(H100_BYTES)}
    for rank in launch.steps(case, overrides, ranks=2, num_steps=num_steps, also=sized):
        assert rank["reserved_bytes"] <= most * rank["peak_bytes"], rank
