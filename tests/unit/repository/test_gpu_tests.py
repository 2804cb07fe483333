"""The kernel tests, which need a GPU, run on a CPU here: so a broken test is found before it runs on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
NUM_FLASH = 12  # kinds of heads, for cp 2 and the mix of many documents; only with the replacement of torch's kernel
NUM_OTHERS = 7 + 8  # kinds of heads for which another document must change nothing; norms


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
