"""The tests of GPUs run on a CPU with replaced kernels, so that a broken test is found before it runs on a GPU.

The others, which count memory and waits of a GPU, run on the stand-in (tests/standin/test_runs.py).
"""

from pathlib import Path

import pytest

from tests.mutations.warm_pytest import run_pytest

ROOT = Path(__file__).resolve().parents[3]
ON_STANDIN = "leaves_the_device"
TIMEOUT_S = 1200  # of a file; on an idle machine a file takes 15 s
ONE_OF_MANY = "(many and cp2)"  # mixes of documents and sizes of cp
RUNS = {  # file -> (-k, number of tests that pass)
    # 12 kinds of heads by the replacement of torch's kernel, 12 with branches, 3 by tiles in bf16, 7 that another
    # document must not change, views, the length of another document; 8 norms
    "test_kernels.py": (f"not flash_is_the_tiles or {ONE_OF_MANY}", 12 + 12 + 3 + 7 + 1 + 1 + 8),
    "test_fla.py": ("", 8),
    "test_mamba.py": ("", 3),
    "test_training.py": (f"not {ON_STANDIN}", 15),
}


@pytest.mark.parametrize("file", RUNS)
def test_tests_of_gpus_pass(file: str) -> None:
    chosen, num_passed = RUNS[file]
    words = ["-p", "tests.gpu.on_cpu", "-n0", f"tests/gpu/{file}", *(["-k", chosen] if chosen else [])]
    outcome = run_pytest(ROOT, words, limit_s=TIMEOUT_S)
    assert outcome.passed and f"\n{num_passed} passed" in outcome.output, outcome.failures
