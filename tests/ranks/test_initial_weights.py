"""Which starts draw random weights, and that every layout draws the same weights."""

import hashlib
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sft.checkpoint import resume
from sft.console import QUIET
from sft.mcore.lora import adapted
from sft.mcore.modules.stored import sharded_tensors
from sft.weights.initial import load_initial
from tests.ranks import saving, scenarios
from tests.ranks.layouts import EP, PP, SHARDED, SP, TP
from tests.ranks.peft_models import shard_parts, whole
from tests.ranks.pool import Ranks
from tests.ranks.saving import SMALL

RANDOM = ("aten::normal", "aten::uniform", "aten::rand", "aten::bernoulli", "aten::trunc_normal")
EXPERTS = ["model.moe.num_experts=4", "model.moe.top_k=2", *EP]


class Draws(TorchDispatchMode):
    """Counts the random operations of torch on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket._qualified_op_name.startswith(RANDOM)
        return func(*args, **(kwargs or {}))


def start(overrides: list[str], folder: str, save: bool = False) -> tuple[int, str]:
    """Start a run as the trainer does.  Returns the number of random operations before its first step, and a hash of
    its weights."""
    draws = Draws()
    with ExitStack() as contexts:
        with draws:
            engine = contexts.enter_context(scenarios.running([*SMALL, *overrides], has_weights=False))
            run = saving.Run(engine, folder)
            initial = partial(load_initial, engine, engine.config, QUIET)
            resume.restore(engine, run.saver, engine.config, run.saver._conditions, QUIET, initial)
        weights = scenarios.parameter_hash(engine)
        run.train(1)
        if save:
            run.save(1, wait=True)
            weights = scenarios.parameter_hash(engine)
    return draws.count, weights


@pytest.mark.parametrize("overrides", [["run.precision=bf16", *SHARDED], EXPERTS], ids=" ".join)
def test_a_start_draws_weights_only_if_it_loads_none(ranks: Ranks, tmp_path: Path, overrides: list[str]) -> None:
    folder, other = str(tmp_path / "a"), str(tmp_path / "b")
    fresh = ranks(2).run(start, overrides, folder, True)
    assert all(count > 0 for count, _ in fresh)
    saved = [(0, weights) for _, weights in fresh]
    assert ranks(2).run(start, overrides, folder) == saved
    assert ranks(2).run(start, [*overrides, f"model.init_from={folder}"], other) == saved
    assert ranks(2).run(start, [*overrides, f"checkpoint.resume={folder}"], other) == saved


def use_without_weights(use: str) -> str:
    with scenarios.running(SMALL, has_weights=False) as engine:
        microbatches = scenarios.loader_of(engine, scenarios.SkewedCorpus([100] * 4)).microbatches(0)
        assert all(param.isnan().all() for chunk in engine.chunks for param in chunk.parameters() if param.dim() > 1)
        with pytest.raises(AssertionError) as error:
            getattr(engine, use)(microbatches)
        return str(error.value)


@pytest.mark.parametrize("use", ["train_step", "evaluate"])
def test_a_model_that_is_neither_loaded_nor_drawn_is_not_used(ranks: Ranks, use: str) -> None:
    assert ranks(1).run(use_without_weights, use) == ["no weights were loaded or drawn"]


def differing(overrides: list[str]) -> list[str]:
    """The matrices of this rank that differ from their part of the whole random parameter."""
    names, count = [], 0
    with scenarios.running(overrides) as engine:
        for chunk in engine.chunks:
            for shard in sharded_tensors(chunk.module.sharded_state_dict()):
                axes, part = shard.prepend_axis_num, shard.data
                if part.dim() < 2:
                    continue
                digest = hashlib.sha256(f"7:{shard.key}{shard.global_offset[:axes]}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
                std = 0.02 / 8**0.5 if "proj" in shard.key or "fc2" in shard.key else 0.02
                expected = torch.randn(shard.global_shape[axes:], generator=generator) * std
                for axis, (begin, size) in enumerate(zip(shard.global_offset[axes:], part.shape)):
                    expected = expected.narrow(axis, begin, size)
                count += 1
                if not torch.equal(part, expected.to(part.dtype)):
                    names.append(shard.key)
    assert count >= 4
    return names


@pytest.mark.parametrize("overrides", [TP, PP, EXPERTS], ids=" ".join)
def test_weights_of_a_layout_are_parts_of_the_same_parameters(ranks: Ranks, overrides: list[str]) -> None:
    """Bitwise, and equal to the values of earlier versions."""
    assert ranks(2).run(differing, overrides) == [[], []]


def initial_adapters(overrides: list[str]) -> dict[str, Any]:
    with scenarios.running(["model.qkv_bias=false", "lora.rank=3", *overrides]) as engine:
        return {"factors": shard_parts(adapted.linear_tensors(engine.chunks))}


def test_initial_adapters_are_those_of_one_process(ranks: Ranks) -> None:
    """A is uniform within 1 / sqrt(columns), and B is 0; another seed gives other values of A."""
    expected = whole(ranks(1).run(initial_adapters, []), "factors")
    for overrides in (SP, PP):
        found = whole(ranks(2).run(initial_adapters, overrides), "factors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    for name, value in expected.items():
        if name.endswith("lora_B.weight"):
            assert not value.any()
        else:
            assert 0.8 < float(value.abs().max()) * value.shape[1] ** 0.5 <= 1.0 and abs(float(value.mean())) < 0.05
    other = whole(ranks(1).run(initial_adapters, ["run.seed=8"]), "factors")
    assert not any(torch.equal(other[name], expected[name]) for name in expected if name.endswith("lora_A.weight"))
