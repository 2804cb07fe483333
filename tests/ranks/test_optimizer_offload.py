"""Adam in host memory: where its states are; the share in host memory changes neither the curve nor the checkpoint."""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from sft.mcore.checkpoint_io import engine_state, optimizer_shards, safe_reader
from sft.mcore.optimizer import build, host_threads, offload
from sft.mcore.optimizer.inner import chained_optimizers, inner_optimizers
from sft.mcore.page_locked import Arena
from tests.ranks import scenarios
from tests.ranks.layouts import AUX, EP, MOE, SHARDED, SP
from tests.ranks.pool import Ranks
from tests.ranks.saving import stored

BF16 = ["run.precision=bf16", *SHARDED]
EXPERTS = [*MOE, *AUX, *EP]
# The fused kernel sums in another order, which in bf16 changes the last bits of every activation.
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-3, 1e-2


def share(fraction: float) -> list[str]:
    return [f"optim.offload_fraction={fraction}"]


def alike(function: Callable[..., Any], *args: Any) -> Any:
    """Runs `function(*args)` with the same Adam kernel on both devices.  megatron-core asks for torch's fused kernel
    only in its hybrid optimizer, and the sums of this kernel differ in their last bits."""
    original = build.build_optimizer

    def build_alike(*given: Any) -> Any:
        optimizer = original(*given)
        for group in optimizer.param_groups:  # the setting is copied to all Adam optimizers before every step
            group["fused"] = None
        return optimizer

    with mock.patch.object(build, "build_optimizer", build_alike):
        return function(*args)


# --- threads -----------------------------------------------------------------------------------------------------


def threads(overrides: list[str]) -> tuple[set[int], int]:
    """Threads of Adam's update and after it, on ranks that may all run on the same six cores."""
    with (
        mock.patch.object(os, "sched_getaffinity", lambda process: set(range(6))),
        scenarios.running(overrides) as engine,
    ):
        seen: set[int] = set()
        for part in chained_optimizers(engine.optimizer):
            for adam in part.optimizer.sub_optimizers:
                adam.register_step_pre_hook(lambda *given: seen.add(torch.get_num_threads()))
        scenarios.train_steps(engine, [0])
        return seen, torch.get_num_threads()


def test_the_host_updates_with_its_cores(ranks: Ranks) -> None:
    assert ranks(2).run(threads, [*BF16, *share(1)]) == [({3}, 1)] * 2


@pytest.mark.parametrize(
    "others, expected",
    [
        ([("a", range(128))] * 8, 16),  # no rank is bound to cores
        ([("a", range(64))] * 4 + [("a", range(64, 128))] * 4, 16),  # ranks are bound to a socket
        ([("a", range(6)), ("a", range(6, 8))], 6),
        ([("a", range(8)), ("b", range(8)), ("b", range(8))], 8),  # the other ranks are on another machine
        ([("a", range(2))] * 8, 1),
        ([("a", range(4)), ("a", range(2))], 3),  # two cores of its own, and half of two shared ones
    ],
)
def test_threads_of_a_rank(others: list[host_threads.Cores], expected: int) -> None:
    assert host_threads.num_threads(others, 0) == expected


# --- where the states are ----------------------------------------------------------------------------------------


def where(overrides: list[str]) -> list[dict[str, Any]]:
    """For each part of the optimizer: its kind, and the sizes of the tensors that Adam updates on the host and on the
    device."""
    with scenarios.running(overrides) as engine:
        alive = sum(isinstance(o, HybridDeviceOptimizer) for o in gc.get_objects())
        scenarios.train_steps(engine, [0])
        return [{**of_part(o), "alive": alive} for o in chained_optimizers(engine.optimizer)]


def of_part(part: Any) -> dict[str, Any]:
    on_device = getattr(part.optimizer, "gpu_optimizer", None)
    sizes: dict[str, list[int]] = {"host": [], "device": []}
    for adam in inner_optimizers(part):
        side = "device" if adam is on_device else "host"
        tensors = [tensor for group in adam.param_groups for tensor in group["params"]]
        sizes[side] += [tensor.numel() for tensor in tensors]
        assert all(tensor.dtype == torch.float32 for tensor in tensors)
        assert all(adam.state[t]["exp_avg"].dtype == torch.float32 for t in tensors)
    weights = [param for group in part.optimizer.param_groups for param in group["params"]]
    return {
        "hybrid": isinstance(part.optimizer, HybridDeviceOptimizer),
        "total": sum(weight.numel() for weight in weights),
        "kept": {str(weight.dtype) for weight in weights},
        **sizes,
    }


@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_at_least_the_share_is_on_the_host_by_whole_parameters(ranks: Ranks, fraction: float) -> None:
    (parts,) = ranks(1).run(where, [*BF16, *share(fraction)])
    (one,) = parts
    assert one["hybrid"] and one["total"] == sum(one["host"]) + sum(one["device"]) > 50_000
    # For each weight whose Adam is on the host, the device holds bf16 and nothing else.
    assert one["kept"] == {"torch.bfloat16"}
    assert fraction * one["total"] <= sum(one["host"]) < fraction * one["total"] + max(one["host"])
    assert bool(one["device"]) == (fraction < 1.0)
    assert one["alive"] == 1  # one copy, and not a second one of whole parameters


def test_every_rank_and_the_experts_have_a_share(ranks: Ranks) -> None:
    for parts in ranks(2).run(where, [*BF16, *EXPERTS, *share(0.5)]):
        assert len(parts) == 2
        for one in parts:
            assert one["hybrid"] and one["host"] and one["device"]


def in_one_block(overrides: list[str]) -> dict[str, Any]:
    """Sizes of blocks, and whether the weights and gradients of a step on the host fill one, apart from alignment."""
    sizes: list[int] = []

    def arena(num_bytes: int, device: torch.device) -> Arena:
        sizes.append(num_bytes)
        return Arena(num_bytes, device)

    with mock.patch.object(offload, "Arena", arena), scenarios.running(overrides) as engine:
        scenarios.train_steps(engine, [0])
        hybrid = chained_optimizers(engine.optimizer)[0].optimizer
        weights = [param for adam in hybrid.cpu_optimizers for group in adam.param_groups for param in group["params"]]
        travelling = sorted([*weights, *(weight.grad for weight in weights)], key=lambda tensor: tensor.data_ptr())
        gaps = [
            after.data_ptr() - before.data_ptr() - before.nbytes for before, after in zip(travelling, travelling[1:])
        ]
        return {
            "sizes": sizes,
            "needed": sum(tensor.nbytes for tensor in travelling),
            "number": len(travelling),
            "largest gap": max(gaps),
            "gradients": all(bool(weight.grad.any()) for weight in weights),
        }


def test_what_travels_each_step_is_one_block(ranks: Ranks) -> None:
    """A tensor begins at a multiple of 64 bytes.  Core would allocate each gradient apart, on a GPU rounded up to a
    power of two."""
    (found,) = ranks(1).run(in_one_block, [*BF16, *share(1)])
    (size,) = found["sizes"]
    assert found["needed"] <= size < found["needed"] + 64 * found["number"]
    assert 0 <= found["largest gap"] < 64 and found["number"] > 20 and found["gradients"]


# --- one curve ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "world_size,overrides,before,after",
    [(1, [], 0.0, 1.0), (2, [], 1.0, 0.5), (2, SP, 0.5, 0.0), (2, EXPERTS, 0.0, 0.5)],
    ids=["1", "dp2", "tp2 sp", "dp2 ep2"],
)
def test_with_one_kernel_every_share_gives_the_same_bits_and_continues_another(
    ranks: Ranks, tmp_path: Path, world_size: int, overrides: list[str], before: float, after: float
) -> None:
    """Losses, norms, learning rates, and all weights and moments in fp32."""
    pool, recipe = ranks(world_size), [*BF16, *overrides]
    whole = pool.run(alike, scenarios.train, [*recipe, *share(0.0)], [0, 1])
    first = pool.run(alike, scenarios.train, [*recipe, *share(before)], [0], None, str(tmp_path))
    second = pool.run(alike, scenarios.train, [*recipe, *share(after)], [1], str(tmp_path))
    for w, f, s in zip(whole, first, second):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert f[name] + s[name] == w[name]
        assert (s["parameters"], s["optimizer"], s["adam_steps"]) == (w["parameters"], w["optimizer"], {2.0})


def test_the_fused_kernel_stays_on_the_curve(ranks: Ranks) -> None:
    (reference,) = ranks(1).run(scenarios.train, [*BF16, *share(0.0)])
    (found,) = ranks(1).run(scenarios.train, [*BF16, *share(1.0)])
    assert found["optimizer"] != reference["optimizer"]  # otherwise the fused kernel did not run
    np.testing.assert_allclose(found["loss"], reference["loss"], rtol=LOSS_TOLERANCE)
    np.testing.assert_allclose(found["grad_norm"], reference["grad_norm"], rtol=NORM_TOLERANCE)


def after_a_step(overrides: list[str], folder: str) -> str:
    """The parameters after one step from the weights in `folder`."""
    with scenarios.running(overrides) as engine:
        engine_state.load_weights(engine, Path(folder))
        scenarios.train_steps(engine, [0])
        return scenarios.parameter_hash(engine)


def test_weights_that_are_loaded_reach_the_host(ranks: Ranks, tmp_path: Path) -> None:
    """If the host kept an old copy, the first update would restore the random weights."""
    other = [*BF16, "run.seed=8"]
    ranks(1).run(scenarios.write_checkpoint, other, str(tmp_path))
    (expected,) = ranks(1).run(alike, scenarios.train, other, [0])
    assert ranks(1).run(alike, after_a_step, [*BF16, *share(0.5)], str(tmp_path)) == [expected["parameters"]]


# --- checkpoints -------------------------------------------------------------------------------------------------


def test_a_checkpoint_does_not_tell_the_share(ranks: Ranks, tmp_path: Path) -> None:
    """So every reader of a checkpoint (export, Megatron-LM, another share) can read it."""
    for name, fraction in (("none", 0.0), ("some", 0.5)):
        recipe = [*BF16, *EXPERTS, *share(fraction)]
        ranks(2).run(alike, scenarios.train, recipe, [0], None, str(tmp_path / name))
    none, some = stored(tmp_path / "none"), stored(tmp_path / "some")
    assert none.keys() == some.keys() and len(none) > 40
    for kind in ("exp_avg", "exp_avg_sq", "param"):
        assert f"optimizer.state.{kind}.decoder.final_layernorm.weight" in none
    for key, tensor in none.items():
        assert torch.equal(tensor, some[key]), key
    plain, form = (safe_reader.common_state(tmp_path / name)["optimizer"] for name in ("none", "some"))
    for groups, expected in zip(groups_of(form), groups_of(plain), strict=True):
        assert [optimizer_shards.stored_step({"param_groups": groups})] == [1]
        assert "params" not in groups[0] and "fused" not in groups[0] and "cpu_optimizer_cls" not in groups[0]
        assert groups == [{key: value for key, value in group.items() if key in groups[0]} for group in expected]
        assert {"lr", "betas", "eps", "weight_decay", "step", "wd_mult", "lr_mult"} <= groups[0].keys()


def groups_of(form: dict[Any, Any]) -> list[list[dict[str, Any]]]:
    forms = [form[index] for index in sorted(form)] if 0 in form else [form]
    return [one["optimizer"]["param_groups"] for one in forms]


def test_the_same_share_continues_bitwise(ranks: Ranks, tmp_path: Path) -> None:
    """With the fused kernel, as in a real run."""
    scenarios.check_bitwise(ranks(2), tmp_path, [*BF16, *share(0.5)])
