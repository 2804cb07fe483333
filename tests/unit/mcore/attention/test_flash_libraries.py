"""Flash kernels of libraries: their refusals, and the calls of their operators.  Replacements have the real
arguments."""

import importlib.metadata
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sft.mcore.attention import ffpa, flash2, flash4, package
from sft.mcore.attention.flash_kernel import Demand, FlashKernel, Operators
from sft.mcore.attention.packed_attention import packed_attention
from sft.mcore.attention.torch_kernel import TorchKernel
from sft.mcore.backends.selection import choose, slower_than_possible
from tests.builders import parsed
from tests.plain_flash import PLAIN

CPU = torch.device("cpu")
BOUNDARIES = np.array([0, 12, 20], dtype=np.int32)
SUM_TOLERANCE = 1e-12  # float64, sums in another order
BF16 = torch.bfloat16


def _options(softcap: float | None, left: int | None, right: int | None, causal: bool) -> dict[str, Any]:
    """The options as flash-attn-4 reads them: None and 0 mean no soft cap; a causal mask ends the window at the query's
    own key."""
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


@pytest.mark.parametrize(
    "name, window, softcap, is_deterministic",
    [
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
) -> None:
    operators, module = LIBRARIES[name]
    be(module)
    torch.use_deterministic_algorithms(is_deterministic)
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    generator = torch.Generator().manual_seed(3)
    shapes = (20, 4, 8), (20, 2, 8), (20, 2, 8), (20, 4, 8)
    *inputs, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    options: Any = {"window": window, "softcap": softcap}
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
NOT_COMPARED = "it was compared with plain torch on GPUs of compute capability 9.x only"


@pytest.mark.parametrize(
    "name, capability, width, reason",
    [
        ("flash4", (10, 0), 128, None),
        ("flash4", (10, 0), 256, UP_TO_256.replace("256", "192") + " 256 wide"),
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


def _broken(name: str) -> None:
    raise AttributeError("module 'cutlass' has no attribute 'cute'")


@pytest.mark.parametrize(
    "name, module, problem",
    [
        ("flash4", _broken, "flash-attn-4 1.0 cannot be imported (module 'cutlass' has no attribute 'cute')"),
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


def test_a_broken_package_is_warned_of(be: Be) -> None:
    be(_broken)
    wanted = parsed("attention.backend=portable", "model.sliding_window=64").config
    said = slower_than_possible(wanted, choose(wanted, "cuda"), "cuda")
    assert said is not None and said.splitlines()[1:] == [
        "It would be faster, but flash-attn-4 1.0 cannot be imported (module 'cutlass' has no attribute 'cute')."
    ]


def test_packages_to_install(be: Be) -> None:
    """By kind of layer; the log names each kernel."""
    be(SimpleNamespace(), release=None)
    overrides = ["model.sliding_window=64", "model.sliding_window_layers=[1]", "model.full_attention.head_dim=512"]
    overrides += ["model.rope.window_base=1e4", "attention.backend=portable"]
    wanted = parsed(*overrides).config
    said = slower_than_possible(wanted, choose(wanted, "cuda"), "cuda")
    assert said is not None
    first, wide, fast = said.splitlines()
    assert first == (
        "WARNING: attention runs on portable (window attention on torch's flash kernel, full attention on plain torch "
        f"({UP_TO_256} 512 wide))."
    )
    assert wide.endswith("pip install --no-deps ffpa-attn==0.2.4")
    assert fast.endswith('pip install "sft-megatron[kernels]"')
