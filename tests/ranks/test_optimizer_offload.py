"""Adam in host memory: where its states are, and that neither a curve nor a checkpoint tells how many of them."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from sft.mcore.checkpoint_io import optimizer_shards, safe_reader
from sft.mcore.optimizer import build, offload
from sft.mcore.optimizer.offload import adam_instances
from tests.ranks import scenarios
from tests.ranks.interop import BOTH, check, our_save, their_load
from tests.ranks.layouts import AUX, MOE
from tests.ranks.pool import RankPool
from tests.ranks.resuming import NORM_TOLERANCE, TOLERANCE, check_bitwise, part

Ranks = Callable[[int], RankPool]

BF16 = ["run.precision=bf16", "parallel.distributed_optimizer=true"]
TP2 = ["parallel.tp=2", "parallel.sequence_parallel=true"]
EXPERTS = [*MOE, *AUX, "parallel.ep=2"]
LAYOUTS = [(1, BF16), (2, BF16), (2, [*BF16, *TP2]), (2, [*BF16, *EXPERTS])]
NAMES = ["1", "dp2", "tp2 sp", "dp2 ep2"]
STEPS = [0, 1, 2, 3, 4]


def share(fraction: float) -> list[str]:
    return [f"optim.offload_fraction={fraction}"]


def alike(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` with one kernel on both sides: core asks for torch's fused one in its hybrid optimizer only,
    and its sums differ in their last bits."""
    original = build.build_optimizer

    def build_alike(*given: Any) -> Any:
        optimizer = original(*given)
        for group in optimizer.param_groups:  # handed down to all Adams before every step
            group["fused"] = None
        return optimizer

    with mock.patch.object(build, "build_optimizer", build_alike):
        return function(*args)


# --- where the states are ----------------------------------------------------------------------------------------


def where(overrides: list[str], steps: int) -> list[dict[str, Any]]:
    """Of each part: the kind of its optimizer, sizes of what Adams on the host and on the device work on."""
    with scenarios.running(overrides) as engine:
        alive = sum(isinstance(o, HybridDeviceOptimizer) for o in gc.get_objects())
        loader = scenarios.loader_of(engine, scenarios.SkewedCorpus(scenarios.LENGTHS))
        for step in range(steps):
            engine.train_step(loader.microbatches(step))
        return [{**of_part(o), "alive": alive} for o in offload.chained_optimizers(engine.optimizer)]


def of_part(part: Any) -> dict[str, Any]:
    on_device = getattr(part.optimizer, "gpu_optimizer", None)
    sizes: dict[str, list[int]] = {"host": [], "device": []}
    for adam in adam_instances(part):
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


@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
def test_at_least_the_share_is_on_the_host_by_whole_parameters(ranks: Ranks, fraction: float) -> None:
    (parts,) = ranks(1).run(where, [*BF16, *share(fraction)], 1)
    (one,) = parts
    assert one["hybrid"] and one["total"] == sum(one["host"]) + sum(one["device"]) > 50_000
    # Of each weight the device keeps bf16, and nothing else where Adam is on the host.
    assert one["kept"] == {"torch.bfloat16"}
    assert fraction * one["total"] <= sum(one["host"]) < fraction * one["total"] + max(one["host"])
    assert bool(one["device"]) == (fraction < 1.0)
    assert one["alive"] == 1  # and not another one of whole parameters, with as many copies


def test_every_rank_and_the_experts_have_a_share(ranks: Ranks) -> None:
    for parts in ranks(2).run(where, [*BF16, *EXPERTS, *share(0.5)], 1):
        assert len(parts) == 2
        for one in parts:
            assert one["hybrid"] and one["host"] and one["device"]


def test_without_a_share_nothing_is_hybrid(ranks: Ranks) -> None:
    (parts,) = ranks(1).run(where, [*BF16, *share(0.0)], 1)
    assert [one["hybrid"] for one in parts] == [False]


# --- one curve ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "world_size,overrides,fraction",
    [(*layout, 0.5) for layout in LAYOUTS] + [(*layout, 1.0) for layout in LAYOUTS[:2]],
    ids=[f"{name} 0.5" for name in NAMES] + [f"{name} 1" for name in NAMES[:2]],
)
def test_with_one_kernel_every_share_gives_the_same_bits(
    ranks: Ranks, world_size: int, overrides: list[str], fraction: float
) -> None:
    """Losses, norms, rates, and all weights and moments in fp32 after five steps."""
    reference = ranks(world_size).run(alike, part, [*overrides, *share(0.0)], STEPS, None, None)
    found = ranks(world_size).run(alike, part, [*overrides, *share(fraction)], STEPS, None, None)
    for one, whole in zip(found, reference):
        assert one == whole
        assert len(set(one["loss"])) == 5 and one["learning_rate"][1] == pytest.approx(7.5e-4)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_the_fused_kernel_stays_on_the_curve(ranks: Ranks, fraction: float) -> None:
    (reference,) = ranks(1).run(part, [*BF16, *share(0.0)], STEPS, None, None)
    (found,) = ranks(1).run(part, [*BF16, *share(fraction)], STEPS, None, None)
    assert found["optimizer"] != reference["optimizer"]  # or it is not the fused one that ran
    np.testing.assert_allclose(found["loss"], reference["loss"], rtol=TOLERANCE["bf16"])
    np.testing.assert_allclose(found["grad_norm"], reference["grad_norm"], rtol=NORM_TOLERANCE["bf16"])
    assert found["learning_rate"] == reference["learning_rate"]


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_weights_that_are_loaded_reach_the_host(ranks: Ranks, tmp_path: Path, fraction: float) -> None:
    """A stale copy there would put the random weights back at the first update."""
    other = [*BF16, "run.seed=8"]
    ranks(1).run(scenarios.write_checkpoint, other, str(tmp_path))
    (expected,) = ranks(1).run(alike, scenarios.curve, other, None)
    (found,) = ranks(1).run(alike, scenarios.curve, [*BF16, *share(fraction)], str(tmp_path))
    assert (found["loss"], found["hash"]) == (expected["loss"], expected["hash"])


# --- checkpoints -------------------------------------------------------------------------------------------------


def stored(folder: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, whole."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    safe_reader.load(tensors, folder)
    return tensors


@pytest.mark.parametrize(
    "world_size,overrides,fraction", [(*LAYOUTS[0], 1.0), (*LAYOUTS[3], 0.5)], ids=[f"{NAMES[0]} 1", f"{NAMES[3]} 0.5"]
)
def test_a_checkpoint_does_not_tell_the_share(
    ranks: Ranks, tmp_path: Path, world_size: int, overrides: list[str], fraction: float
) -> None:
    """So whatever reads one (export, Megatron-LM, another share) reads all of them."""
    for name, of in (("none", 0.0), ("some", fraction)):
        ranks(world_size).run(alike, part, [*overrides, *share(of)], [0, 1], None, str(tmp_path / name))
    none, some = stored(tmp_path / "none"), stored(tmp_path / "some")
    assert none.keys() == some.keys() and len(none) > 40
    for kind in ("exp_avg", "exp_avg_sq", "param"):
        assert f"optimizer.state.{kind}.decoder.final_layernorm.weight" in none
    for key, tensor in none.items():
        assert torch.equal(tensor, some[key]), key
    plain, form = (safe_reader.common_state(tmp_path / name)["optimizer"] for name in ("none", "some"))
    for groups, expected in zip(groups_of(form), groups_of(plain), strict=True):
        assert [optimizer_shards.stored_step({"param_groups": groups})] == [2]
        assert "params" not in groups[0] and "fused" not in groups[0] and "cpu_optimizer_cls" not in groups[0]
        assert groups == [{key: value for key, value in group.items() if key in groups[0]} for group in expected]
        assert {"lr", "betas", "eps", "weight_decay", "step", "wd_mult", "lr_mult"} <= groups[0].keys()


def groups_of(form: dict[Any, Any]) -> list[list[dict[str, Any]]]:
    forms = [form[index] for index in sorted(form)] if 0 in form else [form]
    return [one["optimizer"]["param_groups"] for one in forms]


@pytest.mark.parametrize(
    "world_size,overrides,fraction", [(*LAYOUTS[0], 1.0), (*LAYOUTS[1], 0.5)], ids=[f"{NAMES[0]} 1", f"{NAMES[1]} 0.5"]
)
def test_the_same_share_continues_bitwise(
    ranks: Ranks, tmp_path: Path, world_size: int, overrides: list[str], fraction: float
) -> None:
    """With the fused kernel, as a run has it."""
    check_bitwise(ranks(world_size), tmp_path, [*overrides, *share(fraction)])


@pytest.mark.parametrize("before,after", [(0.0, 1.0), (1.0, 0.0), (0.5, 1.0), (1.0, 0.5)])
def test_another_share_continues_bitwise(ranks: Ranks, tmp_path: Path, before: float, after: float) -> None:
    whole = ranks(2).run(alike, part, BF16, STEPS, None, None)
    first = ranks(2).run(alike, part, [*BF16, *share(before)], STEPS[:2], None, str(tmp_path))
    second = ranks(2).run(alike, part, [*BF16, *share(after)], STEPS[2:], str(tmp_path), None)
    for w, f, s in zip(whole, first, second):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert f[name] + s[name] == w[name]
        assert (s["parameters"], s["optimizer"], s["adam_steps"]) == (w["parameters"], w["optimizer"], {5.0})


def test_megatron_continues_what_was_on_the_host(ranks: Ranks, tmp_path: Path) -> None:
    """With the weights and moments of a run that had nothing there."""
    flags, overrides = BOTH
    for name in ("none", "some"):
        (tmp_path / name).mkdir()
    before = ranks(1).run(alike, our_save, overrides, str(tmp_path / "none"))
    ranks(1).run(alike, our_save, [*overrides, *share(0.5)], str(tmp_path / "some"))
    check(before, ranks(1).run(their_load, flags, str(tmp_path / "some")))


@pytest.mark.parametrize("before,after", [(0.0, 1.0), (1.0, 0.5)])
def test_a_checkpoint_of_step_0_resumes(ranks: Ranks, tmp_path: Path, before: float, after: float) -> None:
    (whole,) = ranks(1).run(alike, part, BF16, [0, 1], None, None)
    ranks(1).run(save_untrained, [*BF16, *share(before)], str(tmp_path))
    (resumed,) = ranks(1).run(alike, part, [*BF16, *share(after)], [0, 1], str(tmp_path), None)
    assert resumed == whole


def save_untrained(overrides: list[str], folder: str) -> None:
    with scenarios.running(overrides) as engine:
        scenarios.save(engine, Path(folder), {"iteration": 0})
