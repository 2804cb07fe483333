"""Measures the passes of the gated delta rule on one rank of a cp group: time and kernel launches of a layer.

    python -m tools.bench delta_passes                           one document of 64K: cp 1, 2 and 8
    python -m tools.bench delta_passes --cases 128k:8 --ways fla

A case is LENGTH:CP.  With cp above 1, the rank has two linked fragments of the document, as sft splits documents, and
random states take the place of those of other ranks.  Forward then includes the maps of the fragments, and backward the
gradients of states.

Times are medians of --repeats repetitions.  `work` is the time of both passes x cp / the time at cp 1.  `launches` are
the kernels that both passes launch; a CPU has none.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sft.mcore.linear_attention import fla_functions, fla_kernel
from sft.mcore.linear_attention.delta_rule import DeltaKernel, Inputs
from sft.mcore.linear_attention.fla_kernel import FlaKernel
from sft.mcore.linear_attention.recurrence import Fragments
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel
from tools.bench.clock import medians, time_on
from tools.bench.harness import Column, Option, Row, Subject
from tools.bench.mixes import read_length

KERNELS: dict[str, Callable[[], DeltaKernel]] = {
    "fla": lambda: FlaKernel(fla_functions.functions()),
    "torch": lambda: TorchDeltaKernel(),
}
PASSES = ("forward", "backward")


def random_inputs(tokens: int, options: argparse.Namespace) -> Inputs:
    device, dtype = options.device, torch.float32 if options.device.type == "cpu" else torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)
    keys, values, width = options.key_heads, options.value_heads, options.head_dim

    def randn(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, device=device, generator=generator)

    q, k, v, beta = randn(keys, width), randn(keys, width), randn(values, width), randn(values).sigmoid()
    tensors = *(x.to(dtype) for x in (q, k, v)), -torch.exp(randn(values) - 3), beta.to(dtype)
    return Inputs(*(x.requires_grad_() for x in tensors))


def read_case(text: str) -> tuple[int, int]:
    """Reads a case: `64k:8` -> (65536, 8).  Raises ValueError."""
    length, _, cp = text.partition(":")
    if not cp.isdigit() or read_length(length) % (2 * int(cp)):
        raise ValueError(f"{text} is not LENGTH:CP with a length that 2 x CP divides")
    return read_length(length), int(cp)


def prepare(options: argparse.Namespace) -> Iterator[Row]:
    """Removes fla if it cannot run here, and yields a row that says why."""
    on_cpu = options.device.type == "cpu"
    problem = "it needs CUDA" if on_cpu else fla_functions.problem() or fla_kernel.wrong_triton()
    if "fla" in options.ways and problem:
        options.ways = [name for name in options.ways if name != "fla"]
        yield {"case": "every", "way": "fla", "status": f"not measured: {problem}"}


def passes_of(kernel: DeltaKernel, inputs: Inputs, cp: int) -> dict[str, Callable[[], Any]]:
    """The passes over the fragments of a rank, by name: those of gated_delta.py, without messages between ranks."""
    tokens, heads, device = len(inputs.v), inputs.v.shape[1], inputs.v.device
    is_linked = cp > 1
    fragments = Fragments.of([0, tokens // 2, tokens], [0, 1]) if is_linked else Fragments.of([0, tokens])
    schedule = kernel.schedule(fragments, heads, device)
    states = torch.randn_like(inputs.zero_states(2)) if is_linked else None
    grad = torch.randn_like(inputs.v)

    def forward() -> tuple[Tensor, Tensor]:
        prepared = kernel.prepared(inputs, schedule)
        if is_linked:
            kernel.transitions(prepared, schedule)
        return kernel.forward(prepared, schedule, states)

    _, saved = forward()

    def backward() -> Inputs:
        prepared = kernel.prepared(inputs, schedule)
        if is_linked:
            kernel.state_gradients(grad, prepared, schedule)
        return kernel.backward(grad, prepared, schedule, states, saved, states)

    return {"forward": forward, "backward": backward}


def launches(call: Callable[[], Any], device: torch.device) -> int | None:
    """The kernels that a call launches; None on a CPU."""
    if device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events() or [])


def measure(case: tuple[int, int], options: argparse.Namespace) -> Iterator[Row]:
    length, cp = case
    for way in options.ways:
        inputs = Inputs(*(x.detach() for x in random_inputs(length // cp, options)))
        calls = passes_of(KERNELS[way](), inputs, cp)
        seconds = medians(calls, repeats=options.repeats, clock=time_on(options.device))
        counts = [launches(call, options.device) for call in calls.values()]
        total = sum(seconds.values())
        if cp == 1:
            options.whole = {**vars(options).get("whole", {}), (way, length): total}
        whole = vars(options).get("whole", {}).get((way, length))
        yield {
            "way": way, "tokens": length // cp, "cp": cp, "device": options.device.type, "total_s": total,
            **{f"{name}_s": seconds.get(name) for name in PASSES}, "work": whole and total * cp / whole,
            "launches": None if None in counts else sum(count or 0 for count in counts),
        }  # fmt: skip


SUBJECT = Subject(
    measure=measure,
    columns=[
        *(Column(f"{name}_s", f"{name} ms", ".2f", 1e-3) for name in PASSES),
        Column("total_s", "total ms", ".2f", 1e-3),
        Column("work", "work", ".2f"),
        Column("launches", "launches", ","),
    ],
    cases=["64k:1", "64k:2", "64k:8"],
    tiny_cases=["256:1", "256:2"],
    ways=tuple(KERNELS),
    read=read_case,
    options={
        "key_heads": Option(16, 1, "number of query and key heads"),
        "value_heads": Option(32, 2, "number of value heads"),
        "head_dim": Option(128, 16, "size of a head"),
        "repeats": Option(5, 1, "timed repetitions"),
    },
    prepare=prepare,
    device="gpu",
)
