"""The cluster that all tests of this folder share."""

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, missing


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A running SLURM.  Skips where the machine has none and `make test-slurm` could not install it."""
    if absent := missing():
        pytest.skip(f"no SLURM on this machine ({', '.join(absent)}): on Debian, as root, apt install slurm-wlm munge")
    running = Cluster(tmp_path_factory.mktemp("slurm"))
    yield running
    left = running.stop()
    assert not left, f"jobs left processes running: {left}"
