"""`sft train` and `sft eval` on the ranks of a pool, as torchrun would start them."""

import contextlib
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist

from sft.cli import main
from sft.mcore import process_groups
from tests.launching import TIMED, environments
from tests.ranks import scenarios
from tests.ranks.pool import RankPool


class Result(NamedTuple):
    """The exit code, which is the same on every rank, and what rank 0 printed."""

    code: int
    out: str
    err: str


def sft(pool: RankPool, *words: str, alone: bool = False) -> Result:
    """`sft` with these words on every rank of the pool; or `alone` on one of them, as a process without torchrun."""
    environment = {key: environments(1)[0][key] for key in ("MASTER_ADDR", "MASTER_PORT")}
    results = [result for result in pool.run(_on_rank, words, environment, alone) if result is not None]
    assert len({result.code for result in results}) == 1, results
    return Result(*results[0])


def scored(pool: RankPool, recipe: Path, *words: str, alone: bool = False) -> dict[str, Any]:
    """The content of --json of `sft eval RECIPE` with these words."""
    file = recipe.parent / "scored.json"
    file.unlink(missing_ok=True)
    result = sft(pool, "eval", str(recipe), *words, "--json", str(file), alone=alone)
    assert result.code == 0, result.err
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def untimed(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what depends on the clock."""
    return {key: value for key, value in record.items() if key not in TIMED}


def _on_rank(words: Sequence[str], environment: dict[str, str], alone: bool) -> Result | None:
    out, err = io.StringIO(), io.StringIO()
    if alone and os.environ["RANK"] != "0":
        return None
    try:
        with mock.patch.dict(os.environ, environment), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if alone else ():
                del os.environ[name]
            code = main(words)
    finally:
        if dist.is_initialized():
            process_groups.stop()
    return Result(code, out.getvalue(), err.getvalue())


def gradient_buffers(overrides: Sequence[str], trains: bool) -> tuple[int, bool]:
    """Bytes of core's gradient buffers of an engine, and whether it has an optimizer."""
    with scenarios.running(overrides, trains=trains) as engine:
        buffers = [b for chunk in engine.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return sum(buffer.grad_data.nbytes for buffer in buffers), engine.optimizer is not None
