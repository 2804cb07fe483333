"""The predicted memory of a step against the bytes that torch's CPU allocator counts, in total and by category."""

import pytest

from tests.allocations.categories import SAVED, WORKING
from tests.ranks import counted_memory
from tests.ranks.pool import Ranks

QUICK = ("full", "cp")
MOST = 1.10  # bound of counted / predicted total bytes, in a row that misses a bar of `Comparison`
# Categories that may miss their bar.  tp: megatron-core keeps buffers of gathered hidden states, 1 MiB each, which the
# equations leave out.  The same row has 0 to 3 such buffers, depending on what the process ran before.
# With cp, a thread of gloo frees gathered keys when it gets the time; on a busy machine some are counted a layer later.
KNOWN_MISSES = {"tp": {SAVED, WORKING, "total"}, "cp": {SAVED}}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.grid]) for name in counted_memory.ROWS]
)
def test_counted_bytes_are_predicted(ranks: Ranks, name: str) -> None:
    row = counted_memory.measure(ranks(counted_memory.ROWS[name][1]), name)
    missed = {miss.partition(":")[0] for miss in row.misses}
    assert missed <= KNOWN_MISSES.get(name, set()) and row.ratio < MOST, row.as_json(1 << 20)
