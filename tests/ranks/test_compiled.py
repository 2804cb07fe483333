"""torch.compile: no family comes near the number of graphs after which torch runs a function uncompiled."""

from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from sft.mcore.experts import dispatch
from sft.mcore.modules import activation, norm
from tests.ranks import scenarios
from tests.ranks.layouts import MODELS
from tests.ranks.pool import Ranks

COMPILED: dict[ModuleType, tuple[str, ...]] = {
    norm: ("_forward", "_backward"),
    activation: ("_forward", "_backward"),
    dispatch: ("_sums",),
}
LIMIT = 8  # torch._dynamo.config.recompile_limit: beyond it, torch runs the function uncompiled, and only warns


def graphs(overrides: list[str]) -> dict[str, int]:
    """The graphs that an evaluation and three steps compile, by function, as if the CPU were a GPU."""
    assert torch._dynamo.config.recompile_limit == LIMIT
    found: dict[str, int] = {}

    def compiled(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            found[name] = found.get(name, 0) + 1
            return graph.forward

        fast = torch.compile(function, backend=backend)
        # On a GPU, norms without an offset, the last argument, have a kernel of their own.
        return lambda *args: function(*args) if name.startswith("norm") and not args[-1] else fast(*args)

    torch._dynamo.reset()
    with ExitStack() as stack:
        for module, names in COMPILED.items():
            for name in names:
                title = f"{module.__name__.rpartition('.')[2]}.{name}"
                stack.enter_context(mock.patch.object(module, name, compiled(title, getattr(module, name))))
        engine = stack.enter_context(scenarios.running(overrides))
        engine.evaluate(scenarios.loader_of(engine).microbatches(0))
        scenarios.train_steps(engine, range(3))
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize(
    "model, functions",
    [("gemma", 4), ("linear_experts", 3), ("gpt_oss", 3), ("gemma4", 3)],
)
def test_few_graphs(ranks: Ranks, model: str, functions: int) -> None:
    """The families whose norms have offsets, whose activations are not SwiGLU, or that have experts."""
    (found,) = ranks(1).run(graphs, [*MODELS[model], "run.precision=bf16", "train.recompute=selective"])
    assert len(found) == functions and max(found.values()) < LIMIT, found
