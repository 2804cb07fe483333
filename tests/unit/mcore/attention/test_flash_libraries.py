"""Flash kernels of libraries: their refusals, and the calls of their operators.  Replacements have the real
arguments."""

import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sft.mcore.attention import ffpa, flash2, flash3, flash4, package
from sft.mcore.attention.flash_kernel import Demand, FlashKernel, Operators
from sft.mcore.attention.packed_attention import packed_attention
from sft.mcore.attention.torch_kernel import TorchKernel
from sft.parallel.branches import Branches
from tests.plain_flash import PLAIN

CPU = torch.device("cpu")
BOUNDARIES = np.array([0, 12, 20], dtype=np.int32)
SUM_TOLERANCE = 1e-12  # float64, sums in another order
BF16 = torch.bfloat16


def _options(softcap: float | None, left: int | None, right: int | None, causal: bool) -> dict[str, Any]:
    """The options as flash-attn-4 reads them: None and 0 mean no soft cap; a causal mask ends the window at the query's
    own key."""
    assert (right == 0) == (left is not None) and (causal or left is None)
    window = {"causal": False} if not causal else {} if left is None else {"num_before": left}
    return window | ({"softcap": softcap} if softcap else {})


def _flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool = False,
    softcap: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    return_lse: bool = False,
) -> tuple[Tensor | None, ...]:
    assert return_lse
    options = _options(softcap, window_size_left, window_size_right, causal)
    sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return *PLAIN.forward(q, k, v, *sequences, scale=softmax_scale, **options), None, None, None


def _flash_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    options = _options(softcap, window_size_left, window_size_right, causal)
    sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return PLAIN.backward(dout, q, k, v, out, lse, *sequences, scale=softmax_scale, **options)


class _Operator:
    """A function as an operator of torch: a schema with the names of the arguments, and no signature."""

    def __init__(self, function: Callable[..., Any]) -> None:
        arguments = [SimpleNamespace(name=name) for name in inspect.signature(function).parameters]
        self.function, self.default = function, SimpleNamespace(_schema=SimpleNamespace(arguments=arguments))

    def __call__(self, **named: Any) -> Any:
        return self.function(**named)


def _flash3_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    num_splits: int = 0,
) -> tuple[Tensor | None, ...]:
    assert window_size_right == (0 if is_causal else -1) and num_splits == 1
    sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    options: Any = {"scale": softmax_scale, "num_before": window_size_left, "causal": is_causal}
    return *PLAIN.forward(q, k, v, *sequences, **options), None, None


def _flash3_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    deterministic: bool = False,
) -> tuple[Tensor, ...]:
    """The library writes into dq, dk and dv, and returns working memory."""
    assert window_size_right == (0 if is_causal else -1)
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    options: Any = {"scale": softmax_scale, "num_before": window_size_left, "causal": is_causal}
    found = PLAIN.backward(dout, q, k, v, out, softmax_lse, *sequences, **options)
    for ours, gradient in zip((dq, dk, dv), found):
        ours.copy_(gradient)
    return (torch.zeros(1),)


def _ffpa_forward(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
    return _flash_attn_fwd(q, k, v, **named)[:2]  # type: ignore[return-value]


Be = Callable[..., None]


@pytest.fixture
def be(monkeypatch: pytest.MonkeyPatch) -> Iterator[Be]:
    """Pretends that this module of the package and this GPU exist; with `release` None, the package is not
    installed."""

    def make(module: Any, capability: tuple[int, int] = (9, 0), release: str | None = "1.0") -> None:
        def version(name: str) -> str:
            if release is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return release

        package._broken.cache_clear()
        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(package, "_imported", module if callable(module) else lambda name: module)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    yield make
    package._broken.cache_clear()


def _refuses_wide_values(width: int, value_width: int, major: int, alignment: int) -> None:
    assert alignment == 8  # bf16 elements in one memory access
    if value_width > 128:
        raise AssertionError(f"({width}, {value_width}) is not supported on SM{major}0")


LIBRARIES: dict[str, tuple[Operators, Any]] = {
    "flash2": (flash2.FLASH2, None),  # of torch itself
    "flash3": (
        flash3.FLASH3,
        SimpleNamespace(flash_attn_3_gpu=SimpleNamespace(fwd=_Operator(_flash3_fwd), bwd=_Operator(_flash3_bwd))),
    ),
    "flash4": (
        flash4.FLASH4,
        SimpleNamespace(
            _flash_attn_fwd=_flash_attn_fwd, _flash_attn_bwd=_flash_attn_bwd, _validate_head_dims=_refuses_wide_values
        ),
    ),
    "ffpa": (
        ffpa.FFPA,
        SimpleNamespace(
            _forward_impl_for_device=lambda device, width, value_width: _ffpa_forward,
            _backward_impl_for_device=lambda device, width, value_width: _flash_attn_bwd,
        ),
    ),
}


def attended(kernel: Any, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = packed_attention(*inputs, kernel, 0.5, None)  # type: ignore[arg-type]
    out.backward(grad)
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


@pytest.mark.parametrize("branches", [None, Branches.of([-1, 0], [0, 7])], ids=["", "branches"])
@pytest.mark.parametrize(
    "name, window, softcap, is_deterministic",
    [
        ("flash3", None, None, True),
        ("flash3", 5, None, False),
        ("flash4", None, None, True),
        ("flash4", 5, None, False),
        ("flash4", None, 2.0, False),
        ("flash4", 1, 2.0, True),
        ("ffpa", None, None, False),
    ],
)
def test_numbers_are_those_of_the_tiles(
    be: Be,
    request: pytest.FixtureRequest,
    name: str,
    window: int | None,
    softcap: float | None,
    is_deterministic: bool,
    branches: Branches | None,
) -> None:
    operators, module = LIBRARIES[name]
    be(module)
    torch.use_deterministic_algorithms(is_deterministic)
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    generator = torch.Generator().manual_seed(3)
    shapes = (20, 4, 8), (20, 2, 8), (20, 2, 8), (20, 4, 8)
    *inputs, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    options: Any = {"window": window, "softcap": softcap, "branches": branches}
    kernel = FlashKernel.of(BOUNDARIES, 1, 0, CPU, operators=operators, **options)
    expected = attended(TorchKernel.of(BOUNDARIES, 1, 0, CPU, **options), inputs, grad)
    for a, b in zip(attended(kernel, inputs, grad), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=SUM_TOLERANCE)


WIDE = Demand("cuda", BF16, 512, 512)
NO_WINDOWS = "it has no windows and no model.attention_softcap"
UP_TO_256 = "it has heads of up to 256 in multiples of 8, but heads of this model are"


@pytest.mark.parametrize(
    "name, demand, reason",
    [
        ("flash2", Demand("cpu", BF16, 128, 128), "it needs CUDA"),
        ("flash2", Demand("cuda", torch.float32, 128, 128), "it computes in bf16 only"),
        ("flash2", Demand("cuda", BF16, 288, 288), f"{UP_TO_256} 288 wide"),
        ("flash2", Demand("cuda", BF16, 128, 128), None),
        ("flash3", Demand("cpu", BF16, 128, 128), "it needs CUDA"),
        ("flash3", Demand("cuda", BF16, 128, 128, heads_per_key=7, has_window=True, is_deterministic=True), None),
        ("flash3", Demand("cuda", BF16, 192, 128), None),
        ("flash3", Demand("cuda", BF16, 256, 256), None),
        ("flash3", Demand("cuda", BF16, 128, 64), "it has no kernel for keys of width 128 with values of width 64"),
        ("flash3", Demand("cuda", BF16, 192, 64), "it has no kernel for keys of width 192 with values of width 64"),
        ("flash3", Demand("cuda", BF16, 264, 264), f"{UP_TO_256} 264 wide"),
        (
            "flash3",
            Demand("cuda", BF16, 128, 128, softcap=50.0),
            "nobody has compared its gradients with model.attention_softcap",
        ),
        (
            "flash3",
            Demand("cuda", BF16, 200, 200, is_deterministic=True),
            "its gradients of heads wider than 192 are not deterministic",
        ),
        ("flash4", Demand("cpu", BF16, 128, 128), "it needs CUDA"),
        ("flash4", Demand("cuda", torch.float32, 128, 128), "it computes in bf16 only"),
        ("flash4", Demand("cuda", BF16, 128, 128, heads_per_key=7, softcap=50.0, is_deterministic=True), None),
        ("flash4", Demand("cuda", BF16, 192, 128), None),
        (
            "flash4",
            Demand("cuda", BF16, 192, 128, heads_per_key=2),
            "its backward pass with grouped heads needs values as wide as keys",
        ),
        ("flash4", Demand("cuda", BF16, 192, 192), "(192, 192) is not supported on SM90"),
        ("flash4", Demand("cuda", BF16, 264, 264), f"{UP_TO_256} 264 wide"),
        ("flash4", Demand("cuda", BF16, 100, 100), f"{UP_TO_256} 100 wide"),
        ("ffpa", Demand("cuda", BF16, 256, 256), "it is for heads of 512"),
        ("ffpa", Demand("cuda", BF16, 512, 128), "it is for heads of 512"),
        ("ffpa", WIDE._replace(device_type="cpu"), "it needs CUDA"),
        ("ffpa", WIDE._replace(dtype=torch.float32), "it computes in bf16 only"),
        ("ffpa", WIDE._replace(has_window=True), NO_WINDOWS),
        ("ffpa", WIDE._replace(softcap=1.0), NO_WINDOWS),
        ("ffpa", WIDE._replace(heads_per_key=8), None),
        ("ffpa", WIDE._replace(heads_per_key=7), "the query heads of a key head, here 7, must divide 64"),
        ("ffpa", WIDE._replace(is_deterministic=True), "it does not promise repeatable gradients"),
    ],
)
def test_layers_on_hopper(be: Be, name: str, demand: Demand, reason: str | None) -> None:
    """flash-attn-4's own check also decides what it refuses."""
    operators, module = LIBRARIES[name]
    be(module)
    assert operators.why_not(demand) == reason


OTHER_GPU = "it has kernels for GPUs of compute capability 9.x and 10.x"
WIDE_ON_BLACKWELL = "its heads of 256 were not compared with plain torch on GPUs of compute capability 10.x"
NOT_COMPARED = "it was compared with plain torch on GPUs of compute capability 9.x only"


@pytest.mark.parametrize(
    "name, capability, width, reason",
    [
        ("flash2", (7, 5), 128, "it needs a GPU of compute capability 8.0 or more"),
        ("flash3", (10, 0), 128, "it has kernels for GPUs of compute capability 9.x"),
        ("flash3", (8, 9), 128, "it has kernels for GPUs of compute capability 9.x"),
        ("flash4", (10, 0), 128, None),
        ("flash4", (10, 0), 256, WIDE_ON_BLACKWELL),
        ("flash4", (10, 0), 264, f"{UP_TO_256} 264 wide"),
        ("flash4", (8, 9), 128, OTHER_GPU),
        ("flash4", (12, 0), 128, OTHER_GPU),
        ("ffpa", (10, 0), 512, NOT_COMPARED),
        ("ffpa", (8, 9), 512, NOT_COMPARED),
        ("ffpa", (12, 0), 512, NOT_COMPARED),
    ],
)
@pytest.mark.parametrize("release", [None, "1.0"])
def test_other_gpus(
    be: Be, name: str, capability: tuple[int, int], width: int, reason: str | None, release: str | None
) -> None:
    """A package that cannot run on this GPU is not imported."""
    operators, module = LIBRARIES[name]
    be(module, capability, release)
    if release is None and reason is None:
        assert operators.package is not None
        reason = operators.package.absent()
    assert operators.why_not(Demand("cuda", BF16, width, width)) == reason


def test_narrow_values_of_groups_are_refused_on_hopper_alone() -> None:
    """MiMo-V2-Flash: the package's backward pass for Blackwell compiles (docs/numbers/kernels.md)."""
    operators, _ = LIBRARIES["flash4"]
    demand = Demand("cuda", BF16, 192, 128, heads_per_key=16)
    refused = {major: operators.refused(demand._replace(capability=(major, 0))) for major in (9, 10)}
    assert refused == {9: "its backward pass with grouped heads needs values as wide as keys", 10: None}


def _broken(name: str) -> None:
    raise AttributeError("module 'cutlass' has no attribute 'cute'")


@pytest.mark.parametrize(
    "name, module, problem",
    [
        ("flash4", _broken, "flash-attn-4 1.0 cannot be imported (module 'cutlass' has no attribute 'cute')"),
        ("flash3", _broken, "flash-attn-3 1.0 cannot be imported (module 'cutlass' has no attribute 'cute')"),
        ("flash3", SimpleNamespace(), "flash-attn-3 1.0 has no function flash_attn_3_gpu.fwd"),
        (
            "flash3",
            SimpleNamespace(flash_attn_3_gpu=SimpleNamespace(fwd=_Operator(_flash3_fwd), bwd=_Operator(_flash3_fwd))),
            "the function flash_attn_3_gpu.bwd of flash-attn-3 1.0 takes no deterministic and no dk and no dout and no "
            "dq and no dv and no out and no softmax_lse",
        ),
        ("ffpa", _broken, "ffpa-attn 1.0 cannot be imported (module 'cutlass' has no attribute 'cute')"),
        ("ffpa", SimpleNamespace(), "ffpa-attn 1.0 has no function _forward_impl_for_device"),
        (
            "flash4",
            SimpleNamespace(_flash_attn_fwd=_flash_attn_fwd, _flash_attn_bwd=lambda q, deterministic: None),
            "the function _flash_attn_bwd of flash-attn-4 1.0 takes no causal and no cu_seqlens_k and no cu_seqlens_q "
            "and no max_seqlen_k and no max_seqlen_q and no softcap and no softmax_scale and no window_size_left and "
            "no window_size_right",
        ),
    ],
)
def test_a_package_whose_parts_do_not_fit(be: Be, name: str, module: Any, problem: str) -> None:
    """The next kernel is used."""
    be(module)
    demand = WIDE if name == "ffpa" else Demand("cuda", BF16, 128, 128)
    assert LIBRARIES[name][0].why_not(demand) == problem


@pytest.mark.parametrize(
    "left_out, demand, reason",
    [
        ("FLASHATTENTION_DISABLE_BACKWARD", Demand("cuda", BF16, 128, 128), "BACKWARD"),
        ("FLASHATTENTION_DISABLE_HDIM128", Demand("cuda", BF16, 104, 104), "HDIM128"),
        ("FLASHATTENTION_DISABLE_HDIM128", Demand("cuda", BF16, 64, 64), None),
        ("FLASH_ATTENTION_DISABLE_HDIMDIFF192", Demand("cuda", BF16, 192, 128), "HDIMDIFF192"),
        ("FLASHATTENTION_DISABLE_LOCAL", Demand("cuda", BF16, 128, 128, has_window=True), "LOCAL"),
        ("FLASHATTENTION_DISABLE_LOCAL", Demand("cuda", BF16, 128, 128), None),
    ],
)
def test_a_build_without_some_kernels(
    be: Be, monkeypatch: pytest.MonkeyPatch, left_out: str, demand: Demand, reason: str | None
) -> None:
    """FlashAttention-3 says what its build leaves out."""
    be(LIBRARIES["flash3"][1])
    config = SimpleNamespace(CONFIG={"build_flags": {left_out: True, "FLASHATTENTION_DISABLE_FP16": True}})
    monkeypatch.setitem(sys.modules, "flash_attn_config", config)
    expected = None if reason is None else f"this build of flash-attn-3 leaves out {reason}"
    assert flash3.FLASH3.why_not(demand) == expected


def test_what_flash_attn_4_refuses_while_it_compiles() -> None:
    """The part of its source that flash4.py repeats, if it is installed: no function of the library says it."""
    found = importlib.util.find_spec("flash_attn")
    places = [Path(place) / "cute" for place in (found.submodule_search_locations or [])] if found else []
    if not any((place / "flash_bwd_sm90.py").is_file() for place in places):
        pytest.skip("flash-attn-4 is not installed")
    source = "".join((place / "flash_bwd_sm90.py").read_text(encoding="utf-8") for place in places)
    assert re.search(r"if qhead_per_kvhead > 1:\s+assert self\.same_hdim_kv", source)


def test_a_gpu_of_another_maker_has_torchs_kernel_only(be: Be, monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's MI300X reports compute capability 9.4."""
    be(LIBRARIES["flash4"][1])
    monkeypatch.setattr(torch.version, "hip", "7.0")
    demand = Demand("cuda", BF16, 128, 128)
    assert flash2.FLASH2.refused(demand) is None
    assert flash3.FLASH3.refused(demand) and flash4.FLASH4.refused(demand) and ffpa.FFPA.refused(demand)
