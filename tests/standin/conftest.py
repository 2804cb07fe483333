"""Tests on the stand-in for CUDA: `make test-standin`.  Elsewhere they are skipped, and say why."""

import pytest

from tests.standin import build


@pytest.fixture(scope="session", autouse=True)
def standin() -> None:
    """Compiled once.  Without torch for CUDA there is nothing to try; without a compiler that is a failure."""
    if not build.has_cuda():
        pytest.skip("torch here is no build for CUDA: run make test-standin")
    build.library()
