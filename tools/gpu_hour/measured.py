"""Measures curves, and the speed and memory of steps, on all GPUs, for ranks.py.  Its import may start CUDA."""

import os
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from sft.estimate import memory
from sft.mcore import device as devices
from sft.mcore import process_groups
from sft.parallel.collectives import all_gather_objects
from sft.parallel.layout import Layout
from tools.bench.harness import DONE, Row
from tools.bench.steps import trainer
from tools.bench.steps.case import StepCase
from tools.bench.steps.roofline import useful_flops
from tools.gpu_hour import curves

STEPS, SECONDS = 5, 60.0  # largest number of timed steps and their largest time, after one step of warm-up
PEAK_TFLOPS = 989.0  # peak of an H100 or H200 in dense bf16


def curve_rows(group: str, device_type: str, sizes: Sequence[str]) -> Iterator[Row]:
    reference: Row | None = None
    store, _, _ = next(dist.rendezvous("env://"))
    for number, name in enumerate(curves.GROUPS[group][int(os.environ["WORLD_SIZE"])]):
        row: Row = {
            "case": name,
            "status": DONE,
            **curve([*sizes, *curves.overrides(name)], device_type, dist.PrefixStore(f"{number}", store)),
        }
        reference = reference or row
        row |= {"loss": row["losses"][-1], "loss_error": curves.difference(row, reference, "losses")}
        yield row | {"norm_error": curves.difference(row, reference, "norms")}


def curve(overrides: Sequence[str], device_type: str, store: dist.Store) -> Row:
    """Losses and gradient norms of a few steps, equal on every rank.

    store  a separate store for each curve, because each starts new process groups
    """
    config = curves.config(overrides, device_type)
    num_steps = config.train.num_steps or 1
    layout = Layout.resolve(config, int(os.environ["WORLD_SIZE"]))
    groups = process_groups.start(
        layout,
        devices.start(device_type, deterministic=config.run.deterministic),
        seed=config.run.seed,
        timeout_s=120,
        store=store,
    )
    case = StepCase(shape="tiny", length=config.data.seq_length, mix="chat")  # only its data are used
    engine, loader = trainer.engine_and_loader(case, config, layout, groups, num_steps=num_steps)
    results = [engine.train_step(loader.microbatches(step)) for step in range(num_steps)]
    process_groups.stop()
    return {
        "losses": [result.objective / result.num_tokens for result in results],
        "norms": [result.grad_norm for result in results],
        "backend": str(engine.backend),
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
    tflops = useful_flops(case, totals) / seconds / world_size / 1e12
    yield {
        "case": f"{name} {' '.join(overrides)}", "status": DONE, "device": device_type, "world_size": world_size,
        "backend": str(engine.backend), **totals, "steps": count, "step_s": seconds / count,
        "tokens_per_s": totals["tokens"] / seconds, "tflops": tflops, "mfu": tflops / PEAK_TFLOPS,
        "peak_bytes": peak or None, "by_equations": memory.estimate(config, layout, case.vocab).device,
    }  # fmt: skip
    process_groups.stop()
