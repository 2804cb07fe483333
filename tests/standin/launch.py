"""Processes on the stand-in: started by torchrun, waited for, and all ended."""

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

TIMEOUT_S = 240  # nothing here takes a minute, and ranks that wait in vain for each other say so after 90 s (nccl.c)
PORTABLE, TE = "attention.backend=portable", "attention.backend=te"
HAS_TE = importlib.util.find_spec("transformer_engine") is not None and build.TE.exists()
NEEDS_TE = pytest.mark.skipif(
    not HAS_TE, reason="Transformer Engine is not installed here; its part for torch is built from source"
)


def start(*words: str, ranks: int = 0, also: Mapping[str, str] = {}) -> "subprocess.Popen[str]":
    """`python -m` what the words say, by torchrun where `ranks` says how many.  also: of its environment."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks else []
    return subprocess.Popen(
        [sys.executable, "-m", *torchrun, *words],
        cwd=build.ROOT, env={**build.environment(build.library()), **also}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def finish(process: "subprocess.Popen[str]", timeout_s: float = TIMEOUT_S) -> str:
    """What it said.  Nothing of it is left, however this ends.  Raises AssertionError where it takes too long."""
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired as late:
        said = (late.output or b"").decode(errors="replace")
        raise AssertionError(f"{process.args} took more than {timeout_s} s: {said[-6000:]}") from None
    finally:
        end(process)


def end(process: "subprocess.Popen[str]") -> None:
    """Of its ranks, too: they leave with torchrun (`leave_with_parent`)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def steps(case: str, overrides: Sequence[str], *, ranks: int = 1, also: Mapping[str, str] = {}) -> list[dict[str, Any]]:
    """What each rank of steps.py found, in order of rank.  Raises AssertionError with all they said."""
    process = start("tests.standin.steps", case, json.dumps(list(overrides)), ranks=ranks, also=also)
    said = finish(process)
    found = [json.loads(line) for line in said.splitlines() if line.startswith('{"rank"')]
    assert process.returncode == 0 and len(found) == ranks, said[-6000:]
    return sorted(found, key=lambda one: one["rank"])
