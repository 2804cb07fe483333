"""Runs `sft` commands on the ranks of a pool, as torchrun would."""

import io
import json
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist

from sft.cli import main
from sft.mcore import process_groups
from tests.launching import environments
from tests.ranks.pool import RankPool


class Result(NamedTuple):
    """The exit code, which is the same on every rank, and the output of rank 0."""

    code: int
    out: str
    err: str


def sft(pool: RankPool, *words: str, alone: bool = False, within: Callable[[], Any] = nullcontext) -> Result:
    """Runs `sft` with the arguments `words` on every rank of the pool; with `alone`, on one rank as a process without
    torchrun.

    within: makes a context in which each rank runs
    """
    environment = {key: environments(1)[0][key] for key in ("MASTER_ADDR", "MASTER_PORT")}
    results = [result for result in pool.run(_on_rank, words, environment, alone, within) if result is not None]
    assert len({result.code for result in results}) == 1, results
    return Result(*results[0])


def scored(pool: RankPool, recipe: Path, *words: str, alone: bool = False) -> dict[str, Any]:
    """The JSON that `sft eval RECIPE` with the arguments `words` writes with --json."""
    file = recipe.parent / "scored.json"
    file.unlink(missing_ok=True)
    result = sft(pool, "eval", str(recipe), *words, "--json", str(file), alone=alone)
    assert result.code == 0, result.err
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def _on_rank(
    words: Sequence[str], environment: dict[str, str], alone: bool, within: Callable[[], Any]
) -> Result | None:
    out, err = io.StringIO(), io.StringIO()
    if alone and os.environ["RANK"] != "0":
        return None
    try:
        with mock.patch.dict(os.environ, environment), redirect_stdout(out), redirect_stderr(err), within():
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if alone else ():
                del os.environ[name]
            code = main(words)
    finally:
        if dist.is_initialized():
            process_groups.stop()
    return Result(code, out.getvalue(), err.getvalue())
