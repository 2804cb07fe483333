"""The elementwise passes of a whole layer move the bytes that the prediction counts.  torch's dispatcher counts them.

The count uses the tensors that operators read and write, and shares no formula with sft/estimate or sft/layers.  On a
GPU, torch compiles some functions, or a library has a kernel for them: each of these counts as one operator
(`ONE_KERNEL`).  Matrix products, the attention kernel and the delta rule do not count.  The bytes of a token in a layer
are a difference of differences: of runs with more tokens, in models with more layers.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.fusions import fused_bias_swiglu
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sft.estimate.layer_work import elementwise_bytes
from sft.mcore.attention import torch_kernel
from sft.mcore.attention.rope import Rotation
from sft.mcore.experts import dispatch, grouped
from sft.mcore.experts import layer as expert_layer
from sft.mcore.linear_attention import torch_kernel as delta_kernel
from sft.mcore.modules import gated_activation, norm
from tests.builders import answer
from tests.ranks import scenarios
from tests.ranks.layouts import GPT_OSS, LATENT, LINEAR, MOE
from tests.ranks.pool import Ranks

ONE_KERNEL: list[tuple[Any, str]] = [
    *((norm, name) for name in ("_forward", "_backward")),
    *((gated_activation, name) for name in ("_forward", "_backward")),
    *((fused_bias_swiglu, name) for name in ("swiglu", "swiglu_back", "weighted_swiglu", "weighted_swiglu_back")),
    (dispatch, "_sums"),
    (Rotation, "_turned"),
]
UNCOUNTED: list[tuple[Any, str]] = [
    *((torch_kernel.TorchKernel, name) for name in ("forward", "backward")),
    *((delta_kernel.TorchDeltaKernel, name) for name in ("transitions", "forward", "state_gradients", "backward")),
]
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul")
VIEWS = ("_unsafe_view", "_reshape_alias", "detach", "alias", "lift_fresh")
EMPTY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
# Operators that touch some rows of their tensors: bytes / bytes of the rows
OF_ROWS = {"index_select": 2, "gather": 2, "index": 2, "index_copy_": 2, "scatter": 2, "index_add_": 3}


def size(x: Tensor) -> int:
    """Bytes in memory: a broadcast dimension counts once."""
    return x.element_size() * int(
        torch.tensor([n for n, stride in zip(x.shape, x.stride()) if stride], dtype=torch.int64).prod()
    ) if x.numel() else 0


class Moved(TorchDispatchMode):
    """Bytes that operators read and write, by pass: `forward`, `backward`, and the forward that backward repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: Counter[str] = Counter()
        self.by_operator: Counter[str] = Counter()
        self.inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if self.inside or func.is_view or name in (*VIEWS, *EMPTY) or name.rstrip("_") in PRODUCTS:
            return result
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        given = {key: value for key, value in (kwargs or {}).items() if key != "out"}
        inputs = [x for x in tree_leaves((args, given)) if isinstance(x, Tensor)]
        if name in OF_ROWS:
            rows = outputs if OF_ROWS[name] == 2 and not name.endswith("_") and name != "scatter" else inputs[-1:]
            self.add(name, OF_ROWS[name] * sum(map(size, rows)))
        else:
            read = inputs[1:] if name in ("copy_", "zero_", "fill_") else inputs
            self.add(name, sum(map(size, (*read, *outputs))))
        return result

    def add(self, name: str, num_bytes: int) -> None:
        is_backward = torch._C._current_autograd_node() is not None
        part = "forward" if not is_backward else "repeated" if torch.is_grad_enabled() else "backward"
        self.num_bytes[part] += num_bytes
        self.by_operator[f"{part} {name}"] += num_bytes

    @contextmanager
    def as_one(self, owner: Any, name: str, counts: bool) -> Iterator[None]:
        """While the function runs, nothing counts; then its arguments and results do, if `counts`."""
        original: Callable[..., Any] = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            self.inside += 1
            try:
                result = original(*args, **kwargs)
            finally:
                self.inside -= 1
            if counts and not self.inside:
                self.add(name, sum(size(x) for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)))
            return result

        with mock.patch.object(owner, name, run):
            yield


def grouped_mm(x: Tensor, other: Tensor, *, offs: Tensor) -> Tensor:
    """torch's grouped product, in a loop."""
    starts = [0, *offs.tolist()]
    pairs = list(zip(starts, starts[1:]))
    if other.ndim == 3:
        return torch.cat([x[a:b] @ matrix for (a, b), matrix in zip(pairs, other)])
    return torch.stack([x[:, a:b] @ other[a:b] for a, b in pairs])


def rows_of(counts: list[int], device: torch.device) -> grouped.RowsOfExperts:
    return grouped.RowsOfExperts(counts, torch.tensor(counts).cumsum(0).to(torch.int32))


def count(overrides: list[str], lengths: list[int]) -> list[tuple[dict[str, int], dict[str, int], Any]]:
    """Bytes of a training step with one document of each of these lengths, and those of the equations for a token."""
    results = []
    with scenarios.running(overrides) as engine, ExitStack() as patches:
        for module in (module for chunk in engine.chunks for module in chunk.modules()):
            if hasattr(module, "config"):
                module.config.bias_activation_fusion = engine.config.model.activation == "swiglu"
        patches.enter_context(mock.patch.object(torch.nn.functional, "grouped_mm", grouped_mm))
        patches.enter_context(mock.patch.object(grouped.RowsOfExperts, "of", rows_of))
        for length in (lengths[0], *lengths):  # the first step also makes the optimizer's states
            moved = Moved()
            microbatch = scenarios.microbatch_of(engine, [answer(length, 16, seed=0, last=scenarios.VOCAB)])
            with ExitStack() as regions:
                for owner, name in ONE_KERNEL:
                    regions.enter_context(moved.as_one(owner, name, True))
                for owner, name in [*UNCOUNTED, (torch.nn.functional, "grouped_mm")]:
                    regions.enter_context(moved.as_one(owner, name, False))
                with moved:
                    engine.train_step([microbatch])
            said = elementwise_bytes(engine.config, engine.layout)
            results.append((dict(moved.num_bytes), dict(moved.by_operator), said))
    return results[1:]
