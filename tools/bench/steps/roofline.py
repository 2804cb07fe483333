"""Measures the rates of a device, and computes FLOPs, share of the roofline and shares of time of a measured step.

The floor of a step is the least time that it could take at rates that the same process measured.  Matrix products of
layers and of the head run at 650 / 790 of the rate of an 8192 x 8192 x 8192 product.  Layers have 8 FLOPs per parameter
and token if the MLP and the projections are recomputed, otherwise 6; the head has 6.  Attention runs at the best rate
of the kernels on one document of this length: forward once (keep-attention) or twice (full), and backward once.  With
LoRA, backward computes no gradient of a frozen weight, so layers have 4 FLOPs instead of 6, and 6 instead of 8, and in
addition the FLOPs of adapters.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tools.bench import attention_ways as ways
from tools.bench.attention_ways import BACKWARD
from tools.bench.clock import medians, time_on
from tools.bench.harness import Row
from tools.bench.steps.case import StepCase

LINEAR = 650 / 790  # rate of matrix products of a layer / rate of a large product
COMPONENTS = ("attention", "linear", "head", "optimizer", "copies", "other")
RANGE = "sft: "  # prefix of our ranges in a trace


def constants(case: StepCase, kernels: Sequence[str], device: torch.device) -> dict[str, Any]:
    """The rates of the device, in FLOP/s and bytes/s.  Frees all tensors that it used."""
    attention, absent = attention_rates(case, device, kernels)
    measured = {**rates(device), "attention": attention, "attention not run": absent}
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return measured


def rates(device: torch.device) -> dict[str, float]:
    """The rates of a large matrix product, of copies on the device, and of copies between host and device.

    A product has FLOP/s, and a copy bytes/s.  Copies on the device count the bytes that are read and those written.
    """
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
    """The FLOP/s of kernels, forward and backward, on one document of the case's length.

    Also returns the reasons why other kernels cannot run.
    """
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
        measured[name] = {"forward": pack.flops / forward, "backward": BACKWARD * pack.flops / backward}
    return measured, absent


def _seconds(way: ways.Way, pack: ways.Pack, times: int) -> tuple[float, float]:
    """Median seconds of forward and of backward.  The first run is a warm-up and does not count."""
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


def useful_flops(case: StepCase, row: Mapping[str, Any]) -> float:
    """FLOPs of forward and backward for the tokens of the row's steps."""
    flops = case.flops
    return flops.per_token * row["tokens"] + flops.per_label * row["labels"] + row["attention_flops"]


def floors(case: StepCase, row: Mapping[str, Any], *, gemm: float, forward: float, backward: float) -> dict[str, float]:
    """The least seconds of the row's steps, for each kind of recomputation.  Rates are in FLOP/s."""
    flops, attention, linear = case.flops, row["attention_flops"] / 3, LINEAR * gemm  # FLOPs of one forward attention
    layers, head = flops.per_token * row["tokens"], flops.per_label * row["labels"]
    recomputed = (flops.per_token + flops.saved) * row["tokens"] / 3
    none = (layers + head) / linear + attention / forward + BACKWARD * attention / backward
    keep = none + recomputed / linear
    return {"none": none, "keep": keep, "full": keep + attention / forward}


def with_rates(case: StepCase, row: Row, peak_tflops: float) -> Row:
    """The row, with rates and floors computed from its measurements."""
    seconds, flops = row["seconds"], useful_flops(case, row)
    rates = {"tokens_per_s": row["tokens"] / seconds, "tflops": flops / seconds / 1e12}
    if row["device"] == "cuda":
        rates["mfu"] = rates["tflops"] / peak_tflops
    constants = row["constants"]
    best = {way: max(kernel[way] for kernel in constants["attention"].values()) for way in ("forward", "backward")}
    least = floors(case, row, gemm=constants["gemm"], **best)
    return {**row, **rates, "floors_s": least, **{f"of_{mode}": least[mode] / seconds for mode in least}}


def shares(events: Iterable[Mapping[str, Any]], wall_s: float) -> dict[str, float]:
    """The share of each component in the time of a traced step.  A kernel in one of our ranges belongs to that range.

    With activation offload, copies run at the same time as products, so the shares add up to more than 1.
    """
    complete = [e for e in events if e.get("ph") == "X"]
    ranges = [e for e in complete if e.get("cat") == "gpu_user_annotation" and e["name"].startswith(RANGE)]
    kernels = [e for e in complete if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        return {}
    busy = dict.fromkeys(COMPONENTS, 0.0)
    for kernel in kernels:
        inside = (r["name"] for r in ranges if r["ts"] <= kernel["ts"] < r["ts"] + r["dur"])
        owner = next(inside, "").removeprefix(RANGE) or _kind_of(kernel)
        busy[owner] += kernel["dur"] / 1e6 / wall_s
    return {**busy, "idle": max(0.0, 1.0 - sum(busy.values()))}


def _kind_of(kernel: Mapping[str, Any]) -> str:
    """The component of a kernel by its name.  Attention is checked first, because its names also contain `cutlass`."""
    if kernel["cat"] != "kernel":
        return "copies"
    name = kernel["name"].lower()
    if re.search(r"flash|fmha|sdpa|attention", name):
        return "attention"
    return "linear" if re.search(r"gemm|nvjet|cublas|xmma|cutlass", name) else "other"


def with_notes(row: Row) -> Row:
    """The row with seconds per step, and with its rates and shares as text."""
    constants = row["constants"]
    rates = [f"{n} {r['forward'] / 1e12:.0f} / {r['backward'] / 1e12:.0f}" for n, r in constants["attention"].items()]
    notes = [row["backend"], f"product {constants['gemm'] / 1e12:.0f} TFLOP/s; attention {', '.join(rates)}"]
    notes += [f"{n} {constants[n] / 1e9:,.0f} GB/s" for n in ("copy", "to device", "to host") if n in constants]
    notes += [f"no {name} ({why})" for name, why in constants["attention not run"].items()]
    shares = ", ".join(f"{name} {share:.1%}" for name, share in row["shares"].items())
    notes = ["; ".join(notes), *filter(None, [shares, adapters_note(row)])]
    return {**row, "step_s": row["seconds"] / row["steps"], "notes": notes}


def adapters_note(row: Row) -> str:
    """A note such as `trained 16,384 (full 106,880); MiB of gradients 0.1 (full 0.4), of the optimizer 0.1 (full 0.8)`.

    It is empty if the case has no adapters.
    """
    if "lora" not in row:
        return ""

    def compared(key: str, unit: float, spec: str) -> str:
        full = format(row["full"][key] / unit, spec) if "full" in row else "does not fit beside it"
        return f"{row['lora'][key] / unit:{spec}} (full {full})"

    gradients, optimizer = (compared(key, 2**20, ",.1f") for key in ("gradient_bytes", "optimizer_bytes"))
    return f"trained {compared('trained', 1, ',.0f')}; MiB of gradients {gradients}, of the optimizer {optimizer}"
