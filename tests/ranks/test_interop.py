"""Checkpoints go to Megatron-LM and back: every weight and moment, at another layout, and both continue alike.

Whole tensors are put together here, from what each rank holds in memory, by rules written out below; no checkpoint
code takes part in that.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.interop import BOTH, HALF, PLAIN, PP2, SHARDED, TP2, check, our_load, our_save, their_load, their_save
from tests.ranks.pool import Ranks

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
