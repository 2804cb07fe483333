"""What the operators of flash-attn-4 and ffpa-attn are called with: a replacement has the names of their arguments."""

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sft.mcore.attention import ffpa, flash4
from sft.mcore.attention.flash_kernel import Demand, FlashKernel, Operators
from sft.mcore.attention.packed_attention import packed_attention
from sft.mcore.attention.torch_kernel import TorchKernel
from tests.plain_flash import PLAIN

CPU = torch.device("cpu")
BOUNDARIES = np.array([0, 12, 20], dtype=np.int32)
SUM_TOLERANCE = 1e-12  # float64, sums in another order
BF16 = torch.bfloat16


def _options(softcap: float | None, left: int | None, right: int | None, causal: bool) -> dict[str, Any]:
    """As flash-attn-4 reads them: None and 0 are no soft cap; a causal mask ends the window at a query's own key."""
    assert causal and (right == 0) == (left is not None)
    return ({} if left is None else {"num_before": left}) | ({"softcap": softcap} if softcap else {})


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


def _ffpa_forward(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
    return _flash_attn_fwd(q, k, v, **named)[:2]  # type: ignore[return-value]


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> dict[str, Operators]:
    inner = SimpleNamespace(_flash_attn_fwd=_flash_attn_fwd, _flash_attn_bwd=_flash_attn_bwd)
    monkeypatch.setattr(flash4, "_library", lambda: inner)
    by_device = SimpleNamespace(
        _forward_impl_for_device=lambda device, width, value_width: _ffpa_forward,
        _backward_impl_for_device=lambda device, width, value_width: _flash_attn_bwd,
    )
    monkeypatch.setattr(ffpa, "_library", lambda: by_device)
    return {"flash4": flash4.FLASH4, "ffpa": ffpa.FFPA}


def attended(kernel: Any, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = packed_attention(*inputs, kernel, 0.5, None)  # type: ignore[arg-type]
    out.backward(grad)
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


@pytest.mark.parametrize(
    "name, window, softcap",
    [("flash4", None, None), ("flash4", 5, None), ("flash4", None, 2.0), ("flash4", 1, 2.0), ("ffpa", None, None)],
)
def test_numbers_are_those_of_the_tiles(
    libraries: dict[str, Operators], name: str, window: int | None, softcap: float | None
) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = (20, 4, 8), (20, 2, 8), (20, 2, 8), (20, 4, 8)
    *inputs, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    options: Any = {"window": window, "softcap": softcap}
    kernel = FlashKernel.of(BOUNDARIES, 1, 0, CPU, operators=libraries[name], **options)
    expected = attended(TorchKernel.of(BOUNDARIES, 1, 0, CPU, **options), inputs, grad)
    for a, b in zip(attended(kernel, inputs, grad), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=SUM_TOLERANCE)


@pytest.mark.parametrize(
    "operators, demand, reason",
    [
        (flash4.FLASH4, Demand("cpu", BF16, 128, 128), "it needs CUDA"),
        (flash4.FLASH4, Demand("cuda", torch.float32, 128, 128), "it computes in bf16 only"),
        (ffpa.FFPA, Demand("cuda", BF16, 256, 256), "it is for heads of more than 256"),
        (ffpa.FFPA, Demand("cpu", BF16, 512, 512), "it needs CUDA"),
        (ffpa.FFPA, Demand("cuda", torch.float32, 512, 512), "it computes in bf16 only"),
        (
            ffpa.FFPA,
            Demand("cuda", BF16, 512, 512, has_window=True),
            "it has no windows and no model.attention_softcap",
        ),
        (ffpa.FFPA, Demand("cuda", BF16, 512, 512, softcap=1.0), "it has no windows and no model.attention_softcap"),
        (ffpa.FFPA, Demand("cuda", BF16, 512, 128), "it needs values as wide as keys"),
        (ffpa.FFPA, Demand("cuda", BF16, 512, 512, is_deterministic=True), "it does not promise repeatable gradients"),
    ],
)
def test_layers_that_a_library_does_not_compute(operators: Operators, demand: Demand, reason: str) -> None:
    assert operators.why_not(demand) == reason


def _refuses_wide_values(width: int, value_width: int, major: int, alignment: int) -> None:
    assert alignment == 8  # numbers in bf16 of an access
    if value_width > 128:
        raise AssertionError(f"({width}, {value_width}) is not supported on SM{major}0")


@pytest.mark.parametrize(
    "capability, demand, reason",
    [
        ((9, 0), Demand("cuda", BF16, 128, 128, is_grouped=True, softcap=50.0), None),
        ((9, 0), Demand("cuda", BF16, 192, 128), None),
        (
            (9, 0),
            Demand("cuda", BF16, 192, 128, is_grouped=True),
            "its backward pass with grouped heads needs values as wide as keys",
        ),
        ((9, 0), Demand("cuda", BF16, 192, 192), "(192, 192) is not supported on SM90"),
        (
            (10, 0),
            Demand("cuda", BF16, 256, 128),
            "on Blackwell, its kernels for heads of 256 were not compared with others yet",
        ),
        ((8, 9), Demand("cuda", BF16, 128, 128), "it has kernels for GPUs of compute capability 9.x and 10.x"),
    ],
)
def test_flash_attention_4_by_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], demand: Demand, reason: str | None
) -> None:
    """As if the package and that GPU were there: what it refuses is asked of its own check."""
    inner = SimpleNamespace(
        _flash_attn_fwd=_flash_attn_fwd, _flash_attn_bwd=_flash_attn_bwd, _validate_head_dims=_refuses_wide_values
    )
    monkeypatch.setattr(flash4, "_library", lambda: inner)
    monkeypatch.setattr(flash4, "_missing", flash4._missing.__wrapped__)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "4.0.0b36")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert flash4.FLASH4.why_not(demand) == reason


def test_a_release_with_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = SimpleNamespace(_flash_attn_fwd=lambda q, k, v: None, _flash_attn_bwd=_flash_attn_bwd)
    monkeypatch.setattr(flash4, "_library", lambda: inner)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "4.0.1")
    assert flash4._missing.__wrapped__() == (
        "flash-attn-4 4.0.1 takes no causal and no cu_seqlens_k and no cu_seqlens_q and no max_seqlen_k and no "
        "max_seqlen_q and no softcap and no softmax_scale and no window_size_left and no window_size_right"
    )


def test_libraries_that_are_not_installed() -> None:
    for module in (flash4, ffpa):
        module._missing.cache_clear()
    for operators, package in ((flash4.FLASH4, "flash-attn-4"), (ffpa.FFPA, "ffpa-attn")):
        assert operators.missing() == f"{package} is not installed"
        assert operators.why_not(Demand("cuda", BF16, 512, 512)) == operators.missing()


@pytest.mark.parametrize("module, package", [(flash4, "flash-attn-4"), (ffpa, "ffpa-attn")])
def test_a_library_whose_parts_do_not_fit(monkeypatch: pytest.MonkeyPatch, module: Any, package: str) -> None:
    """As if it were installed: its import fails with whatever error its parts raise."""

    def broken() -> None:
        raise AttributeError("module 'cutlass' has no attribute 'cute'")

    monkeypatch.setattr(importlib.metadata, "version", lambda package: "1.0")
    monkeypatch.setattr(module, "_library", broken)
    problem = f"{package} 1.0 cannot be imported (module 'cutlass' has no attribute 'cute')"
    assert module._missing.__wrapped__() == problem
