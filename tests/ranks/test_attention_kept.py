"""train.recompute = attention_kept: every kernel of attention runs once forward and once backward for a layer."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from sft.mcore.attention.torch_kernel import TorchKernel
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel
from tests.ranks import mtp_models, scenarios
from tests.ranks.layouts import MODELS, PP
from tests.ranks.pool import Ranks

LAYERS, MICROBATCHES = 4, 2
PACKS = [[1, 2, 3, 5], [0]]


def counted(calls: Counter[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    return call


def kernel_calls(overrides: list[str]) -> dict[str, int]:
    """The calls of kernels in a forward and a backward pass of two microbatches, by kernel and direction."""
    calls: Counter[str] = Counter()
    kernels = {"softmax": TorchKernel, "delta rule": TorchDeltaKernel}
    with ExitStack() as stack:
        for name, kernel in kernels.items():
            for direction in ("forward", "backward"):
                wrapped = counted(calls, f"{name} {direction}", getattr(kernel, direction))
                stack.enter_context(mock.patch.object(kernel, direction, wrapped))
        engine = stack.enter_context(scenarios.running([*overrides, "train.global_batch_size=2"]))
        corpus = scenarios.SkewedCorpus(scenarios.LENGTHS)
        microbatches = [scenarios.microbatch_of(engine, [corpus.sample(i) for i in ids]) for ids in PACKS]
        scenarios.backward(engine, microbatches)
    return dict(calls)


# Calls in a layer with softmax attention: with cp, keys are gathered for one head group after the other, or for windows
# of all heads at once.  Latent attention always expands keys in groups.  The calls of all layers of a model follow.
GROUPS = 4
CASES = [
    *((model, 1, LAYERS, 0) for model in ("dense", "experts", "gemma", "gemma4", "gpt_oss", "routers")),
    *((model, 1, 1, 3) for model in ("linear", "linear_experts")),
    *(("latent", cp, LAYERS * GROUPS, 0) for cp in (1, 2)),
    ("mtp", 1, 3, 0),  # two layers and the block
    ("gemma", 2, 3 + GROUPS, 0),  # three layers have windows
    ("linear", 2, GROUPS, 3),
]


@pytest.mark.parametrize("model, cp, softmax, delta", CASES)
def test_kernels_run_once(ranks: Ranks, tmp_path: Path, model: str, cp: int, softmax: int, delta: int) -> None:
    recipe = [*(MODELS[model] if model in MODELS else mtp_models.joint(tmp_path)), f"parallel.cp={cp}"]
    calls = ranks(cp).run(kernel_calls, [*recipe, "train.recompute=attention_kept"])
    assert calls == [expected_calls(1, softmax, delta)] * cp


@pytest.mark.parametrize("model, softmax, delta", [("dense", LAYERS, 0), ("linear", 1, 3)])
def test_full_runs_them_twice(ranks: Ranks, model: str, softmax: int, delta: int) -> None:
    assert ranks(1).run(kernel_calls, [*MODELS[model], "train.recompute=full"]) == [expected_calls(2, softmax, delta)]


def expected_calls(forward: int, softmax: int, delta: int) -> dict[str, int]:
    """The calls of two microbatches.  forward: passes; softmax, delta: calls of the kernels in a pass"""
    numbers = {"softmax": MICROBATCHES * softmax, "delta rule": MICROBATCHES * delta}
    passes = {"forward": forward, "backward": 1}
    return {f"{name} {way}": n * times for name, n in numbers.items() for way, times in passes.items() if n}


@pytest.mark.parametrize("layout", [[*PP, "parallel.virtual_stages=2"], ["parallel.cp=2"]], ids=["pp", "cp"])
def test_the_curve_is_that_without_recomputation(ranks: Ranks, layout: list[str]) -> None:
    """With pipeline stages, several microbatches wait for backward at a time."""
    recipe = [*layout, *MODELS["linear_experts"], "train.offload_fraction=1"]
    kept, full = (
        ranks(2).run(scenarios.train, [*recipe, f"train.recompute={way}"], [0, 1]) for way in ("attention_kept", "full")
    )
    for one, other in zip(kept, full, strict=True):
        assert (one["loss"], one["parameters"]) == (other["loss"], other["parameters"])


def test_evaluation_keeps_nothing(ranks: Ranks) -> None:
    """Before and after a step of training."""
    (found,) = ranks(1).run(evaluated, ["train.recompute=attention_kept"])
    (plain,) = ranks(1).run(evaluated, [])
    assert found == plain


def evaluated(overrides: list[str]) -> list[float]:
    with scenarios.running(overrides) as engine:
        loader = scenarios.loader_of(engine, scenarios.SkewedCorpus(scenarios.LENGTHS))
        before = engine.evaluate(loader.microbatches(0)).objective
        engine.train_step(loader.microbatches(0))
        return [before, engine.evaluate(loader.microbatches(0)).objective]
