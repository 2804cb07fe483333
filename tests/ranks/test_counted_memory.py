"""The predicted memory of a step against the bytes that torch's CPU allocator counts, in total and by category."""

from pathlib import Path

import pytest

from sft.hf.families import FAMILIES
from tests.allocations.categories import SAVED, WORKING
from tests.cards import Measured
from tests.ranks import counted_memory
from tests.ranks.hf_models import recipe_of
from tests.ranks.pool import Ranks
from tests.unit.fixtures import families

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


# Families of which less is counted than predicted.  cwm: the first of two layers has the largest working set, and then
# the tensors that the second one saved are free.  laguna: tiles of scores in short windows are narrower.
LESS = ("cwm", "laguna")
OF_FAMILY, OF_LESS = 0.1, 0.2  # bars of |counted / predicted - 1|


@pytest.mark.grid
@pytest.mark.card("memory")
@pytest.mark.parametrize("family", FAMILIES)
def test_counted_bytes_of_the_family_are_predicted(
    ranks: Ranks, measured: Measured, tmp_path: Path, family: str
) -> None:
    """One process without recompute.  Small models have a larger share of tensors that the equations leave out."""
    recipe = [*recipe_of(families.save(tmp_path / "source", family)), "data.seq_length=2048", "train.recompute=none"]
    row = counted_memory.compare(ranks(1), family, [*recipe, "train.global_batch_size=1"])
    bar = OF_LESS if family in LESS else OF_FAMILY
    assert abs(row.ratio - 1) < bar, row.as_json(1 << 20)
    measured(abs(row.ratio - 1), bar)
