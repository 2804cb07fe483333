"""Checkpoints of a mixture of experts go to Megatron-LM and back: every weight and moment, and both continue alike."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks import megatron_lm
from tests.ranks.interop import LR, PP2, assert_same, our_load, our_save, their_load, their_save, whole
from tests.ranks.layouts import MOE, NUM_EXPERTS
from tests.ranks.megatron_lm import LAYERS
from tests.ranks.pool import Ranks

# Embedding, output, final norm; per layer four norms, qkv and its bias, proj, router, and fc1 and fc2 of each expert.
NUM_PARAMETERS = 3 + LAYERS * (8 + 2 * NUM_EXPERTS)
EP2, SHARDED = "--expert-model-parallel-size 2", "--use-distributed-optimizer"
OURS_SHARDED = ["parallel.distributed_optimizer=true"]
TP2 = ["parallel.tp=2", "parallel.sequence_parallel=true"]


def check(before: list[tuple[Any, Any]], after: list[tuple[Any, Any]]) -> None:
    """Loaded is what was saved, and the next update leads to the same place."""
    saved, then = (whole([rank[i] for rank in before], NUM_PARAMETERS) for i in (0, 1))
    loaded, later = (whole([rank[i] for rank in after], NUM_PARAMETERS) for i in (0, 1))
    assert len(saved) == 4 * NUM_PARAMETERS + 1
    assert saved["steps"] == {2.0} and then["steps"] == {3.0}
    experts = [f"mlp.experts.local_experts.{number}.linear_fc2.weight" for number in range(NUM_EXPERTS)]
    for kind in ("weight", "main", "exp_avg", "exp_avg_sq"):  # or the rest would say little
        for name in ("mlp.router.weight", "pre_mlp_layernorm.weight", *experts):
            key = f"{kind} decoder.layers.3.{name}"
            assert saved[key].all() and not np.array_equal(saved[key], then[key])
    assert_same(loaded, saved)
    assert_same(later, then)
    for rank, _ in [*before, *after]:
        assert rank["lr"] == pytest.approx([LR] * len(rank["lr"])) and set(rank["weight_decay"]) == {0.1, 0.0}


@pytest.mark.parametrize(
    "theirs,world_size,ours",
    [
        (EP2, 2, ["parallel.ep=2"]),
        (EP2, 1, []),
        (f"{EP2} {SHARDED}", 2, ["parallel.cp=2", "parallel.ep=2", *OURS_SHARDED]),
        (f"{PP2} {SHARDED}", 2, [*TP2, *OURS_SHARDED]),
    ],
    ids=["ep2-to-ep2", "ep2-to-1", "ep2-to-cp2-ep2-distributed", "pp2-to-tp2-distributed"],
)
def test_what_megatron_saves_we_load(
    ranks: Ranks, tmp_path: Path, theirs: str, world_size: int, ours: list[str]
) -> None:
    before = ranks(2).run(their_save, f"{megatron_lm.EXPERTS} {theirs}", str(tmp_path))
    check(before, ranks(world_size).run(our_load, [*MOE, *ours], str(tmp_path)))


@pytest.mark.parametrize(
    "ours,theirs",
    [
        ((2, ["parallel.ep=2"]), (2, EP2)),
        ((2, ["parallel.cp=2", "parallel.ep=2", *OURS_SHARDED]), (2, f"{EP2} {SHARDED}")),
        ((2, TP2), (1, "")),  # ours has an optimizer of its own for experts there, theirs only where ep is above 1
        ((2, [*TP2, *OURS_SHARDED]), (2, f"{PP2} {SHARDED}")),
    ],
    ids=["ep2", "cp2-ep2-distributed", "tp2-to-1", "tp2-to-pp2-distributed"],
)
def test_what_we_save_megatron_loads(ranks: Ranks, tmp_path: Path, ours: Any, theirs: Any) -> None:
    before = ranks(ours[0]).run(our_save, [*MOE, *ours[1]], str(tmp_path))
    check(before, ranks(theirs[0]).run(their_load, f"{megatron_lm.EXPERTS} {theirs[1]}", str(tmp_path)))
