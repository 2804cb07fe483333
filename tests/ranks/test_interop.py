"""Checkpoints go to Megatron-LM and back: every weight and moment agrees, on another layout, and both sides continue
alike.

This file assembles whole tensors from the state that each rank holds in memory, by rules written here; it uses no
checkpoint code for that.
"""

from pathlib import Path

import pytest

from tests.ranks.interop import BOTH, HALF, PP2, TP2, check, our_load, our_save, their_load, their_save
from tests.ranks.layouts import CP, EP, MOE, NUM_EXPERTS, PP, SHARDED, SP, TP
from tests.ranks.megatron_lm import EXPERTS
from tests.ranks.pool import Ranks

EP2 = "--expert-model-parallel-size 2"
FLAG = "--use-distributed-optimizer"
OURS = [(1, []), (2, TP), (2, CP)]


@pytest.mark.parametrize(
    "theirs,ours,num_experts",
    [
        (TP2, OURS, 0),
        (f"{PP2} {HALF[0]}", [(n, [*layout, *HALF[1]]) for n, layout in OURS], 0),
        (f"{TP2} {FLAG}", [(n, [*layout, *SHARDED]) for n, layout in OURS], 0),
        (BOTH[0], [(n, [*layout, *BOTH[1]]) for n, layout in OURS], 0),
        (EP2, [(2, EP), (1, [])], NUM_EXPERTS),
        (f"{EP2} {FLAG}", [(2, [*CP, *EP, *SHARDED])], NUM_EXPERTS),
        (f"{PP2} {FLAG}", [(2, [*SP, *SHARDED])], NUM_EXPERTS),
    ],
    ids=["tp2", "pp2-bf16", "tp2-distributed", "dp2-bf16-distributed", "ep2", "ep2-distributed", "pp2-to-tp2-experts"],
)
def test_what_megatron_saves_we_load(
    ranks: Ranks, tmp_path: Path, theirs: str, ours: list[tuple[int, list[str]]], num_experts: int
) -> None:
    flags, model = (f"{EXPERTS} {theirs}", MOE) if num_experts else (theirs, [])
    before = ranks(2).run(their_save, flags, str(tmp_path))
    for world_size, overrides in ours:
        check(before, ranks(world_size).run(our_load, [*model, *overrides], str(tmp_path)), num_experts)


@pytest.mark.parametrize(
    "ours,theirs,num_experts",
    [
        (TP, (2, PP2), 0),
        ([*CP, *HALF[1]], (2, f"{TP2} {HALF[0]}"), 0),
        ([*CP, *SHARDED], (2, f"{TP2} {FLAG}"), 0),
        ([*PP, *BOTH[1]], (1, BOTH[0]), 0),
        (EP, (2, EP2), NUM_EXPERTS),
        ([*CP, *EP, *SHARDED], (2, f"{EP2} {FLAG}"), NUM_EXPERTS),
        (SP, (1, ""), NUM_EXPERTS),  # our experts have an optimizer of their own, Megatron-LM's only if ep is above 1
        ([*SP, *SHARDED], (2, f"{PP2} {FLAG}"), NUM_EXPERTS),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value),
)
def test_what_we_save_megatron_loads(
    ranks: Ranks, tmp_path: Path, ours: list[str], theirs: tuple[int, str], num_experts: int
) -> None:
    model, (world_size, flags) = MOE if num_experts else [], theirs
    before = ranks(2).run(our_save, [*model, *ours], str(tmp_path))
    after = ranks(world_size).run(their_load, f"{EXPERTS} {flags}" if num_experts else flags, str(tmp_path))
    check(before, after, num_experts)
