"""Few of the thread blocks that torch's flash kernel starts have nothing to compute."""

import json

import pytest

from tests.standin import launch


@pytest.mark.parametrize("rank", [0, 7])
def test_one_long_document_beside_512_short_ones(rank: int) -> None:
    """With classes of lengths, 99% of the blocks have tokens; in one call, 0.7 and 1.1%."""
    words = [str(length) for length in [128] * 200 + [65536] + [128] * 312]
    process = launch.start("tests.standin.grids", str(rank), *words)
    said = launch.finish(process)
    assert process.returncode == 0, said[-6000:]
    found = json.loads(said.splitlines()[-1])
    print(found)
    assert found["work"] >= 0.8 * found["started"] and found["work"] < 0.02 * found["one"], found
