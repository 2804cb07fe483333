"""launch/slurm.sbatch on two machines, each of which resolves its own hostname to 127.0.1.1."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machines import ADDRESSES, CABLES, NAMES, NotPermitted, two_machines
from tests.slurm.cluster import STEPS, TWO_NODES, Cluster, Node, skip_without_slurm, submit, trained


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    skip_without_slurm()
    try:
        with two_machines(tmp_path) as machines:
            nodes = [
                Node(name=name, hostname=name, address=address, words=words)
                for name, address, words in zip(NAMES, ADDRESSES, machines)
            ]
            (tmp_path / "slurm").mkdir()
            running = Cluster(tmp_path / "slurm", nodes)
            yield running
            assert not running.stop()
    except NotPermitted as error:
        pytest.skip(f"two network namespaces cannot be made here: {error}")


def test_a_run_over_two_machines(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, TWO_NODES)
    job.wait("COMPLETED")
    assert trained(job) == list(range(1, STEPS + 1))
    assert f"environment GLOO_SOCKET_IFNAME={CABLES[0]}" in job.told()
