"""train.recompute = attention_kept: every kernel of attention runs once forward and once backward for a layer."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest

from sft.mcore.attention.torch_kernel import TorchKernel
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel
from tests.ranks import scenarios
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


@pytest.mark.parametrize("model", ["dense", "gpt_oss", "latent", "linear"])
@pytest.mark.parametrize("recompute, forward", [("attention_kept", 1), ("full", 2)])
def test_kernels_run_once(ranks: Ranks, model: str, recompute: str, forward: int) -> None:
    """A model of four layers; LINEAR has three layers with the delta rule.  On one rank heads are one group."""
    (calls,) = ranks(1).run(kernel_calls, [*MODELS[model], f"train.recompute={recompute}"])
    num_delta = 3 if model == "linear" else 0
    groups = 4 if model == "latent" else 1  # head groups, whose keys are expanded one after the other
    num_softmax = (LAYERS - num_delta) * groups
    expected = {"softmax forward": forward * num_softmax, "softmax backward": num_softmax}
    if num_delta:
        expected |= {"delta rule forward": forward * num_delta, "delta rule backward": num_delta}
    assert calls == {name: count * MICROBATCHES for name, count in expected.items()}


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
