"""Products of adapters in the output of their layer: against dense matrices in float64, and what they move and save."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sft.config.lora import LoraConfig
from sft.layers.adapters import AdaptedWeight, Adapter
from sft.mcore.lora.adapted import AdaptedExperts, AdaptedLinear
from sft.mcore.lora.split import Split

TOKENS, COLUMNS, RANK, SCALE = 24, 6, 2, 1.5
EXACT = 1e-13  # float64, relative to the largest value
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
FREE = {"view", "_unsafe_view", "unsafe_split", "split", "slice", "select", "t", "transpose", "expand", "detach"}


class Base(torch.nn.Module):
    """A frozen linear layer that returns the given function of its output."""

    def __init__(self, rows: int, returned: Any = lambda output: output) -> None:
        super().__init__()
        weight = torch.randn(rows, COLUMNS, dtype=torch.float64)
        self.weight, self.returned = torch.nn.Parameter(weight, requires_grad=False), returned

    def forward(self, x: Tensor, *counts: Any) -> tuple[Tensor, None]:
        self.output = torch.nn.functional.linear(x, self.weight)
        return self.returned(self.output), None


def layer(
    part_rows: tuple[int, ...], groups: int, *parts: tuple[int, ...], experts: int = 0, returned: Any = lambda x: x
) -> Any:
    """A layer with an adapter for each of `parts`, in float64, on one rank."""
    torch.manual_seed(0)
    adapters = tuple(Adapter(name=f"adapter {number}", parts=own) for number, own in enumerate(parts))
    weight = AdaptedWeight(
        module="self_attention.linear_qkv" if not experts else "mlp.experts.linear_fc1", layer=0, num_experts=experts,
        part_rows=part_rows, num_columns=COLUMNS, num_groups=groups, adapters=adapters,
    )  # fmt: skip
    group: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    split = Split(group=group, by_columns=False, sequence_parallel=False, replica=0, experts=range(experts))
    kind: Any = AdaptedExperts if experts else AdaptedLinear
    adapted = kind(Base(sum(part_rows), returned), weight, split, LoraConfig(rank=RANK, alpha=RANK * SCALE))
    for factors in adapted.factors:
        for factor in (factors.a, *factors.b):
            factor.data = torch.randn(factor.shape, dtype=torch.float64)
    return adapted


def rows_of(part_rows: tuple[int, ...], groups: int, part: int) -> list[int]:
    """The rows of a part in the weight, in the part's own order."""
    widths = [rows // groups for rows in part_rows]
    first, whole = sum(widths[:part]), sum(widths)
    return [group * whole + first + row for group in range(groups) for row in range(widths[part])]


def dense(adapted: Any, part_rows: tuple[int, ...], groups: int) -> tuple[Tensor, list[Tensor]]:
    """The weight with its adapters as one matrix, and copies of the factors in their order: a, then its parts of b."""
    matrix, leaves = adapted.base.weight.clone(), []
    for factors in adapted.factors:
        a, *b = (factor.detach().clone().requires_grad_() for factor in (factors.a, *factors.b))
        leaves += [a, *b]
        for part, own in zip(factors.adapter.parts, b):
            matrix = matrix.index_add(0, torch.tensor(rows_of(part_rows, groups, part)), SCALE * own @ a)
    return matrix, leaves


CASES = [
    ((8,), 1, [(0,)]),
    ((8, 8), 1, [(0,), (1,)]),  # gate and up
    ((8, 8), 1, [(1,)]),  # up alone
    ((8, 4, 4), 2, [(0,), (1,), (2,)]),  # q, k and v by head group
    ((8, 4, 4), 2, [(0,), (2,)]),
    ((8, 4, 4), 4, [(0, 1, 2)]),  # one Linear of all three, as in Phi-3
    ((8, 8, 4), 2, [(0, 2), (1,)]),
]


def check_equal(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= EXACT * float(expected.abs().max())


@pytest.mark.parametrize("part_rows, groups, parts", CASES, ids=str)
def test_adapters_are_terms_of_the_weight(part_rows: Any, groups: int, parts: Any) -> None:
    adapted = layer(part_rows, groups, *parts)
    x = torch.randn(TOKENS, 1, COLUMNS, dtype=torch.float64, requires_grad=True)
    output, bias = adapted(x * 1.0)
    assert bias is None
    matrix, leaves = dense(adapted, part_rows, groups)
    other = x.detach().clone().requires_grad_()
    expected = other @ matrix.t()
    check_equal(output.detach(), expected.detach())
    grad = torch.randn_like(output)
    output.backward(grad)
    expected.backward(grad)
    assert x.grad is not None and other.grad is not None
    check_equal(x.grad, other.grad)
    found = [factor for factors in adapted.factors for factor in (factors.a, *factors.b)]
    for factor, leaf in zip(found, leaves, strict=True):
        assert leaf.grad is not None
        check_equal(factor.grad, leaf.grad)


class Moved(TorchDispatchMode):
    """Elements that operators other than matrix products read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if name.rstrip("_") not in PRODUCTS and name not in FREE:
            tensors = [x for y in (*args, result) for x in (y if isinstance(y, list | tuple) else [y])]
            self.elements[name] += sum(x.numel() for x in tensors if isinstance(x, Tensor))
        return result


QKV = ((64, 16, 16), 4, (0,), (1,), (2,))  # 96 rows
GATE_UP = ((64, 64), 1, (0,), (1,))  # 128 rows


@pytest.mark.parametrize(
    "sizes, more, most",
    [
        # 7.7 passes of the output's width before.  Gradients of A x are summed over head groups: 3 x (2 + 4) x 2 x 2.
        (QKV, (), 72),
        (GATE_UP, (), 10),  # 5.4 passes before
        # Grouped products cannot add: each part is added once, 3 x 64; this machine's loop over experts joins rows.
        ((*GATE_UP, 2), ([500, 524],), 780),  # 1,022 before
    ],
)
def test_what_a_token_moves_besides_products(sizes: Any, more: Any, most: float) -> None:
    """Elements that operators other than products read and write, forward and backward.

    Passes as wide as the rank remain.  For Qwen3-8B at rank 16, the passes of the output's width that are gone would
    move 16 bytes x 38,912 rows, or 0.6 MB per token and layer, with recomputation.
    """
    tokens = 1024
    *sizes, experts = (*sizes, 0) if not more else sizes
    adapted = layer(*sizes, experts=experts)
    x = torch.randn(tokens, *([1] * (not more)), COLUMNS, dtype=torch.float64, requires_grad=True)
    with Moved() as moved:
        output, _ = adapted(x, *more)
    grad = torch.ones_like(output)
    with moved:
        output.backward(grad)
    assert sum(moved.elements.values()) <= most * tokens, moved.elements


def test_experts_add_their_products() -> None:
    """Experts with rows 0..9 and 10..23: of each, the weight with its own factors as one matrix."""
    adapted = layer((8, 4), 1, (0,), (1,), experts=2)
    x = torch.randn(TOKENS, COLUMNS, dtype=torch.float64, requires_grad=True)
    output, _ = adapted(x, [10, 14])
    grad = torch.randn_like(output)
    output.backward(grad)
    for number, rows in enumerate((slice(0, 10), slice(10, 24))):
        matrix, other = adapted.base.weight.clone(), x.detach()[rows].requires_grad_()
        for factors, own in zip(adapted.factors, (slice(0, 8), slice(8, 12)), strict=True):
            matrix[own] += SCALE * factors.b[0][number].detach() @ factors.a[number].detach()
        expected = other @ matrix.t()
        check_equal(output[rows].detach(), expected.detach())
        expected.backward(grad[rows])
        assert x.grad is not None and other.grad is not None
        check_equal(x.grad[rows], other.grad)


def test_the_layer_saves_its_input_and_what_the_factors_need() -> None:
    """Before: A x too, and it times the scale; and no tensor of the output's width."""
    adapted, saved = layer(*QKV), dict[int, int]()
    x = torch.randn(TOKENS, 1, COLUMNS, dtype=torch.float64, requires_grad=True)
    own = {p.untyped_storage().data_ptr() for p in (*adapted.parameters(), x)}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        adapted(x)
    inner, joined = TOKENS * 3 * RANK, 3 * RANK * COLUMNS
    assert sum(saved.values()) == 8 * (inner + joined)


def test_an_input_without_gradient_gets_none() -> None:
    """The first layer of a frozen model: the frozen weight is not multiplied in backward."""
    adapted = layer(*QKV)
    seen = []
    adapted.base.register_forward_pre_hook(lambda module, args: seen.append(args[0].requires_grad))
    output, _ = adapted(torch.randn(TOKENS, 1, COLUMNS, dtype=torch.float64))
    assert output.requires_grad and seen == [False]


def test_a_layer_that_saves_its_output_is_found() -> None:
    """tanh needs its output in backward; `added` writes into it."""
    adapted = layer(*QKV, returned=torch.tanh)
    output, _ = adapted(torch.randn(TOKENS, 1, COLUMNS, dtype=torch.float64, requires_grad=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_layer_may_return_a_view() -> None:
    adapted = layer(*GATE_UP, returned=lambda output: output.view_as(output))
    x = torch.randn(TOKENS, 1, COLUMNS, dtype=torch.float64, requires_grad=True)
    output, _ = adapted(x)
    assert output.data_ptr() == adapted.base.output.data_ptr(), "in the memory of the layer's own output"
    output.sum().backward()
    assert x.grad is not None
    matrix, _ = dense(adapted, GATE_UP[0], 1)
    check_equal(x.grad, matrix.detach().sum(0).expand(TOKENS, 1, -1))
