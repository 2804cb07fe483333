"""The kernel of flash-linear-attention, whose functions are replaced by the recurrence, and the choice of a kernel."""

import importlib.util
import math
import sys
import types
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from sft.errors import ConfigError
from sft.mcore.backends import kernels
from sft.mcore.linear_attention import fla_functions, fla_kernel, ssd_fla
from sft.mcore.linear_attention.delta_rule import DeltaKernel, Inputs
from sft.mcore.linear_attention.fla_kernel import FlaKernel
from sft.mcore.linear_attention.recurrence import Fragments
from sft.mcore.linear_attention.recurrent_attention import recurrent_attention
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel
from tests.builders import parsed
from tests.unit.fixtures.recurrence import VALUE_HEADS, K, OneProcess, V, random_inputs, recurrence

BOUNDARIES, LINKED = [0, 5, 5, 12, 13, 30], [0, 1, 2]
FLOAT64_TOLERANCE = 1e-12


class Replacement:
    """FLA's inner functions of the rule, by the recurrence.

    Their tensors between two functions hold what the recurrence needs: `w` and the new values the inputs, states
    before chunks the initial states, and gradients of such states the gradients of outputs and of last states.
    """

    def __init__(self) -> None:
        self.calls, self.state_bytes = Counter[str](), 0

    def _boundaries(self, name: str, pack: dict[str, Any]) -> list[int]:
        self.calls[name] += 1
        boundaries: list[int] = pack["cu_seqlens"].tolist()
        assert boundaries[0] == 0 and boundaries[-1] > 0, "FLA takes no empty inputs"
        if name != "maps":
            counts = [-(-(stop - start) // 64) for start, stop in zip(boundaries, boundaries[1:])]
            assert pack["chunk_indices"].tolist() == [[i, j] for i, count in enumerate(counts) for j in range(count)]
            assert "chunk_offsets" not in pack or pack["chunk_offsets"].tolist() == [0, *accumulate(counts)]
        return boundaries

    def _count(self, *states: Tensor | None) -> None:
        self.state_bytes += sum(x.nbytes for x in states if x is not None)

    def l2norm_fwd(self, x: Tensor, eps: float) -> tuple[Tensor, None]:
        assert eps == 1e-6
        self.calls["norms"] += 1
        return x, None  # the recurrence normalises

    def l2norm_bwd(self, y: Tensor, rstd: None, dy: Tensor, eps: float) -> Tensor:
        self.calls["gradients of norms"] += 1
        return dy

    def chunk_local_cumsum(self, g: Tensor, **pack: Any) -> Tensor:
        self._boundaries("sums", pack)
        assert pack.get("scale") == (None if pack.get("reverse") else 1 / math.log(2))
        return g

    def chunk_gated_delta_rule_fwd_intra(self, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **pack: Any) -> Any:
        self._boundaries("systems", pack)
        return Inputs(*(x[0] for x in (k, k, v, g, beta))), None, None

    def chunk_cp_fwd_h(self, w: Inputs, hm: Tensor, multi_seqs: bool, **pack: Any) -> None:
        boundaries = self._boundaries("maps", pack)
        assert multi_seqs and len(hm) == len(boundaries) - 1
        first = pad(torch.eye(K, dtype=hm.dtype), (V, 0)).expand_as(hm)
        _, last = recurrence(w._replace(v=pad(w.v, (0, K))), boundaries, [*first])
        hm.copy_(torch.stack(last))

    def chunk_gated_delta_rule_fwd_h(self, w: Inputs, initial_state: Tensor | None, **pack: Any) -> tuple[Any, ...]:
        self._boundaries("states", pack)
        self._count(initial_state)
        assert not pack["output_final_state"]
        return initial_state, w, None

    def chunk_fwd_o(self, q: Tensor, v: Inputs, h: Tensor | None, **pack: Any) -> Tensor:
        boundaries = self._boundaries("outputs", pack)
        return recurrence(v._replace(q=q[0]), boundaries, states_of(h, boundaries))[0][None]

    def chunk_bwd_dv_local(self, do: Tensor, **pack: Any) -> Tensor:
        self._boundaries("gradients of values", pack)
        return do

    def chunk_gated_delta_rule_bwd_dhu(self, q: Tensor, w: Inputs, do: Tensor, **pack: Any) -> tuple[Any, ...]:
        boundaries, dstates = self._boundaries("gradients of states", pack), None
        self._count(pack["h0"], pack["dht"])
        if pack["h0"] is not None:
            assert pack["dht"] is None
            first = torch.zeros_like(pack["h0"]).requires_grad_()
            with torch.enable_grad():
                out, _ = recurrence(w._replace(q=q[0]), boundaries, [*first])
            (dstates,) = torch.autograd.grad(out, first, do[0])
        return (do[0], pack["dht"]), dstates, None

    def chunk_bwd_dqkwg(self, q: Tensor, v: Inputs, h: Tensor | None, dh: Any, **pack: Any) -> tuple[Any, ...]:
        boundaries, (dout, last) = self._boundaries("gradients", pack), dh
        leaves = Inputs(*(x.detach().requires_grad_() for x in v._replace(q=q[0])))
        with torch.enable_grad():
            out, ends = recurrence(leaves, boundaries, states_of(h, boundaries))
            results, grads = ((out,), (dout,)) if last is None else ((out, torch.stack(ends)), (dout, last))
        dq, dk, dv, dg, dbeta = (x[None] for x in torch.autograd.grad(results, leaves, grads))
        return dq, dk, (dv, dbeta), dg

    def prepare_wy_repr_bwd(self, k: Tensor, g: Tensor, dw: Any, **pack: Any) -> tuple[Any, ...]:
        self._boundaries("gradients of systems", pack)
        return torch.zeros_like(k), *dw, torch.zeros_like(g)


def states_of(states: Tensor | None, boundaries: list[int]) -> list[Any]:
    assert states is None or len(states) == len(boundaries) - 1
    return [None] * (len(boundaries) - 1) if states is None else [*states]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE)


@pytest.mark.parametrize(
    "boundaries, linked",
    [(BOUNDARIES, LINKED), (BOUNDARIES, []), ([0, 0, 0], [0])],
    ids=["linked", "whole", "no tokens"],
)
def test_maps_outputs_and_gradients_are_those_of_plain_torch(boundaries: list[int], linked: list[int]) -> None:
    inputs = Inputs(*(x.detach() for x in random_inputs(boundaries[-1])))
    fragments = Fragments.of(boundaries, linked)
    states = random(len(linked), VALUE_HEADS, K, V) if linked else None
    dlast = None if states is None else 1 - states
    grad = random(*inputs.v.shape)
    results = []
    kernels: list[DeltaKernel] = [FlaKernel(Replacement()), TorchDeltaKernel()]
    for kernel in kernels:
        schedule = kernel.schedule(fragments, VALUE_HEADS, torch.device("cpu"))
        prepared = kernel.prepared(inputs, schedule)
        out, saved = kernel.forward(prepared, schedule, states)
        gradients = kernel.backward(grad, prepared, schedule, states, saved, dlast)
        maps = kernel.transitions(prepared, schedule)
        of_states = (kernel.state_gradients(grad, prepared, schedule),) if linked else ()
        results.append((out, *gradients, *maps, *of_states))
    close(*results)


def test_only_linked_fragments_have_states_and_little_runs_twice() -> None:
    """A forward pass, its recomputation, and a backward pass, with 2 linked fragments and 40 others in two parts.

    By FLA's public function alone, maps were a forward pass of twice the width, and gradients of states were one more
    forward and backward pass.  Kernels are called for each of the two parts.
    """
    lengths, functions = [70, 65, *[3] * 40], Replacement()
    kernel, inputs = FlaKernel(functions), random_inputs(sum(lengths))
    schedule = kernel.schedule(Fragments.of(np.cumsum([0, *lengths]), [0, 1]), VALUE_HEADS, torch.device("cpu"))
    passing = OneProcess([[0, 1]])
    recurrent_attention(inputs, schedule, kernel, passing)
    recurrent_attention(inputs, schedule, kernel, passing).sum().backward()
    assert functions.calls == {
        **{"norms": 2 * 2 * 3, "sums": 2 * 4, "systems": 2 * 3, "states": 2 * 3, "outputs": 2 * 2},
        **{"gradients of values": 2, "gradients": 2, "gradients of systems": 2, "gradients of norms": 2 * 2},
        **{"maps": 2, "gradients of states": 2 + 1},
    }
    one_state = VALUE_HEADS * K * V * 8
    assert functions.state_bytes == (3 + 2) * 2 * one_state  # initial states; dh0 and dht


def test_linked_fragments_come_first() -> None:
    with pytest.raises(AssertionError, match="are not the first"):
        FlaKernel(Replacement()).schedule(Fragments.of(BOUNDARIES, [0, 2]), VALUE_HEADS, torch.device("cpu"))


def chosen(device_type: str, *overrides: str) -> Any:
    return kernels.KERNELS["linear attention"](parsed(*overrides).config, None, device_type).kernel


def modules_of_fla() -> dict[str, Any]:
    """Empty modules with the functions of FLA and their arguments."""
    modules: dict[str, Any] = {"fla": types.ModuleType("fla")}
    modules["fla"].__version__ = "0.6.0"
    for name, functions in fla_functions.FUNCTIONS.items():
        parents = name.split(".")
        for i in range(1, len(parents)):
            parent = ".".join(parents[:i])
            modules.setdefault(parent, types.ModuleType(parent))
        modules.setdefault(name, types.ModuleType(name))
        for function, arguments in functions.items():
            setattr(modules[name], function, eval(f"lambda {', '.join(arguments.split())}: None"))
    return modules


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """As if fla-core were there."""
    modules = modules_of_fla()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    fla_functions.functions.cache_clear()
    yield modules
    fla_functions.functions.cache_clear()


def test_the_norm_by_groups_writes_the_gradient_of_the_gate(
    fla: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ssd_fla.py passes a tensor for it, so an FLA that takes none is refused."""
    name = "fla.modules.norm.layernorm_gated"
    module: Any = types.ModuleType(name)
    common = "weight, bias, eps, z, group_size, norm_before_gate, is_rms_norm"
    module.layer_norm_fwd = eval(f"lambda x, {common}: None")
    module.layer_norm_bwd = eval(f"lambda dy, x, mean, rstd, {common}: None")
    monkeypatch.setitem(sys.modules, name, module)
    problem = fla_functions.problem(ssd_fla.FUNCTIONS)
    assert problem == f"{name}.layer_norm_bwd of fla-core 0.6.0 takes no dz.  {fla_functions.INSTALL}"
    module.layer_norm_bwd = eval(f"lambda dy, x, mean, rstd, dz, {common}: None")
    assert fla_functions.problem(ssd_fla.FUNCTIONS) is None


def test_without_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """fla-core is not installed, or as if it were not."""
    monkeypatch.setitem(sys.modules, "fla", None)
    assert str(chosen("cpu")) == "torch (plain torch)"
    assert str(chosen("cuda", "attention.delta_rule=torch")) == "torch (attention.delta_rule = torch)"
    found = chosen("cuda")
    assert isinstance(found, TorchDeltaKernel)
    assert str(found).startswith("torch (plain torch, slow on GPUs; not fla: fla cannot be imported (")
    with pytest.raises(ConfigError) as caught:
        chosen("cuda", "attention.delta_rule=fla")
    assert str(caught.value).startswith("attention.delta_rule = fla: fla cannot be imported (")
    assert str(caught.value).endswith(
        'Install it with: pip install "fla-core[cuda]>=0.6,<0.7" (docs/start/install.md).  attention.delta_rule=torch '
        "runs everywhere."
    )


def test_with_fla(fla: dict[str, Any]) -> None:
    found = chosen("cuda")
    assert isinstance(found, FlaKernel)
    assert found.functions.chunk_fwd_o is fla["fla.ops.common.chunk_o"].chunk_fwd_o
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


@pytest.mark.parametrize(
    "change, problem",
    [
        (("fla", "__version__", "0.5.2"), "fla-core 0.5.2 is installed, and its inner functions are not known.  "),
        (("fla", "__version__", "0.7.0"), "fla-core 0.7.0 is installed, and its inner functions are not known.  "),
        (
            ("fla.ops.cp.chunk_fwd", "chunk_cp_fwd_h", lambda k, w, u, hm, g, chunk_size: None),
            "fla.ops.cp.chunk_fwd.chunk_cp_fwd_h of fla-core 0.6.0 takes no gk and no cu_seqlens and no multi_seqs.  ",
        ),
        (
            ("fla.ops.cp.chunk_fwd", "chunk_cp_fwd_h", None),
            "fla-core 0.6.0 has no function fla.ops.cp.chunk_fwd.chunk_",
        ),
    ],
    ids=["older", "newer", "other arguments", "no function"],
)
def test_other_releases_of_fla(
    fla: dict[str, Any], monkeypatch: pytest.MonkeyPatch, change: tuple[str, str, Any], problem: str
) -> None:
    """Their inner functions may compute something else."""
    module, name, value = change
    if value is None:
        monkeypatch.delattr(fla[module], name)
    else:
        monkeypatch.setattr(fla[module], name, value)
    assert str(chosen("cuda")).startswith(f"torch (plain torch, slow on GPUs; not fla: {problem}")


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
