"""What the benchmarks of a GPU share: packs to measure on, a clock, attention as a rank does it, and the header.

Decides nothing about a model.  Times on CUDA are between events of the stream, elsewhere the wall clock's.
"""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from sft.checkpoint.train_state import installed
from sft.mcore.attention import flash_kernel
from tools.bench_packing import lengths_of

MIXES = ("one", "chat", "longmix", "agent")
BACKWARD = 2.5  # FLOPs of attention backward in units of forward: scores are computed again
DRAWN = 20_000  # lengths of a distribution that a pack is filled from


def lengths_to(mix: str, total: int, longest: int) -> np.ndarray:
    """Lengths of the mix until their sum reaches `total`, none above `longest`.  int64."""
    if mix == "one":
        return np.full(-(-total // longest), longest)
    drawn = np.minimum(lengths_of(mix, DRAWN), longest)
    drawn = np.tile(drawn, 1 + int(total // drawn.sum()))
    return drawn[: 1 + int(np.searchsorted(np.cumsum(drawn), total))]


def boundaries_of(mix: str, total: int, multiple: int) -> np.ndarray:
    """A full pack of that mix, every document a multiple of `multiple`: int32 [documents + 1]."""
    sizes = -(-lengths_to(mix, total, total) // multiple) * multiple
    inner = np.cumsum(sizes)
    return np.array([0, *inner[inner < total], total], dtype=np.int32)


def attention_flops(boundaries: np.ndarray, heads: int, head_dim: int) -> float:
    """Of a causal forward: scores and values, half of the square of each document.

    documents of 2 and 4, 3 heads of 8: 2 * 24 * (4 + 16) = 960
    """
    return 2.0 * heads * head_dim * float((np.diff(boundaries).astype(np.float64) ** 2).sum())


def medians(
    calls: Mapping[str, Callable[[], Any]],
    device: torch.device,
    *,
    repeats: int,
    prepare: Callable[[], Any] | None = None,
) -> dict[str, float]:
    """Median seconds of each, in turns after a round that does not count; `prepare` comes before each, untimed."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(repeats + 1):
        for name, call in calls.items():
            if prepare:
                prepare()
            seconds = seconds_of(call, device)
            if repetition:
                taken[name].append(seconds)
    return {name: median(found) for name, found in taken.items()}


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """Of one call, on the device."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def peak_beyond(call: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes that a call takes at most beyond what is there; None on a CPU."""
    if device.type != "cuda":
        call()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# --- attention ---------------------------------------------------------------------------------------------------


def operators_for(device: torch.device) -> flash_kernel.Operators | None:
    """None, which are torch's flash kernel; on a CPU a stand-in, so that the rest can be tried."""
    return None if device.type == "cuda" else flash_kernel.Operators(stand_in, _stand_in_backward)


def stand_in(
    query: Tensor, keys: Tensor, values: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *longest: Any, scale: float
) -> tuple[Tensor, Tensor]:
    """What the kernel does, a sequence at a time, causal from the bottom right; no log-sum-exp."""
    outs = []
    ends = zip(
        cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), cu_seqlens_k[:-1].tolist(), cu_seqlens_k[1:].tolist()
    )
    for q0, q1, k0, k1 in ends:
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=query.device).tril(k1 - k0 - (q1 - q0))
        outs.append(sdpa(query[q0:q1], keys[k0:k1], values[k0:k1], scale, mask=seen))
    return torch.cat(outs), query.new_empty(0)


def _stand_in_backward(
    grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, *boundaries: Any, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = [x.detach().requires_grad_() for x in (query, keys, values)]
    with torch.enable_grad():
        again, _ = stand_in(*inputs, *boundaries, scale=scale)
    dquery, dkeys, dvalues = torch.autograd.grad(again, inputs, grad)
    return dquery, dkeys, dvalues


def sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """torch's own attention of one document, [t, heads, d]; causal where no mask is given."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    causal = mask is None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def random_inputs(tokens: int, heads: int, groups: int, head_dim: int, device: torch.device) -> list[Tensor]:
    """Query, key, value (which want gradients) and a gradient of the output; bf16."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(tokens, count, head_dim) for count in (heads, groups, groups, heads)]
    found = [torch.randn(s, device=device, dtype=torch.bfloat16, generator=generator) for s in shapes]
    return [x.requires_grad_(i < 3) for i, x in enumerate(found)]


# --- the header --------------------------------------------------------------------------------------------------


def about(device: torch.device) -> dict[str, Any]:
    """Date, command, hardware, driver and versions."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%MZ", time.gmtime()),
        "command": shlex.join(sys.orig_argv),
        "versions": {"python": platform.python_version(), **installed()},
        "cores": len(os.sched_getaffinity(0)),
        "host_gib": round(_host_bytes() / 2**30, 1),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "driver": _driver(),
        }
    else:
        found |= {"device": f"cpu, {torch.get_num_threads()} threads (`flash` is a stand-in here)"}
    return found


def told(header: Mapping[str, Any]) -> str:
    """Three lines of it."""
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    gpu = (
        f", {header['memory_gib']} GiB, driver {header['driver']}, CUDA {header['cuda']}" if "driver" in header else ""
    )
    host = f"{header['cores']} cores, {header['host_gib']} GiB of host memory"
    return f"{header['date']}  {header['command']}\n{versions}\n{header['device']}{gpu}, {host}"


def added_to(path: Path | None) -> Callable[[Mapping[str, Any]], None]:
    """What adds a row to that file, as a line of JSON."""

    def emit(row: Mapping[str, Any]) -> None:
        if path:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    return emit


def _host_bytes() -> int:
    """Of this machine, or of what it lends this process."""
    found = [psutil.virtual_memory().total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(path).read_text(encoding="utf-8").strip() if Path(path).is_file() else ""
        found += [int(text)] if text.isdecimal() else []
    return min(found)


def _driver() -> str:
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.check_output(asked, text=True, timeout=20).splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def length_of(text: str) -> int:
    """`64k` or `65536` -> 65536"""
    return int(text[:-1]) * 1024 if text.lower().endswith("k") else int(text)


def short(tokens: int) -> str:
    """65536 -> 64K"""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def columns(cells: Sequence[object], widths: Sequence[int]) -> str:
    """One line; the first column to the left."""
    first, *others = (str(cell) for cell in cells)
    return f"{first:<{widths[0]}}" + "".join(f"{cell:>{width}}" for cell, width in zip(others, widths[1:]))
