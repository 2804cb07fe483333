"""Measures curves, the speed and memory of steps, and adapters, for ranks.py.  Its import may start CUDA."""

import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sft.errors import ConfigError
from sft.estimate import memory
from sft.estimate.gpus import gpu_of_device
from sft.mcore import device as devices
from sft.mcore import process_groups
from sft.mcore.engine import release
from sft.mcore.lora.adapted import AdaptedLinear
from sft.parallel.collectives import all_gather_objects
from sft.parallel.layout import Layout
from tools.bench.clock import medians, time_on
from tools.bench.harness import DONE, Row
from tools.bench.steps import trainer
from tools.bench.steps.case import StepCase
from tools.bench.steps.roofline import useful_flops
from tools.gpu_hour import curves

STEPS, SECONDS = 5, 60.0  # largest number of timed steps and their largest time, after one step of warm-up
ADAPTER_REPEATS = 10  # timed repetitions of a layer


def curve_rows(group: str, device_type: str, sizes: Sequence[str]) -> Iterator[Row]:
    """The rows of a group of curves.

    A curve that this machine cannot compute has a row with the reason.  With one process, a curve that fails also has a
    row, and the next curves follow; with several processes, the error ends the measurement.
    """
    references: dict[str, Row] = {}
    world_size = int(os.environ["WORLD_SIZE"])
    store, _, _ = next(dist.rendezvous("env://"))
    for number, name in enumerate(curves.GROUPS[group][world_size]):
        row: Row = {"case": name, "status": DONE}
        try:
            row |= curve([*curves.overrides(name), *sizes], device_type, dist.PrefixStore(f"{number}", store))
        except ConfigError as error:
            yield row | {"status": f"not measured: {' '.join(str(error).split())}"}
            continue
        except Exception as error:
            if world_size > 1:
                raise
            traceback.print_exc()
            yield row | {"status": f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            continue
        reference = references.setdefault(curves.kind_of(name), row)
        row |= {"loss": row["losses"][-1], "loss_error": curves.difference(row, reference, "losses")}
        yield row | {"norm_error": curves.difference(row, reference, "norms")}


def curve(overrides: Sequence[str], device_type: str, store: dist.Store) -> Row:
    """Losses and gradient norms of a few steps, equal on every rank.

    store  a separate store for each curve, because each starts new process groups
    """
    config = curves.config(overrides, device_type)
    num_steps = config.train.num_steps or 1
    layout = Layout.resolve(config, int(os.environ["WORLD_SIZE"]))
    device = devices.start(device_type, deterministic=config.run.deterministic)
    groups = process_groups.start(layout, device, seed=config.run.seed, timeout_s=120, store=store)
    try:
        case = StepCase(shape="tiny", length=config.data.seq_length, mix="chat")  # only its data are used
        engine, loader = trainer.engine_and_loader(case, config, layout, groups, num_steps=num_steps)
        results = [engine.train_step(loader.microbatches(step)) for step in range(num_steps)]
    finally:
        process_groups.stop()
    backend = str(engine.backend)
    release(engine)
    return {
        "losses": [result.objective / result.num_tokens for result in results],
        "norms": [result.grad_norm for result in results],
        "backend": backend,
    }


def speed_rows(name: str, overrides: Sequence[str], device_type: str) -> Iterator[Row]:
    case, world_size = StepCase.read(name), int(os.environ["WORLD_SIZE"])
    seq_length, multiple, _ = trainer.documents_of(case, 1)
    config = case.config(device_type, seq_length=seq_length, multiple=multiple, also=overrides)
    layout = Layout.resolve(config, world_size)
    groups = process_groups.start(layout, devices.start(device_type), seed=config.run.seed, timeout_s=200)
    engine, loader = trainer.engine_and_loader(case, config, layout, groups, num_steps=STEPS + 1)
    totals: dict[str, float] = {"tokens": 0, "labels": 0, "attention_flops": 0}
    peak, count, seconds = 0.0, 0, 0.0
    for step in range(STEPS + 1):
        microbatches = loader.microbatches(step)
        start = time.perf_counter()
        result = engine.train_step(microbatches)
        if device_type == "cuda":
            torch.cuda.synchronize()
        local = (time.perf_counter() - start, result.memory_allocated.value)
        taken, allocated = (max(values) for values in zip(*all_gather_objects(lambda: local, groups.control)))
        peak = max(peak, allocated)
        if step:  # the first step is a warm-up
            totals["tokens"] += result.num_real_tokens
            totals["labels"] += result.num_tokens
            totals["attention_flops"] += result.attention_flops
            count, seconds = count + 1, seconds + taken
        if seconds > SECONDS:
            break
    tflops, peak_tflops = useful_flops(case, totals) / seconds / world_size / 1e12, peak_of(device_type)
    yield {
        "case": f"{name} {' '.join(overrides)}", "status": DONE, "device": device_type, "world_size": world_size,
        "backend": str(engine.backend), **totals, "steps": count, "step_s": seconds / count,
        "tokens_per_s": totals["tokens"] / seconds, "tflops": tflops, "mfu": peak_tflops and tflops / peak_tflops,
        "peak_bytes": peak or None, "by_equations": memory.estimate(config, layout, case.vocab).device,
    }  # fmt: skip
    process_groups.stop()


def adapter_rows(name: str, device_type: str) -> Iterator[Row]:
    """A row for each Linear with an adapter, in a model of one layer: times with and without the adapter.

    A row has the times of forward, and of forward with backward.  The frozen weight never gets a gradient.
    """
    case, device = StepCase.read(name), torch.device(device_type)
    config = case.config(device_type, also=["model.num_layers=1", "attention.backend=portable"])
    layout = Layout.resolve(config, int(os.environ["WORLD_SIZE"]))
    groups = process_groups.start(layout, devices.start(device_type), seed=config.run.seed, timeout_s=200)
    engine = trainer.engine_of(case, config, layout, groups)
    dtype = torch.bfloat16 if config.run.precision == "bf16" else torch.float32
    for layer_name, layer in engine.chunks[0].named_modules():
        if not isinstance(layer, AdaptedLinear):
            continue
        x = torch.randn(case.length, 1, layer.weight.num_columns, device=groups.device, dtype=dtype, requires_grad=True)
        ways = {"base": layer.base, "adapted": layer}
        calls: dict[str, Callable[[], object]] = {f"{key} fwd": partial(_forward, way, x) for key, way in ways.items()}
        calls |= {f"{key} both": partial(_forward_and_backward, way, x) for key, way in ways.items()}
        taken = medians(
            calls, repeats=ADAPTER_REPEATS, clock=time_on(device), prepare=partial(setattr, x, "grad", None)
        )
        yield {
            "case": layer_name.rpartition("layers.")[2], "status": DONE, "tokens": case.length, "rank": case.lora,
            **{key.replace(" ", "_"): value for key, value in taken.items()},
            "fwd_ratio": taken["adapted fwd"] / taken["base fwd"], "ratio": taken["adapted both"] / taken["base both"],
        }  # fmt: skip
    process_groups.stop()


def _forward(layer: Any, x: Tensor) -> Tensor:
    output: Tensor = layer(x)[0]
    return output


def _forward_and_backward(layer: Any, x: Tensor) -> None:
    output = _forward(layer, x)
    output.backward(output.detach())


def peak_of(device_type: str) -> float | None:
    """The dense bf16 peak of this machine's GPU in TFLOP/s; None for a CPU, and for a GPU whose peak is not known."""
    gpu = gpu_of_device(torch.cuda.get_device_name()) if device_type == "cuda" else None
    return gpu.tflops if gpu else None
