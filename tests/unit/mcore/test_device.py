"""The calls that `device.start("cpu")` redirects, and the errors of the choice of a device.

The redirection lasts as long as its process, so a rank starts it.
"""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack as modes

from sft.errors import ConfigError
from sft.mcore import device
from tests.ranks.pool import RankPool


def redirected() -> dict[str, Any]:
    """Results of calls for CUDA in a process that redirects them."""
    from megatron.core.tensor_parallel import random as core_random

    devices = [str(device.start("cpu")), str(device.start("cpu"))]
    made = {
        "zeros, text": torch.zeros(2, device="cuda"),
        "empty, object": torch.empty(2, device=torch.device("cuda")),
        "tensor, current device": torch.tensor([1, 2], device=torch.cuda.current_device()),
        "arange, dtype": torch.arange(3, device="cuda", dtype=torch.int32),
        "full, with index": torch.full((2,), 7.0, device="cuda:0"),
        "rand": torch.rand(2, device="cuda"),
        "zeros_like": torch.zeros_like(torch.zeros(2), device="cuda"),
        "empty, pinned": torch.empty(2, pin_memory=True),
        "to, text": torch.zeros(2).to("cuda"),
        "to, object and dtype": torch.zeros(2).to(torch.device("cuda", 0), torch.bfloat16),
        "to, keyword": torch.zeros(2).to(device="cuda", dtype=torch.float16),
        "new_zeros": torch.zeros(2).new_zeros(3, device="cuda"),
        "a module": torch.nn.Linear(2, 3).cuda().weight,
        "meta, untouched": torch.zeros(2, device="meta"),
    }
    x = torch.zeros(2)
    names = ("float32", "bfloat16", "float16", "int64", "float64")
    types = {name: torch.zeros(1, dtype=getattr(torch, name)).type() for name in names}
    casts = [x.type(torch.float64).dtype, x.type(dtype=torch.int32).dtype]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    torch.cuda.manual_seed(5)
    state, core_state = torch.cuda.get_rng_state(), core_random._get_cuda_rng_state()
    drawn = [torch.rand(3, device="cuda").tolist()]
    torch.cuda.set_rng_state(state)
    drawn.append(torch.rand(3).tolist())
    core_random._set_cuda_rng_state(core_state)
    drawn.append(torch.rand(3).tolist())
    torch.manual_seed(5)  # the CPU then draws the same numbers
    drawn.append(torch.rand(3).tolist())
    weight, inputs = torch.full((2, 2), 3.0, requires_grad=True), torch.ones(1, 2, requires_grad=True)
    (2.0 * (inputs.cuda() @ weight.to("cuda"))).sum().backward()
    return {
        "devices": devices,
        "modes": len(modes()),
        "made": {name: (x.device.type, str(x.dtype), list(x.shape)) for name, x in made.items()},
        "values": [made["full, with index"].tolist(), made["arange, dtype"].tolist()],
        "cuda() is the identity": x.cuda() is x and x.cuda(torch.device("cuda", 1), non_blocking=True) is x,
        "types": types,
        "casts": casts,
        "random numbers repeat": drawn == drawn[:1] * 4,
        "gradients": [inputs.grad.tolist(), weight.grad.tolist()],  # type: ignore[union-attr]
    }


def test_what_is_asked_of_cuda_is_done_on_the_cpu(ranks: Callable[[int], RankPool]) -> None:
    (saw,) = ranks(1).run(redirected)
    assert saw["devices"] == ["cpu", "cpu"] and saw["modes"] == 1  # one redirection, however often it is started
    assert saw["made"] == dict.fromkeys(saw["made"], ("cpu", "torch.float32", [2])) | {
        "tensor, current device": ("cpu", "torch.int64", [2]),
        "arange, dtype": ("cpu", "torch.int32", [3]),
        "to, object and dtype": ("cpu", "torch.bfloat16", [2]),
        "to, keyword": ("cpu", "torch.float16", [2]),
        "new_zeros": ("cpu", "torch.float32", [3]),
        "a module": ("cpu", "torch.float32", [3, 2]),
        "meta, untouched": ("meta", "torch.float32", [2]),
    }
    assert saw["values"] == [[7.0, 7.0], [0, 1, 2]]
    assert saw["cuda() is the identity"]
    assert saw["types"] == {  # megatron-core compares with the first three
        "float32": "torch.cuda.FloatTensor",
        "bfloat16": "torch.cuda.BFloat16Tensor",
        "float16": "torch.cuda.HalfTensor",
        "int64": "torch.LongTensor",
        "float64": "torch.DoubleTensor",
    }
    assert saw["casts"] == [torch.float64, torch.int32]
    assert saw["random numbers repeat"]
    # d/dx of the sum of 2 x W with W = 3: 2 * (3 + 3) = 12 each; d/dW = 2 x = 2
    assert saw["gradients"] == [[[12.0, 12.0]], [[2.0, 2.0], [2.0, 2.0]]]


# --- the choice --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wanted, available, chosen",
    [("auto", True, "cuda"), ("auto", False, "cpu"), ("cpu", True, "cpu"), ("cuda", True, "cuda")],
)
def test_choose(monkeypatch: pytest.MonkeyPatch, wanted: str, available: bool, chosen: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert device.choose(wanted) == chosen


def test_cuda_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError) as caught:
        device.choose("cuda")
    assert str(caught.value) == ("run.device = cuda, but torch sees no CUDA device.  Use run.device=cpu or auto.")


@pytest.mark.parametrize("local_rank", ["0", "4"])
def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch, local_rank: str) -> None:
    """The first process of a machine also finds it: on the first machine, this process prints the error."""
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ConfigError) as caught:
        device.start("cuda")
    assert str(caught.value) == (
        "5 processes were started on a machine with 4 visible GPUs.  Start at most 4 processes per machine, or use "
        "run.device=cpu."
    )


@pytest.mark.parametrize("local_rank, index", [(None, 0), ("0", 0), ("3", 3)])
def test_each_process_takes_the_gpu_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, local_rank: str | None, index: int
) -> None:
    """On CUDA nothing is redirected: the device is set, and the process is bound to cores near it."""
    taken: list[int] = []
    near: list[int] = []
    monkeypatch.setattr(device, "_bind_to_cpus_near", near.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(device, "_redirect_cuda_to_cpu", lambda: pytest.fail("redirected on CUDA"))
    assert device.start("cuda") == torch.device("cuda", index)
    assert taken == near == [index]


@pytest.mark.parametrize(
    "listed, allowed, bound",
    [
        ("0-3,8-11\n", set(range(16)), {0, 1, 2, 3, 8, 9, 10, 11}),
        ("4-7\n", {6, 7, 8}, {6, 7}),  # SLURM or numactl left the process some of them
        ("4-7\n", {0, 1}, None),
        ("5\n", {4, 5}, {5}),
        ("\n", {0, 1}, None),
        (None, {0, 1}, None),  # a container without /sys
    ],
)
def test_a_process_runs_near_its_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, listed: str | None, allowed: set[int], bound: set[int] | None
) -> None:
    if listed is not None:
        (tmp_path / "0001:c1:0a.0").mkdir()
        (tmp_path / "0001:c1:0a.0/local_cpulist").write_text(listed)
    gpus = {3: SimpleNamespace(pci_domain_id=1, pci_bus_id=0xC1, pci_device_id=10)}
    asked: list[set[int]] = []
    monkeypatch.setattr(device, "_PCI_DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: asked.append(cpus))
    device._bind_to_cpus_near(3)
    assert asked == ([] if bound is None else [bound])


def test_a_torch_without_pci_addresses_binds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: pytest.fail("bound"))
    device._bind_to_cpus_near(0)


def test_a_gpu_is_sent_tokens_without_waiting_for_it() -> None:
    """A copy is asynchronous only from page-locked memory."""
    asked: list[Any] = []

    class Tokens:
        def pin_memory(self) -> "Tokens":
            asked.append("page-locked")
            return self

        def to(self, where: torch.device, non_blocking: bool = False) -> str:
            asked.append(non_blocking)
            return f"on {where}"

    assert device.send(Tokens(), torch.device("cuda", 1)) == "on cuda:1"  # type: ignore[arg-type]
    assert asked == ["page-locked", True]
    tokens = torch.arange(3)
    assert device.send(tokens, torch.device("cpu")) is tokens
