"""Tests on the stand-in for CUDA: `make test-standin`.  In other environments they are skipped with a reason."""

import tempfile
from collections.abc import Iterator

import pytest

from tests.standin import build


@pytest.fixture(scope="session", autouse=True)
def standin() -> Iterator[None]:
    """Compiles the stand-in once.  Skips the tests without torch for CUDA, and fails without a compiler.  Ranks share
    files in a temporary folder, which is removed at the end, also after a failure."""
    if not build.has_cuda():
        pytest.skip("the installed torch is not built for CUDA: run make test-standin")
    build.library()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        patch.setenv("STANDIN_SHARED", shared)
        yield
