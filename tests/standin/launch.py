"""Starts processes on the stand-in, waits for them, and ends all of them."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.standin import build

TIMEOUT_S = 600  # a test takes about a minute on an idle machine; ranks that hang in NCCL report it after 90 s (nccl.c)
PORTABLE, TE = "attention.backend=portable", "attention.backend=te"
HAS_TE = importlib.util.find_spec("transformer_engine") is not None and build.TE.exists()
NEEDS_TE = pytest.mark.skipif(
    not HAS_TE, reason="Transformer Engine is not installed: make test-standin TE_WHEEL=FILE, a wheel for this torch"
)


def start(*words: str, ranks: int = 0, also: Mapping[str, str] = {}) -> "subprocess.Popen[str]":
    """Starts `python -m` with these words, under torchrun if `ranks` is above 0.  also: environment variables"""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks else []
    return subprocess.Popen(
        [sys.executable, "-m", *torchrun, *words],
        cwd=build.ROOT, env={**build.environment(build.library()), **also}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def finish(process: "subprocess.Popen[str]", timeout_s: float = TIMEOUT_S) -> str:
    """The output of the process.  Ends all its processes in every case.  Raises AssertionError at the time limit."""
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired as late:
        said = (late.output or b"").decode(errors="replace")
        raise AssertionError(f"{process.args} took more than {timeout_s} s: {said[-6000:]}") from None
    finally:
        end(process)


def end(process: "subprocess.Popen[str]") -> None:
    """Kills the process.  Its ranks end too, because they end with torchrun (`leave_with_parent`)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def steps(
    case: str, overrides: Sequence[str], *, ranks: int = 1, num_steps: int = 2, also: Mapping[str, str] = {}
) -> list[dict[str, Any]]:
    """The results of each rank of steps.py, in order of ranks.  Raises AssertionError with the output of all ranks.

    num_steps  the first allocates optimizer states and compiles kernels; counters are those of the last
    """
    process = start("tests.standin.steps", case, json.dumps(list(overrides)), str(num_steps), ranks=ranks, also=also)
    said = finish(process)
    found = [json.loads(line) for line in said.splitlines() if line.startswith('{"rank"')]
    assert process.returncode == 0 and len(found) == ranks, said[-6000:]
    return sorted(found, key=lambda one: one["rank"])
