"""Tests on the stand-in for CUDA: `make test-standin`.  Elsewhere they are skipped, and say why."""

import tempfile
from collections.abc import Iterator

import pytest

from tests.standin import build


@pytest.fixture(scope="session", autouse=True)
def standin() -> Iterator[None]:
    """Compiled once.  Without torch for CUDA there is nothing to try; without a compiler that is a failure.  What ranks
    share is in a folder that is gone afterwards, however they ended."""
    if not build.has_cuda():
        pytest.skip("torch here is no build for CUDA: run make test-standin")
    build.library()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        patch.setenv("STANDIN_SHARED", shared)
        yield
