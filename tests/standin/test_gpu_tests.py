"""Tests of tests/gpu that look at no number: they run here as they are."""

from tests.standin import launch

TESTS = (
    "tests/gpu/test_memory.py::test_bytes_of_a_layer",
    "tests/gpu/test_memory.py::test_an_end_for_want_of_memory_leaves_a_snapshot",
    "tests/gpu/test_training.py::test_a_gpu_is_not_waited_for_within_the_passes",
)
# So that a block is as large as was asked for; else torch counts up to 1 MiB more of it, by what it had cached before.
EXACT = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def test_they_pass() -> None:
    process = launch.start("pytest", "-q", "-p", "no:cacheprovider", *TESTS, also=EXACT)
    said = launch.finish(process)
    passed = 11 if launch.HAS_TE else 6
    assert process.returncode == 0 and f"{passed} passed" in said, said[-6000:]
