"""What `device.start("cpu")` redirects, and the errors of choosing a device.

The redirection lasts as long as its process; on a machine with a GPU it would send the tensors of every later
test to the CPU.  So whatever starts it runs in a process of its own, once, and reports what it saw as JSON.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sft.errors import ConfigError
from sft.mcore import device

ROOT = Path(__file__).resolve().parents[2]

BEFORE = """
import json
import torch
from torch.overrides import _get_current_function_mode_stack as modes
from sft.mcore import device

saw = {}
saw["modes before"] = len(modes())
saw["type before"] = torch.zeros(1).type()
saw["device"] = str(device.start("cpu"))
saw["modes"] = len(modes())
saw["device again"] = str(device.start("cpu"))
saw["modes again"] = len(modes())
"""
MADE = """
made = {
    "zeros, text": torch.zeros(2, device="cuda"),
    "ones, with index": torch.ones(2, device="cuda:0"),
    "empty, object": torch.empty(2, device=torch.device("cuda")),
    "tensor, current device": torch.tensor([1, 2], device=torch.cuda.current_device()),
    "arange, dtype": torch.arange(3, device="cuda", dtype=torch.int32),
    "full": torch.full((2,), 7.0, device="cuda"),
    "rand": torch.rand(2, device="cuda"),
    "zeros_like": torch.zeros_like(torch.zeros(2), device="cuda"),
    "empty, pinned": torch.empty(2, pin_memory=True),
    "to, text": torch.zeros(2).to("cuda"),
    "to, object and dtype": torch.zeros(2).to(torch.device("cuda", 0), torch.bfloat16),
    "to, keyword": torch.zeros(2).to(device="cuda", dtype=torch.float16),
    "new_zeros": torch.zeros(2).new_zeros(3, device="cuda"),
    "cuda()": torch.zeros(2).cuda(),
    "cuda(0)": torch.zeros(2).cuda(0),
    "cpu, untouched": torch.zeros(2, device="cpu"),
    "meta, untouched": torch.zeros(2, device="meta"),
}
saw["made"] = {name: [x.device.type, str(x.dtype), list(x.shape)] for name, x in made.items()}
x = torch.zeros(2)
saw["cuda() is the identity"] = x.cuda() is x and x.cuda(torch.device("cuda", 1), non_blocking=True) is x
saw["module.cuda()"] = torch.nn.Linear(2, 2).cuda().weight.device.type
saw["values"] = [torch.full((2,), 7.0, device="cuda").tolist(), torch.arange(3, device="cuda").tolist()]
"""
TYPES = """
names = ("float32", "bfloat16", "float16", "int64", "float64")
saw["types"] = {name: torch.zeros(1, dtype=getattr(torch, name)).type() for name in names}
saw["type as cast"] = str(torch.zeros(1).type(torch.float64).dtype)
saw["type as keyword"] = str(torch.zeros(1).type(dtype=torch.int32).dtype)
"""
REST = """
torch.cuda.synchronize()
torch.cuda.empty_cache()
with torch.cuda.stream(torch.cuda.Stream()):
    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
event = torch.cuda.Event()
event.record()
event.synchronize()
torch.cuda.manual_seed(5)
state = torch.cuda.get_rng_state()
first = torch.rand(3, device="cuda").tolist()
torch.cuda.set_rng_state(state)
saw["random numbers repeat"] = torch.rand(3).tolist() == first
torch.manual_seed(5)
saw["seeded as on the CPU"] = torch.rand(3).tolist() == first

from megatron.core.tensor_parallel import random as core_random

state = core_random._get_cuda_rng_state()
first = torch.rand(3).tolist()
core_random._set_cuda_rng_state(state)
saw["random numbers of core repeat"] = torch.rand(3).tolist() == first

weight = torch.full((2, 2), 3.0, requires_grad=True)
x = torch.ones(1, 2, requires_grad=True)
(2.0 * (x.cuda() @ weight.to("cuda"))).sum().backward()
saw["gradients pass"] = [x.grad.tolist(), weight.grad.tolist()]
saw["gradient device"] = x.grad.device.type
"""


@pytest.fixture(scope="module")
def saw() -> dict[str, Any]:
    """What one redirected process reports."""
    script = BEFORE + MADE + TYPES + REST + "\nprint(json.dumps(saw))\n"
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return result


def test_nothing_is_redirected_before_start_and_once_after(saw: dict[str, Any]) -> None:
    assert saw["type before"] == "torch.FloatTensor"
    assert (saw["modes before"], saw["modes"], saw["modes again"]) == (0, 1, 1)
    assert saw["device"] == saw["device again"] == "cpu"


def test_tensors_asked_for_on_cuda_are_made_on_the_cpu(saw: dict[str, Any]) -> None:
    assert saw["made"] == {
        "zeros, text": ["cpu", "torch.float32", [2]],
        "ones, with index": ["cpu", "torch.float32", [2]],
        "empty, object": ["cpu", "torch.float32", [2]],
        "tensor, current device": ["cpu", "torch.int64", [2]],
        "arange, dtype": ["cpu", "torch.int32", [3]],
        "full": ["cpu", "torch.float32", [2]],
        "rand": ["cpu", "torch.float32", [2]],
        "zeros_like": ["cpu", "torch.float32", [2]],
        "empty, pinned": ["cpu", "torch.float32", [2]],
        "to, text": ["cpu", "torch.float32", [2]],
        "to, object and dtype": ["cpu", "torch.bfloat16", [2]],
        "to, keyword": ["cpu", "torch.float16", [2]],
        "new_zeros": ["cpu", "torch.float32", [3]],
        "cuda()": ["cpu", "torch.float32", [2]],
        "cuda(0)": ["cpu", "torch.float32", [2]],
        "cpu, untouched": ["cpu", "torch.float32", [2]],
        "meta, untouched": ["meta", "torch.float32", [2]],
    }
    assert saw["values"] == [[7.0, 7.0], [0, 1, 2]]


def test_cuda_of_a_tensor_is_the_tensor(saw: dict[str, Any]) -> None:
    assert saw["cuda() is the identity"] is True
    assert saw["module.cuda()"] == "cpu"


def test_type_names_are_those_core_compares_with(saw: dict[str, Any]) -> None:
    assert saw["types"] == {
        "float32": "torch.cuda.FloatTensor",
        "bfloat16": "torch.cuda.BFloat16Tensor",
        "float16": "torch.cuda.HalfTensor",
        "int64": "torch.LongTensor",  # core compares none of these
        "float64": "torch.DoubleTensor",
    }
    assert (saw["type as cast"], saw["type as keyword"]) == ("torch.float64", "torch.int32")


def test_streams_and_random_states_work_without_a_gpu(saw: dict[str, Any]) -> None:
    assert saw["random numbers repeat"] is True
    assert saw["seeded as on the CPU"] is True
    assert saw["random numbers of core repeat"] is True


def test_autograd_goes_through_the_redirection(saw: dict[str, Any]) -> None:
    """d/dx of the sum of 2 x W with W = 3: 2 * (3 + 3) = 12 each; d/dW = 2 x = 2."""
    assert saw["gradients pass"] == [[[12.0, 12.0]], [[2.0, 2.0], [2.0, 2.0]]]
    assert saw["gradient device"] == "cpu"


# --- the choice --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wanted, available, chosen",
    [
        ("auto", True, "cuda"),
        ("auto", False, "cpu"),
        ("cpu", True, "cpu"),
        ("cpu", False, "cpu"),
        ("cuda", True, "cuda"),
    ],
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
    """Found by the first process of the machine too: on the first machine it is the one that speaks."""
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ConfigError) as caught:
        device.start("cuda")
    assert str(caught.value) == (
        "5 processes were started on a machine that shows 4 GPUs.  Start at most 4 there, or use run.device=cpu."
    )


@pytest.mark.parametrize("local_rank, index", [(None, 0), ("0", 0), ("3", 3)])
def test_each_process_takes_the_gpu_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, local_rank: str | None, index: int
) -> None:
    """On CUDA nothing is redirected: the device is set and that is all."""
    taken: list[int] = []
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(device, "_redirect_cuda_to_cpu", lambda: pytest.fail("redirected on CUDA"))
    assert device.start("cuda") == torch.device("cuda", index)
    assert taken == [index]


def test_a_gpu_is_sent_tokens_without_waiting_for_it() -> None:
    """Only out of page-locked memory is a copy not waited for."""
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
