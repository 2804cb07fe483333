"""The kernel of flash-linear-attention, whose function is replaced by the recurrence, and the choice of a kernel."""

import importlib.util
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from sft.errors import ConfigError
from sft.mcore.backends import kernels
from sft.mcore.linear_attention import fla_kernel
from sft.mcore.linear_attention.delta_rule import Fragments, Inputs, Kernel
from sft.mcore.linear_attention.fla_kernel import FlaKernel
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel
from tests.builders import parsed
from tests.unit.fixtures.recurrence import VALUE_HEADS, K, V, random_inputs, recurrence

BOUNDARIES, LINKED = [0, 5, 5, 12, 13, 30], [0, 1, 4]
FLOAT64_TOLERANCE = 1e-12


def replacement(
    *tensors: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """With the arguments and results of FLA's function."""
    assert use_qk_l2norm_in_kernel and torch.equal(cu_seqlens, cu_seqlens_cpu) and cu_seqlens.dtype == torch.int64
    boundaries = cu_seqlens.tolist()
    num_fragments = len(boundaries) - 1
    assert cu_seqlens[-1] > 0, "FLA takes no empty inputs"
    first: Any = [None] * num_fragments if initial_state is None else initial_state
    assert len(first) == num_fragments and all(len(x) == 1 for x in tensors)
    out, last = recurrence(Inputs(*(x[0] for x in tensors)), boundaries, first)
    return out[None], torch.stack(last) if output_final_state else None


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE)


@pytest.mark.parametrize(
    "boundaries, linked",
    [(BOUNDARIES, LINKED), (BOUNDARIES, []), ([0, 0, 0], [1])],
    ids=["linked", "whole", "no tokens"],
)
def test_maps_outputs_and_gradients_are_those_of_plain_torch(boundaries: list[int], linked: list[int]) -> None:
    inputs = Inputs(*(x.detach() for x in random_inputs(boundaries[-1])))
    fragments = Fragments.of(boundaries, linked)
    states, dlast = (random(len(linked), VALUE_HEADS, K, V) for _ in "ab") if linked else (None, None)
    grad = random(*inputs.v.shape)
    results = []
    kernels: list[Kernel] = [FlaKernel(replacement), TorchDeltaKernel()]
    for kernel in kernels:
        schedule = kernel.schedule(fragments, VALUE_HEADS, torch.device("cpu"))
        out, saved = kernel.forward(inputs, schedule, states)
        gradients = kernel.backward(grad, inputs, schedule, states, saved, dlast)
        maps = kernel.transitions(inputs, schedule)
        of_states = (kernel.state_gradients(grad, inputs, schedule),) if linked else ()
        results.append((out, *gradients, *maps, *of_states))
    close(*results)


def chosen(device_type: str, *overrides: str) -> Any:
    return kernels.KERNELS["linear attention"](parsed(*overrides).config, None, device_type).kernel


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if fla-core were there."""
    module: Any = types.ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = replacement
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_without_fla() -> None:
    """fla-core is not installed here."""
    assert str(chosen("cpu")) == "torch (plain torch)"
    assert str(chosen("cuda", "attention.delta_rule=torch")) == "torch (attention.delta_rule = torch)"
    found = chosen("cuda")
    assert isinstance(found, TorchDeltaKernel)
    assert str(found).startswith("torch (plain torch, slow on GPUs; not fla: fla cannot be imported (")
    with pytest.raises(ConfigError) as caught:
        chosen("cuda", "attention.delta_rule=fla")
    assert str(caught.value).startswith("attention.delta_rule = fla: fla cannot be imported (")
    assert str(caught.value).endswith(
        'Install it with: pip install "fla-core[cuda]>=0.6" (docs/start/install.md).  attention.delta_rule=torch runs '
        "everywhere."
    )


@pytest.mark.usefixtures("fla")
def test_with_fla() -> None:
    found = chosen("cuda")
    assert isinstance(found, FlaKernel) and found.operator is replacement
    assert str(found) == "fla (flash-linear-attention)"
    assert isinstance(chosen("cpu"), TorchDeltaKernel)
    assert isinstance(chosen("cuda", "attention.delta_rule=torch"), TorchDeltaKernel)


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize(
    "capability, triton, is_refused",
    [
        *[((9, 0), "3.3.1", False), ((9, 0), "3.4.0", True), ((9, 0), "3.6.0", True), ((9, 0), "3.7.0", True)],
        *[((9, 0), "3.7.1", False), ((9, 0), "3.10.0", False), ((10, 0), "3.6.0", False), ((8, 0), "3.6.0", False)],
    ],
)
def test_releases_of_triton_with_wrong_gradients(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], triton: str, is_refused: bool
) -> None:
    """Otherwise FLA would raise an error in the first backward pass, as on an H200 with Triton 3.6.0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(fla_kernel, "version", {"triton": triton}.__getitem__)
    by_fla = "fla (flash-linear-attention)"
    by_torch = (
        f"torch (plain torch, slow on GPUs; not fla: Triton {triton} computes wrong gradients on Hopper, and FLA "
        "refuses it.  Install Triton 3.7.1 or later, or tilelang)"
    )
    assert str(chosen("cuda")) == (by_torch if is_refused else by_fla)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "tilelang")
    assert str(chosen("cuda")) == by_fla  # FLA has a kernel of its own for it


@pytest.mark.usefixtures("fla")
def test_a_run_on_the_cpu_refuses_fla() -> None:
    """run.device is auto, so only the start knows the device."""
    with pytest.raises(ConfigError) as caught:
        chosen("cpu", "attention.delta_rule=fla")
    problem = "FLA needs CUDA, but this run is on the CPU"
    assert str(caught.value) == f"attention.delta_rule = fla: {problem}.  attention.delta_rule=torch runs everywhere."


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize(
    "override, problem",
    [
        ("run.device=cpu", "needs CUDA, and run.device is cpu"),
        ("run.precision=fp32", "computes in bf16, and run.precision is fp32"),
        ("run.deterministic=true", "is not bitwise repeatable"),
    ],
)
def test_what_fla_cannot_compute(override: str, problem: str) -> None:
    """A recipe that names fla is refused before the start; with auto, torch is used."""
    with pytest.raises(ConfigError, match=f"= fla {problem}; use torch or auto"):
        parsed("attention.delta_rule=fla", override)
    device = "cpu" if override == "run.device=cpu" else "cuda"
    assert isinstance(chosen(device, override), TorchDeltaKernel)
