"""The tests of GPUs run on a CPU with replaced kernels, so that a broken test is found before it runs on a GPU.

The others, which count memory and waits of a GPU, run on the stand-in (tests/standin/test_runs.py).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ON_STANDIN = "leaves_the_device"
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
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.gpu.on_cpu"]
        + ["-n0", f"tests/gpu/{file}", "-k", chosen],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    said = done.stdout[-6000:] + done.stderr
    assert done.returncode == 0 and f"\n{num_passed} passed" in done.stdout, said
