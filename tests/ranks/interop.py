"""Writes checkpoints with Megatron-LM and with sft, reads each with the other program, and compares the tensors."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from sft.mcore.checkpoint_io import engine_state
from tests.ranks import megatron_lm, scenarios
from tests.ranks.megatron_lm import BATCH, LAYERS, VOCAB

CUT, NAME = 2, "iter_0000002"  # number of updates before the checkpoint, and the name of its folder
Dump = dict[str, Any]
KINDS = ("weight", "main", "exp_avg", "exp_avg_sq")
LR = 7.5e-4  # learning rate of the third update: 1e-3 after a warm-up of one update, 0 after five
# The same optimizer and precision for each side: flags of Megatron-LM, overrides of ours.
HALF = ("--bf16", ["run.precision=bf16"])
BOTH = ("--bf16 --use-distributed-optimizer", ["run.precision=bf16", "parallel.distributed_optimizer=true"])
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
# How a parameter is split over tp: along this axis; fc1 is two matrices, gate and up, which are split one by one.
AXES = {
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "linear_qkv.weight": 0,
    "linear_qkv.bias": 0,
    "linear_fc1.weight": 0,
    "linear_proj.weight": 1,
    "linear_fc2.weight": 1,
}


def cut_axis(name: str) -> int | None:
    if ".experts." in name:  # tp does not split experts here
        return None
    return next((axis for end, axis in AXES.items() if name.endswith(end)), None)


def joined(name: str, parts: list[np.ndarray]) -> np.ndarray:
    """The whole parameter, joined from its parts in the order of tp ranks, without padding of the vocabulary."""
    axis = cut_axis(name)
    if axis is None:
        assert all(np.array_equal(part, parts[0]) for part in parts), name
        return parts[0]
    if name.endswith("linear_fc1.weight"):
        halves = [np.split(part, 2) for part in parts]
        return np.concatenate([gate for gate, _ in halves] + [up for _, up in halves])
    whole = np.concatenate(parts, axis=axis)
    return whole[:VOCAB] if "word_embeddings" in name or "output_layer" in name else whole


def part_of(name: str, whole: Tensor, tp: int, rank: int) -> Tensor:
    """The part of a whole parameter on one tp rank: the inverse of `joined`."""
    axis = cut_axis(name)
    if axis is None:
        return whole
    if name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(tp)[rank] for half in whole.chunk(2)])
    return whole.chunk(tp, dim=axis)[rank]


def named(chunks: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """The parameters of this rank, by their names in the whole model; an expert has its number in the whole model."""
    first = parallel_state.get_pipeline_model_parallel_rank() * LAYERS
    first //= parallel_state.get_pipeline_model_parallel_world_size()
    first_expert = parallel_state.get_expert_model_parallel_rank() * (chunks[0].config.num_moe_experts or 0)
    first_expert //= parallel_state.get_expert_model_parallel_world_size()
    for chunk in chunks:
        for name, param in chunk.module.named_parameters():
            head, layers, rest = name.partition("layers.")
            if layers:
                number, _, rest = rest.partition(".")
                rest = f"{int(number) + first}.{rest}"
            rest, experts, expert = rest.partition("local_experts.")
            if experts:
                number, _, end = expert.partition(".")
                rest += f"{experts}{int(number) + first_expert}.{end}"
            yield head + layers + rest, param


def fill_gradients(chunks: list[Any], seed: int) -> None:
    """Sets the same gradients on every layout: draws whole gradients by name, so small that they are not clipped."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, param in named(chunks):
        shape = list(param.shape)
        axis = cut_axis(name)
        if axis is not None:
            shape[axis] *= tp
        rows = shape[0]
        if "word_embeddings" in name or "output_layer" in name:
            shape[0] = VOCAB
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        whole = 1e-3 * torch.randn(shape, generator=generator)
        padding = torch.zeros([rows - shape[0], *shape[1:]])
        param.main_grad.copy_(part_of(name, torch.cat([whole, padding]), tp, rank))  # type: ignore[attr-defined]


def copy_of(tensor: Tensor) -> np.ndarray:
    """The flat values of a tensor in fp32, which is exact for bf16; numpy has no bfloat16."""
    return tensor.detach().to(torch.float32, copy=True).flatten().numpy()


def held(chunks: list[Any], optimizer: Any) -> dict[str, Any]:
    """The state of this rank: for each parameter its flat tensors, and the elements of the local part that these
    tensors hold."""
    parts = optimizer.chained_optimizers  # experts may have an optimizer of their own
    tensors = {}
    for name, param in named(chunks):
        begin, main = 0, getattr(param, "main_param", param)
        # the distributed optimizer holds a range of each parameter
        if hasattr(parts[0], "model_param_group_index_map"):
            holding = [part for part in parts if param in part.model_param_group_index_map]
            if not holding:
                continue
            (inner,) = holding
            group, order = inner.model_param_group_index_map[param]
            begin = inner._get_model_param_range_map(param)["param"].start
            main = inner.optimizer.param_groups[group]["params"][order]
        # a new run has no state
        (state,) = [s for part in parts if (s := part.optimizer.state.get(main)) is not None] or [{}]
        of = {"main": main, **{kind: state[kind] for kind in ("exp_avg", "exp_avg_sq") if kind in state}}
        flat = {kind: copy_of(tensor) for kind, tensor in of.items()}
        tensors[name] = (begin, tuple(param.shape), copy_of(param), flat, float(state.get("step", 0)))
    return {
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
        "tensors": tensors,
        "lr": [group["lr"] for group in optimizer.param_groups],
        "weight_decay": [group["weight_decay"] for group in optimizer.param_groups],
    }


def num_parameters(num_experts: int) -> int:
    """Counts embedding, output, final norm; and in each layer four norms, qkv, its bias, proj, fc1 and fc2, or router
    and experts."""
    return 3 + LAYERS * (8 + 2 * num_experts if num_experts else 9)


def whole(ranks: list[dict[str, Any]]) -> Dump:
    """The whole tensors of all ranks: {"exp_avg decoder.layers.3.mlp.linear_fc2.weight": array, ..., "steps": Adam's
    count}."""
    parts: dict[str, dict[int, np.ndarray]] = {}
    seen: dict[str, dict[int, np.ndarray]] = {}
    steps = set()
    for rank in ranks:
        for name, (begin, shape, weight, flat, step) in rank["tensors"].items():
            steps.add(step)
            for kind, values in {"weight": weight, **flat}.items():
                key, tp = f"{kind} {name}", rank["tp_rank"] if cut_axis(name) is not None else 0
                start = 0 if kind == "weight" else begin
                into = parts.setdefault(key, {}).setdefault(tp, np.zeros(shape, np.float32))
                mask = seen.setdefault(key, {}).setdefault(tp, np.zeros(shape, bool))
                span = slice(start, start + len(values))
                assert not mask.flat[span].any() or np.array_equal(into.flat[span], values), key
                into.flat[span], mask.flat[span] = values, True
    assert all(mask.all() for masks in seen.values() for mask in masks.values())
    dump: Dump = {key: joined(key, [by_rank[tp] for tp in sorted(by_rank)]) for key, by_rank in parts.items()}
    return {**dump, "steps": steps}


def assert_same(left: Dump, right: Dump) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert np.array_equal(value, right[key]) if isinstance(value, np.ndarray) else value == right[key], key


def their_save(flags: str, folder: str) -> tuple[Any, Any]:
    """Runs CUT updates, saves a checkpoint, and runs another update.  Returns this rank's state at the checkpoint and
    at the end."""
    with megatron_lm.running(flags) as other:
        for seed in range(CUT):
            fill_gradients([other.model], seed)
            other.update()
        megatron_lm.save(other, Path(folder), iteration=CUT)
        saved = held([other.model], other.optimizer)
        their_next_update(other)
        return saved, held([other.model], other.optimizer)


def their_load(flags: str, folder: str) -> tuple[Any, Any]:
    """The state of this rank right after loading, and after another update."""
    with megatron_lm.running(flags) as other:
        assert megatron_lm.load(other, Path(folder)) == CUT
        assert other.args.consumed_train_samples == CUT * BATCH == other.scheduler.num_steps
        loaded = held([other.model], other.optimizer)
        their_next_update(other)
        return loaded, held([other.model], other.optimizer)


def our_save(overrides: list[str], folder: str) -> tuple[Any, Any]:
    with scenarios.running(overrides) as engine:
        for seed in range(CUT):
            fill_gradients(engine.chunks, seed)
            engine.scheduler.step(1)
            engine.optimizer.step()
        (Path(folder) / NAME).mkdir(exist_ok=True)
        scenarios.save(engine, Path(folder) / NAME, {"iteration": CUT})
        (Path(folder) / "latest_checkpointed_iteration.txt").write_text(str(CUT))
        saved = held(engine.chunks, engine.optimizer)
        our_next_update(engine)
        return saved, held(engine.chunks, engine.optimizer)


def our_load(overrides: list[str], folder: str) -> tuple[Any, Any]:
    with scenarios.running(overrides) as engine:
        plain = engine_state.load(engine, Path(folder) / NAME)
        assert plain["iteration"] == CUT == engine.scheduler.num_steps
        loaded = held(engine.chunks, engine.optimizer)
        our_next_update(engine)
        return loaded, held(engine.chunks, engine.optimizer)


def check(before: list[tuple[Any, Any]], after: list[tuple[Any, Any]], num_experts: int = 0) -> None:
    """The loaded state equals the saved state, and the next update has the same result on both sides."""
    saved, then = (whole([rank[i] for rank in before]) for i in (0, 1))
    loaded, later = (whole([rank[i] for rank in after]) for i in (0, 1))
    assert len(saved) == 4 * num_parameters(num_experts) + 1
    assert saved["steps"] == {2.0} and then["steps"] == {3.0}
    experts = [f"mlp.experts.local_experts.{number}.linear_fc2.weight" for number in range(num_experts)]
    names = ["mlp.router.weight", "pre_mlp_layernorm.weight", *experts] if experts else ["mlp.linear_fc2.weight"]
    # otherwise the comparison would say little
    for key in (f"{kind} decoder.layers.3.{name}" for kind in KINDS for name in names):
        assert saved[key].all() and not np.array_equal(saved[key], then[key])
    assert_same(loaded, saved)
    assert_same(later, then)
    for rank, _ in [*before, *after]:
        assert rank["lr"] == pytest.approx([LR] * len(rank["lr"])) and set(rank["weight_decay"]) == {0.1, 0.0}
        assert num_experts or rank["weight_decay"] == [0.1, 0.0]


def their_next_update(other: megatron_lm.Other) -> None:
    """Megatron-LM's scheduler steps after an update, ours before.  So this update sets the learning rate itself,
    without either scheduler."""
    for group in other.optimizer.param_groups:
        group["lr"] = 5e-4
    fill_gradients([other.model], CUT)
    other.update()


def our_next_update(engine: Any) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = 5e-4
    fill_gradients(engine.chunks, CUT)
    engine.optimizer.step()


def theirs_loaded(flags: str, folder: str) -> dict[str, np.ndarray]:
    """The weights of Megatron-LM's model after --load FOLDER --finetune, by name."""
    # Qwen3 has no bias of qkv.
    command, made = megatron_lm.COMMAND.replace(" --add-qkv-bias", ""), megatron_lm.TransformerConfig
    with (
        mock.patch.object(megatron_lm, "COMMAND", command),
        mock.patch.object(megatron_lm, "TransformerConfig", lambda **k: made(**{**k, "add_qkv_bias": False})),
        megatron_lm.running(f"{flags} --finetune --no-load-optim --no-load-rng") as other,
    ):
        assert megatron_lm.load(other, Path(folder)) == 0
        return {name: param.detach().float().numpy().copy() for name, param in other.model.module.named_parameters()}
