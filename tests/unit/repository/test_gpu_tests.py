"""The tests of kernels, which need a GPU, run on a CPU: no GPU will be the first to see that one of them is broken."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
NUM_FLASH = 12  # kinds of heads, for cp 2, on the mix of many documents; by the replacement of torch's kernel alone
NUM_OTHERS = 7 + 8  # kinds of heads that another document must not change; norms


def test_tests_of_kernels_pass() -> None:
    chosen = "(flash_is_the_tiles and many and cp2) or test_another_document or rms_norm"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.gpu.on_cpu"]
        + ["tests/gpu/test_kernels.py", "-k", chosen],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert f"{NUM_FLASH + NUM_OTHERS} passed" in done.stdout, done.stdout[-6000:] + done.stderr
