"""Checkpoints go to Megatron-LM and back: every weight and moment, at another layout, and both continue alike.

Whole tensors are put together here, from what each rank holds in memory, by rules written out below; no checkpoint
code takes part in that.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft.mcore.checkpoint_io import engine_state
from tests.ranks import scenarios
from tests.ranks.interop import (
    BOTH,
    HALF,
    NAME,
    PLAIN,
    PP2,
    SHARDED,
    TP2,
    check,
    held,
    our_load,
    our_save,
    their_load,
    their_save,
    whole,
)
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]


def our_weights(overrides: list[str], folder: str) -> Any:
    with scenarios.running(overrides) as engine:
        engine_state.load_weights(engine, Path(folder) / NAME)
        return held(engine.chunks, engine.optimizer)


OURS = [(1, []), (2, ["parallel.tp=2"]), (2, ["parallel.cp=2"])]


@pytest.mark.parametrize(
    "layout,kind",
    [(TP2, PLAIN), (PP2, HALF), (TP2, SHARDED), ("", BOTH)],
    ids=["tp2", "pp2-bf16", "tp2-distributed", "dp2-bf16-distributed"],
)
def test_what_megatron_saves_we_load(ranks: Ranks, tmp_path: Path, layout: str, kind: Any) -> None:
    flags, overrides = kind
    before = ranks(2).run(their_save, f"{layout} {flags}", str(tmp_path))
    for world_size, ours in OURS:
        check(before, ranks(world_size).run(our_load, [*ours, *overrides], str(tmp_path)))


@pytest.mark.parametrize("kind", [HALF, SHARDED, BOTH], ids=["bf16", "distributed", "bf16-distributed"])
def test_their_weights_alone_start_a_new_run(ranks: Ranks, tmp_path: Path, kind: Any) -> None:
    """Whatever the optimizer here: theirs is not asked for, and its checkpoint has none."""
    precision = HALF[0] if kind is not SHARDED else ""
    before = ranks(2).run(their_save, f"{TP2} {precision} --no-save-optim", str(tmp_path))
    saved = whole([rank[0] for rank in before])
    for world_size, ours in OURS:
        loaded = whole(ranks(world_size).run(our_weights, [*ours, *kind[1]], str(tmp_path)))
        assert loaded["steps"] == {0.0}
        for key in (key for key in saved if key.startswith("weight ")):
            assert np.array_equal(loaded[key], saved[key]), key
            assert np.array_equal(loaded[key.replace("weight", "main", 1)], saved[key]), key  # not of their optimizer


@pytest.mark.parametrize(
    "ours,kind,theirs",
    [
        ((2, ["parallel.tp=2"]), PLAIN, (2, PP2)),
        ((2, ["parallel.cp=2"]), HALF, (2, TP2)),
        ((2, ["parallel.cp=2"]), SHARDED, (2, TP2)),
        ((2, ["parallel.pp=2"]), BOTH, (1, "")),
    ],
    ids=["tp2-to-pp2", "cp2-to-tp2-bf16", "cp2-to-tp2-distributed", "pp2-to-1-bf16-distributed"],
)
def test_what_we_save_megatron_loads(ranks: Ranks, tmp_path: Path, ours: Any, kind: Any, theirs: Any) -> None:
    flags, overrides = kind
    before = ranks(ours[0]).run(our_save, [*ours[1], *overrides], str(tmp_path))
    check(before, ranks(theirs[0]).run(their_load, f"{theirs[1]} {flags}", str(tmp_path)))
