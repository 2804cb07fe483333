"""The delta rule and the convolution of trees on one rank: each text as if it was alone, by both kernels."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sft.mcore.linear_attention.delta_rule import DeltaKernel, Inputs
from sft.mcore.linear_attention.documents import LinearDocuments, linear_attention
from sft.mcore.linear_attention.fla_kernel import FlaKernel
from sft.mcore.linear_attention.short_convolution import short_convolution
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel
from sft.parallel.branches import Branches
from sft.parallel.cp_group import CpGroup
from tests.trees import random_tree, rows_before
from tests.unit.fixtures.recurrence import VALUE_HEADS, K, V, random_inputs, recurrence
from tests.unit.mcore.linear_attention.test_fla_kernel import Replacement

FLOAT64_TOLERANCE = 1e-11  # largest difference to the token by token sums, relative to the largest number
TAPS = 4
ALONE = CpGroup(1, 0, None)


def documents(cu_seqlens: np.ndarray, branches: Branches | None, kernel: DeltaKernel | None = None) -> LinearDocuments:
    options: Any = {"heads": VALUE_HEADS, "num_taps": TAPS, "max_short": 0, "branches": branches}
    return LinearDocuments.of(cu_seqlens, ALONE, torch.device("cpu"), kernel or TorchDeltaKernel(), **options)


def attended(inputs: Inputs, made: LinearDocuments) -> Tensor:
    return linear_attention(inputs, made, lambda rule, inputs: rule(*inputs))


def texts(cu_seqlens: np.ndarray, branches: Branches) -> list[tuple[list[int], int]]:
    """For each document, the rows of its text, and how many of them are before it."""
    rows = [rows_before(cu_seqlens, branches, document) for document in range(len(branches))]
    return [([*x, *range(*cu_seqlens[i : i + 2])], len(x)) for i, x in enumerate(rows)]


class Products(TorchDispatchMode):
    """Counts batched products and additions of rows."""

    count = additions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.bmm.default
        self.additions += func is torch.ops.aten.index_add_.default
        return func(*args, **(kwargs or {}))


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() <= FLOAT64_TOLERANCE * theirs.abs().max()


@pytest.mark.parametrize("kernel", [TorchDeltaKernel(), FlaKernel(Replacement())], ids=["torch", "fla"])
@pytest.mark.parametrize("seed", range(3))
def test_the_rule_of_each_text_is_as_if_it_was_alone(seed: int, kernel: DeltaKernel) -> None:
    """Documents of 1 to 150 tokens, so forks are inside of chunks; `random_tree` puts plain documents between."""
    cu_seqlens, branches = random_tree(seed, multiple=1, longest=150)
    inputs = random_inputs(int(cu_seqlens[-1]))
    found = attended(inputs, documents(cu_seqlens, branches, kernel))
    expected = torch.cat(
        [
            recurrence(Inputs(*(x[rows] for x in inputs)), [0, len(rows)], [None])[0][before:]
            for rows, before in texts(cu_seqlens, branches)
        ]
    )
    grad = random_inputs(len(found), seed=9).v.detach()
    close([found, *torch.autograd.grad(found, inputs, grad)], [expected, *torch.autograd.grad(expected, inputs, grad)])


@pytest.mark.parametrize("seed", range(3))
def test_the_convolution_reads_the_last_tokens_of_a_path(seed: int) -> None:
    """Also over several documents: they have 1 to 5 tokens."""
    cu_seqlens, branches = random_tree(seed, multiple=1, longest=5)
    generator = torch.Generator().manual_seed(seed)
    shapes = [(int(cu_seqlens[-1]), 3), (3, TAPS)]
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    found = short_convolution(*leaves, documents(cu_seqlens, branches).convolution, None)
    expected = []
    for rows, before in texts(cu_seqlens, branches):
        padded = torch.cat((leaves[0].new_zeros(TAPS - 1, 3), leaves[0][rows]))
        z = (padded.unfold(0, TAPS, 1) * leaves[1]).sum(-1)[before:]
        expected.append(z / (1 + torch.exp(-z)))
    whole = torch.cat(expected)
    grad = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    close([found, *torch.autograd.grad(found, leaves, grad)], [whole, *torch.autograd.grad(whole, leaves, grad)])


# A plain document, and a tree: 1 has two branches after 70 tokens, 2 and 4, and 3 continues 2.
LENGTHS, TREE = [100, 150, 80, 40, 70, 100], Branches.of([-1, -1, 1, 2, 1, -1], [0, 0, 70, 70, 70, 0])


@pytest.mark.parametrize("other, seen", [(2, {2, 3}), (4, {4}), (1, {1, 2, 3, 4}), (0, {0})])
def test_a_branch_does_not_know_its_siblings(other: int, seen: set[int]) -> None:
    """Bitwise.  A document changes its outputs and those of its branches, and gradients of these and of its parents."""
    cu_seqlens = np.cumsum([0, *LENGTHS]).astype(np.int32)
    made, results = documents(cu_seqlens, TREE), []
    for changed in (False, True):
        inputs = Inputs(*(x.detach().float() for x in random_inputs(int(cu_seqlens[-1]))))
        grad = random_inputs(len(inputs.v), seed=9).v.detach().float()
        if changed:
            for x in (*inputs, grad):
                x[cu_seqlens[other] : cu_seqlens[other + 1]] = -0.25
        leaves = Inputs(*(x.requires_grad_() for x in inputs))
        out = attended(leaves, made)
        results.append((out, *torch.autograd.grad(out, leaves, grad)))
    by_document = [[x.split(LENGTHS) for x in result] for result in results]
    before = {piece.document for piece in TREE.path(other)}
    for document in range(len(LENGTHS)):
        (out, *gradients), (other_out, *other_gradients) = ([x[document] for x in result] for result in by_document)
        assert torch.equal(out, other_out) == (document not in seen)
        assert all(map(torch.equal, gradients, other_gradients)) == (document not in seen | before)


def test_trees_come_first_and_other_packs_are_as_before() -> None:
    cu_seqlens = np.cumsum([0, *LENGTHS]).astype(np.int32)
    made, plain = documents(cu_seqlens, TREE), documents(cu_seqlens, None)
    assert made.schedule.fragments.lengths.tolist() == [70, 80, 70, 10, 40, 70, 100, 100]
    assert made.schedule.fragments.linked.tolist() == [0, 1, 2, 3, 4, 5] and made.relayout is not None
    assert plain.schedule.fragments.lengths.tolist() == LENGTHS
    assert (plain.passing, plain.relayout, plain.schedule.fragments.linked.tolist()) == (None, None, [])


@pytest.mark.parametrize("kernel", [TorchDeltaKernel(), FlaKernel(Replacement())], ids=["torch", "fla"])
def test_maps_and_states_that_backward_reads_are_saved(kernel: DeltaKernel) -> None:
    """Of a trunk with forks after 10 and 30 tokens, the first with one branch and the second with three.

    Only the second of three fragments of the trunk has a predecessor and a successor.  The seven fragments have three
    states: zero, and those after the first two fragments of the trunk.
    """
    made = documents(np.cumsum([0, 50, 20, 20, 20, 20]), Branches.of([-1, *[0] * 4], [0, 10, 30, 30, 30]), kernel)
    saved = dict[tuple[int, ...], int]()

    def count(x: Tensor) -> Tensor:
        if x.shape[1:2] == (VALUE_HEADS,) and x.dim() == 4:
            saved[x.shape[2:]] = saved.get(x.shape[2:], 0) + len(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        attended(random_inputs(130), made)
    assert saved == {(K, K): 1, (K, V): 3}


def test_launches_do_not_depend_on_the_number_of_branches() -> None:
    """FLA's kernels run once for the linked fragments and once for the others; states take a product for each level."""
    for count in (1, 5, 40):
        functions = Replacement()
        lengths, tree = [30, 20, *[10] * count, 7], Branches.of([-1, -1, *[1] * count, -1], [0, 0, *[13] * count, 0])
        made = documents(np.cumsum([0, *lengths]), tree, FlaKernel(functions))
        inputs = random_inputs(sum(lengths))
        out = attended(inputs, made)
        torch.autograd.grad(out, inputs, out)
        assert functions.calls == {
            **{"norms": 2 * 2 * 2, "sums": 2 * 3, "systems": 2 * 2, "states": 2 * 2, "outputs": 2, "maps": 1},
            **{"gradients of values": 2, "gradients": 2, "gradients of systems": 2, "gradients of norms": 2 * 2},
            "gradients of states": 2 + 1,
        }
        assert made.passing is not None
        maps, offsets = torch.zeros(count + 2, VALUE_HEADS, K, K), torch.zeros(count + 2, VALUE_HEADS, K, V)
        for compose in (made.passing.initial_states, made.passing.final_gradients):
            with Products() as products:
                compose(maps, offsets)
            assert products.count == 1  # two levels
        # The trunk's first fragment has the branches and the rest of the trunk as successors; they are added in pairs.
        assert products.additions == {1: 1, 5: 3, 40: 6}[count]
