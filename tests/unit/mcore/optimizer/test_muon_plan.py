"""Which rank orthogonalises which matrix, what ranks send, and the factor of an update."""

import pytest
import torch
from torch.optim import _muon

from sft.config.muon import MuonConfig
from sft.mcore.optimizer.matrix_plan import MatrixChunk, MatrixName, WholeMatrix, owners, rounds
from sft.mcore.optimizer.muon import factor
from sft.mcore.optimizer.newton_schulz import orthogonalised

CONFIG = MuonConfig()
LEFT, RIGHT = MatrixChunk(0, 0, (4, 3)), MatrixChunk(0, 3, (4, 3))


def matrix(key: str, holders: dict[int, tuple[MatrixChunk, ...]], shape: tuple[int, int] = (4, 6)) -> WholeMatrix:
    return WholeMatrix(name=MatrixName(key, ()), shape=shape, projections=(((0, shape[0]),),), holders=holders)


def test_copies_get_the_update_and_one_of_them_sends_momentum() -> None:
    (planned,) = rounds([matrix("a", {0: (LEFT,), 1: (RIGHT,), 2: (LEFT,), 3: (RIGHT,)})], 4, CONFIG)
    assert {owner: [m.name.key for m in own] for owner, own in planned.matrices.items()} == {0: ["a"]}
    sent = [(t.chunk, t.sender, t.holders) for t in planned.transfers[0]]
    assert sent == [(LEFT, 0, (0, 2)), (RIGHT, 1, (1, 3))]


def test_a_rank_owns_what_it_holds_until_it_has_its_share() -> None:
    whole = (MatrixChunk(0, 0, (4, 6)),)
    held_by_two = [matrix("a", {0: whole}), matrix("b", {1: whole})]
    assert [[m.name.key for m in own] for own in owners(held_by_two, 2, CONFIG)] == [["a"], ["b"]]
    held_by_one = [matrix(key, {1: whole}) for key in "abcd"]
    assert [[m.name.key for m in own] for own in owners(held_by_one, 2, CONFIG)] == [["c", "d"], ["a", "b"]]


def test_rounds_bound_what_an_owner_gathers() -> None:
    whole = (MatrixChunk(0, 0, (4, 6)),)
    planned = rounds([matrix(key, {0: whole}) for key in "abc"], 1, CONFIG, batch=50)
    assert [[m.name.key for m in one.matrices[0]] for one in planned] == [["a", "b"], ["c"]]


def test_chunks_that_leave_a_gap_are_an_error() -> None:
    with pytest.raises(AssertionError):
        rounds([matrix("a", {0: (LEFT,)})], 1, CONFIG)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (8, 2)])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_factors_are_those_of_torch(scale: str, shape: tuple[int, int]) -> None:
    assert factor(scale, *shape) == _muon._adjust_lr(1.0, scale, torch.Size(shape))


def test_singular_values_become_about_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalised(torch.randn(3, 12, 40), 5))
    assert 0.6 < float(values.min()) and float(values.max()) < 1.3
    assert not orthogonalised(torch.zeros(1, 2, 3), 5).any()
