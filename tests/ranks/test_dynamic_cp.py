"""Packs of different CP sizes in one run: losses and gradients stay the same, and a pack does not influence the next
one.

layouts.py has the dimension `dynamic_cp`, so tests/ranks/test_resume_layouts.py covers the curve and the resume.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from sft.data.packing.cp_grid import Slot
from sft.data.pipeline import check_agreement
from sft.errors import DataError
from sft.mcore.process_groups import check_order
from sft.parallel.context_parallel import local_indices
from tests.builders import answer
from tests.ranks import scenarios
from tests.ranks.layouts import GEMMA, GRADIENT_TOLERANCE, LATENT, LINEAR, LOSS_TOLERANCE, MODELS
from tests.ranks.pool import Ranks, joined

DYNAMIC = ["parallel.cp=4", "parallel.dynamic_cp=true"]
DECAY_TOLERANCE = 3e-5  # for gradients that are sums over all tokens whose terms cancel, see hf_comparison.py


def losses_by_size(overrides: list[str], sizes: Sequence[int], packs: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """-log p(label) of each local token of each pack at each CP size, and the positions of these tokens.

    All groups of one size have the same pack.
    """
    with scenarios.running(overrides) as engine:
        found = []
        for size in sizes:
            of_size = []
            for samples in packs:
                mb = scenarios.microbatch_of(engine, samples, cp_size=size)
                losses = scenarios.local_token_losses(engine, mb)
                assert losses is not None
                where = local_indices(mb.cu_seqlens.numpy(), size, engine.groups.cp_rank % size)
                of_size.append((where, losses.numpy()))
            found.append(of_size)
        return found


@pytest.mark.parametrize(
    "model",
    [[], GEMMA, LINEAR, LATENT, [*MODELS["routers"], "parallel.ep=2"]],
    ids=["dense", "windows", "linear", "latent", "experts"],
)
def test_one_model_runs_packs_of_any_size_in_any_order(ranks: Ranks, model: list[str]) -> None:
    """CP sizes 1, 2, 1, 4, 2: a size that occurs again gives the same bits, and documents do not change the losses of
    their neighbours."""
    a, b, c, other = (answer(n, n, seed=i, last=scenarios.VOCAB) for i, n in enumerate((50, 70, 90, 70), start=1))
    sizes, length = (1, 2, 1, 4, 2), 64 + 96 + 96
    results = ranks(4).run(losses_by_size, [*DYNAMIC, *model], sizes, [[a, b, c], [a, other, c]])
    of_sizes = [[result[i] for result in results] for i in range(len(sizes))]
    losses = np.array([[scenarios.in_pack_order(of_size, k, length) for k in (0, 1)] for of_size in of_sizes])
    assert (losses[0] == losses[2]).all() and (losses[1] == losses[4]).all()
    np.testing.assert_allclose(losses[1:4], losses[:1].repeat(3, 0), rtol=LOSS_TOLERANCE)
    before, after = losses[:, 0], losses[:, 1]
    assert (before[:, :64] == after[:, :64]).all() and (before[:, 160:] == after[:, 160:]).all()
    assert (before[:, 64:133] != after[:, 64:133]).mean() > 0.9


# For each rank, its packs at CP sizes 4, 2 and 1 in one step: ids of scenarios.LENGTHS; the last rank has only filler.
SLOTS = [
    [Slot(4, (0, 1)), Slot(2, (4, 5)), Slot(1, (2,))],
    [Slot(4, (0, 1)), Slot(2, (4, 5)), Slot(1, (3,))],
    [Slot(4, (0, 1)), Slot(2, (8,)), Slot(1, (6, 10))],
    [Slot(4, (0, 1)), Slot(2, (8,)), Slot(1, ())],
]
SAMPLES = [0, 1, 4, 5, 2, 3, 8, 6, 10]


def gradients(overrides: list[str], slots: list[list[Slot]]) -> dict[str, Any]:
    """Gradients of the mean loss over the packs of `slots`, by parameter name; needs tp 1 and pp 1."""
    with scenarios.running(overrides) as engine:
        corpus = scenarios.SkewedCorpus(scenarios.LENGTHS)
        microbatches = [
            scenarios.microbatch_of(engine, [corpus.sample(i) for i in slot.samples], cp_size=slot.cp_size)
            for slot in slots[dist.get_rank()]
        ]
        totals, found = scenarios.backward(engine, microbatches)
        return {
            "gradients": found,
            "loss": totals.objective / totals.num_tokens,
            "counts": (totals.num_tokens, totals.num_real_tokens, totals.num_documents, totals.num_sequences),
            "sequence_nll": totals.sequence_nll,
        }


@pytest.mark.parametrize("model", ["dense", "experts", "linear", "latent"])
def test_gradients_and_counts_are_those_of_one_process(ranks: Ranks, model: str) -> None:
    """One step has packs at CP sizes 1, 2 and 4; it is compared with each document alone."""
    alone = [[Slot(1, (i,)) for i in SAMPLES]]
    plain = [*MODELS[model], "model.init_std=0.2", f"train.global_batch_size={len(SAMPLES)}"]
    (reference,) = ranks(1).run(gradients, plain, alone)
    for result in ranks(4).run(gradients, [*DYNAMIC, *MODELS[model], "model.init_std=0.2"], SLOTS):
        assert result["counts"] == reference["counts"]
        assert result["loss"] == pytest.approx(reference["loss"], rel=LOSS_TOLERANCE)
        assert result["sequence_nll"] == pytest.approx(reference["sequence_nll"], rel=LOSS_TOLERANCE)
        expected = reference["gradients"]
        scenarios.check_parameters(result["gradients"], expected, GRADIENT_TOLERANCE, DECAY_TOLERANCE)


def agreement(grids: list[Any]) -> str | None:
    """The error message of this rank, after the ranks have planned `grids`; None without an error."""
    with joined():
        world = dist.group.WORLD
        assert world is not None
        try:
            check_agreement(grids[dist.get_rank()], 6, world)
        except DataError as error:
            return str(error)
    return None


def test_ranks_that_planned_other_sizes_are_named_before_they_wait_for_each_other(ranks: Ranks) -> None:
    one = [[Slot(2, (0, 1))], [Slot(2, (0, 1))]]
    other = [[Slot(1, (0, 1))], [Slot(1, ())]]
    assert ranks(2).run(agreement, [one, one]) == [None, None]
    message = "rank 1 has planned other packs or CP sizes for step 7 than rank 0, as have 1 of 2 ranks.  The plan"
    assert all(found and found.startswith(message) for found in ranks(2).run(agreement, [one, other]))


def test_groups_made_in_different_orders_are_refused() -> None:
    """Ranks 0 and 1 would make both groups in opposite orders, and each would wait for the other."""
    small, large = [0, 1], [0, 1, 2, 3]
    check_order([[small, large], [small, large], [[2, 3], large], [[2, 3], large]])
    with pytest.raises(RuntimeError, match="ranks 0 and 1 make groups in different orders"):
        check_order([[small, large], [large, small], [[2, 3], large], [[2, 3], large]])


def members_by_size(overrides: list[str]) -> dict[int, list[int]]:
    with scenarios.running(overrides, has_weights=False) as engine:
        groups = [engine.groups.cp_group(size) for size in engine.layout.cp_sizes]
        assert all(g.rank == (g.members.rank() if g.members else 0) for g in groups)
        return {g.size: dist.get_process_group_ranks(g.members) if g.members else [engine.groups.rank] for g in groups}


def test_groups_nest_and_hold_consecutive_ranks(ranks: Ranks) -> None:
    assert ranks(4).run(members_by_size, DYNAMIC) == [
        {1: [0], 2: [0, 1], 4: [0, 1, 2, 3]},
        {1: [1], 2: [0, 1], 4: [0, 1, 2, 3]},
        {1: [2], 2: [2, 3], 4: [0, 1, 2, 3]},
        {1: [3], 2: [2, 3], 4: [0, 1, 2, 3]},
    ]
    with_dp = ranks(4).run(members_by_size, ["parallel.cp=2", "parallel.dynamic_cp=true"])
    assert with_dp == [{1: [0], 2: [0, 1]}, {1: [1], 2: [0, 1]}, {1: [2], 2: [2, 3]}, {1: [3], 2: [2, 3]}]
