"""Measures the rates of this device that determine the roofline of a step: products, copies, attention."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tools.bench import attention_ways as ways
from tools.bench.clock import medians, time_on
from tools.bench.steps.case import StepCase


def constants(case: StepCase, kernels: Sequence[str], device: torch.device) -> dict[str, Any]:
    """The rates in FLOP/s and bytes/s.  Frees all tensors that were used."""
    attention, absent = attention_rates(case, device, kernels)
    measured = {**rates(device), "attention": attention, "attention not run": absent}
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return measured


def rates(device: torch.device) -> dict[str, float]:
    """Rates of a large matrix product, of copies on the device (bytes read + written), and of copies over the bus."""
    on_cuda = device.type == "cuda"
    n, size = (8192, 1 << 30) if on_cuda else (64, 1 << 16)
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    c, source = torch.empty_like(a), torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], Any]] = {"gemm": lambda: torch.mm(a, b, out=c), "copy": lambda: target.copy_(source)}
    if on_cuda:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        calls["to device"] = lambda: target.copy_(host, non_blocking=True)
        calls["to host"] = lambda: host.copy_(target, non_blocking=True)
    seconds = medians(calls, repeats=10, clock=time_on(device))
    amounts = {"gemm": 2.0 * n**3, "copy": 2.0 * size, "to device": size, "to host": size}
    return {name: amounts[name] / taken for name, taken in seconds.items()}


def attention_rates(
    case: StepCase, device: torch.device, kernels: Sequence[str]
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """FLOP/s of kernels on one document of the case's length, forward and backward; why other kernels cannot run."""
    model = case.model
    heads = (model.num_attention_heads, model.resolved_query_groups, model.resolved_head_dim)
    pack = ways.Pack.random(np.array([0, case.length], dtype=np.int32), heads, device)
    absent = {name: why for name in kernels if (why := ways.why_not(name, device))}
    measured: dict[str, dict[str, float]] = {}
    for name in kernels:
        if name in absent:
            continue
        try:
            forward, backward = _seconds(ways.whole(pack, name), pack, 4 if case.length <= 65_536 else 2)
        except ways.REFUSALS as error:
            if not ways.is_refusal(name, error):
                raise
            absent[name] = ways.reason(error)
            continue
        measured[name] = {"forward": pack.flops / forward, "backward": ways.BACKWARD * pack.flops / backward}
    return measured, absent


def _seconds(way: ways.Way, pack: ways.Pack, times: int) -> tuple[float, float]:
    """Median seconds of forward and of backward, without the first run, which is a warm-up."""
    clock = time_on(pack.device)
    forward, backward = [], []
    for _ in range(times):
        for x in pack.tensors[:3]:
            x.grad = None
        outs: list[tuple[Tensor, Tensor]] = []
        forward.append(clock(lambda: outs.append(way())))
        ((out, gradient),) = outs
        backward.append(clock(partial(out.backward, gradient)))
    return float(np.median(forward[1:])), float(np.median(backward[1:]))
