"""Computes numbers of a measured step: FLOPs, share of the roofline, and shares of time by component.

The floor of a step is the least time that it could take, by rates that the same process measured.  Matrix products of
layers count with 650 / 790 of the rate of an 8192 x 8192 x 8192 product: 8 FLOPs per parameter and token if the MLP and
the projections are recomputed, otherwise 6; the head counts 6.  Attention counts with the best rate of the kernels on
one document of this length: forward once (keep-attention) or twice (full), and backward once.  With LoRA, backward
computes no gradient of a frozen weight: 4 FLOPs instead of 6, and 6 instead of 8, besides those of adapters.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tools.bench.attention_ways import BACKWARD
from tools.bench.results import Row
from tools.bench.steps.case import StepCase

LINEAR = 650 / 790  # rate of matrix products of a layer / rate of a large product
COMPONENTS = ("attention", "linear", "head", "optimizer", "copies", "other", "idle", "data")
RANGE = "sft: "  # prefix of the names of our profiler ranges


def useful_flops(case: StepCase, row: Mapping[str, Any]) -> float:
    """FLOPs of forward and backward for the tokens of the row's steps."""
    flops = case.flops
    return flops.per_token * row["tokens"] + flops.per_label * row["labels"] + row["attention_flops"]


def floors(case: StepCase, row: Mapping[str, Any], *, gemm: float, forward: float, backward: float) -> dict[str, float]:
    """The least seconds of the row's steps, for each kind of recomputation.  Rates are in FLOP/s."""
    flops, attention, linear = case.flops, row["attention_flops"] / 3, LINEAR * gemm  # attention of one forward
    layers, head = flops.per_token * row["tokens"], flops.per_label * row["labels"]
    recomputed = (flops.per_token + flops.saved) * row["tokens"] / 3
    none = (layers + head) / linear + attention / forward + BACKWARD * attention / backward
    keep = none + recomputed / linear
    return {"none": none, "keep": keep, "full": keep + attention / forward}


def with_rates(case: StepCase, row: Row, peak_tflops: float) -> Row:
    """The row with the rates and floors that follow from its measurements."""
    seconds, flops = row["seconds"], useful_flops(case, row)
    rates = {"tokens_per_s": row["tokens"] / seconds, "tflops": flops / seconds / 1e12}
    if row["device"] == "cuda":
        rates["mfu"] = rates["tflops"] / peak_tflops
    constants = row["constants"]
    best = {way: max(kernel[way] for kernel in constants["attention"].values()) for way in ("forward", "backward")}
    least = floors(case, row, gemm=constants["gemm"], **best)
    return {**row, **rates, "floors_s": least, **{f"of_{mode}": least[mode] / seconds for mode in least}}


def shares(events: Iterable[Mapping[str, Any]], wall_s: float) -> dict[str, float]:
    """Component -> share of the time of a traced step.  A kernel inside one of our ranges belongs to that range.

    With activation offload, copies run at the same time as products, so the shares add up to more than 1.
    """
    complete = [e for e in events if e.get("ph") == "X"]
    ranges = [e for e in complete if e.get("cat") == "gpu_user_annotation" and e["name"].startswith(RANGE)]
    kernels = [e for e in complete if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        return {}
    busy = dict.fromkeys(COMPONENTS[:-2], 0.0)
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
    """`trained 16,384 (full 106,880); MiB of gradients 0.1 (full 0.4), of the optimizer 0.1 (full 0.8)`"""
    if "lora" not in row:
        return ""

    def compared(key: str, unit: float, spec: str) -> str:
        full = format(row["full"][key] / unit, spec) if "full" in row else "does not fit beside it"
        return f"{row['lora'][key] / unit:{spec}} (full {full})"

    gradients, optimizer = (compared(key, 2**20, ",.1f") for key in ("gradient_bytes", "optimizer_bytes"))
    return f"trained {compared('trained', 1, ',.0f')}; MiB of gradients {gradients}, of the optimizer {optimizer}"
