"""The attention backend that a run gets, and the log lines about it."""

import importlib.metadata
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sft.config import Config
from sft.errors import ConfigError
from sft.mcore import fp8
from sft.mcore.attention.flash_kernel import Demand, FlashKernel, Operators
from sft.mcore.attention.torch_kernel import TorchKernel
from sft.mcore.backends import kernels, transformer_engine
from sft.mcore.backends.portable import Portable
from sft.mcore.backends.selection import choose
from sft.mcore.modules.library import FusedNormLibrary, LocalLibrary, TransformerEngineLibrary
from sft.parallel.cp_group import CpGroup
from tests.builders import RECIPE, parsed, refusal_lines


def config(*overrides: str) -> Config:
    return parsed(*overrides).config


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that Transformer Engine 2.9 is installed."""
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "2.9.0+abc")


@pytest.fixture
def without_te(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes imports of Transformer Engine fail, as they do where it is not installed."""
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)


def test_without_the_flash_kernel() -> None:
    assert str(choose(config(), "cpu")) == "portable (plain torch, no flash kernel: it needs CUDA)"
    exact = config("run.precision=fp32", "attention.backend=portable")
    assert str(choose(exact, "cuda")) == "portable (plain torch, no flash kernel: it computes in bf16 only)"


def test_a_soft_cap_takes_the_plain_kernel() -> None:
    found = choose(config("model.attention_softcap=50", "attention.backend=portable"), "cuda")
    assert str(found) == "portable (plain torch, no flash kernel: it has no model.attention_softcap)"
    positions = torch.arange(8)[None]
    kernels = found.documents(torch.tensor([0, 8], dtype=torch.int32), 8, positions, CpGroup(1, 0, None)).kernels
    kernel = kernels["full attention"]
    assert isinstance(kernel, TorchKernel) and kernel.softcap == 50.0


# Kinds of attention that Transformer Engine does not have, or not as the model means them.
ONLY_PORTABLE = {
    "model.sliding_window": ["model.sliding_window=128"],
    "model.attention_softcap": ["model.attention_softcap=50"],
    "model.attention_sinks": ["model.attention_sinks=true"],
    "model.value_norm": ["model.value_norm=true"],
    "model.rope.scaling = proportional": ["model.rope.scaling=proportional"],
}
# Parts of layers beside attention; Transformer Engine's modules, or this trainer's norms and activations, compute them.
OTHERS = {
    "model.norm_placement = post": ["model.norm_placement=post"],
    "model.norm_placement = both": ["model.norm_placement=both"],
    "model.qk_norm_across_heads": ["model.qk_norm=true", "model.qk_norm_across_heads=true"],
    "model.qk_norm_weights": ["model.qk_norm=true", "model.qk_norm_weights=false"],
    "model.attention_output_bias": ["model.attention_output_bias=true"],
    "model.mlp_bias": ["model.mlp_bias=true"],
    "model.activation = geglu": ["model.activation=geglu"],
    "model.activation = clamped_swiglu": [
        "model.activation=clamped_swiglu", "model.activation_limit=7", "model.activation_alpha=1.7",
    ],
    "model.layer_scalar": ["model.layer_scalar=true"],
    "model.moe.router_bias": ["model.moe.num_experts=4", "model.moe.top_k=2", "model.moe.router_bias=true"],
}  # fmt: skip


@pytest.mark.parametrize("kind", ONLY_PORTABLE)
def test_kinds_of_layers_that_only_portable_has(te: None, kind: str) -> None:
    """auto takes portable and says why; te is refused by the name of the kind.  The modules are te's all the same."""
    found = choose(config(*ONLY_PORTABLE[kind]), "cuda")
    assert found.name == "portable" and f"; not te: only the portable backend has {kind})" in str(found)
    assert str(found.library) == "te (norms stay torch's)"
    with pytest.raises(ConfigError, match=f"does not have {kind}"):
        config(*ONLY_PORTABLE[kind], "attention.backend=te")


@pytest.mark.parametrize("kind", OTHERS)
def test_kinds_of_layers_whose_attention_may_be_te(te: None, kind: str) -> None:
    found = choose(config(*OTHERS[kind]), "cuda")
    assert found.name == "te" and isinstance(found.library, TransformerEngineLibrary)
    has_norms_apart = "norm" in kind
    assert isinstance(found.library, FusedNormLibrary) is not has_norms_apart
    assert found.library.marks_norms is has_norms_apart


@pytest.mark.parametrize("placement, fits", [("null", True), ("pre", True), ("post", False)])
def test_norms_inside_of_projections_need_norms_before_linear_attention(placement: str, fits: bool) -> None:
    linear = f"{{layers: [1], num_key_heads: 2, num_value_heads: 2, norm_placement: {placement}}}"
    assert FusedNormLibrary.fits(config(f"model.linear_attention={linear}").model) is fits


WINDOW = "model.sliding_window=128"
EXPERTS = ["model.moe.num_experts=4", "model.moe.top_k=2"]


def test_modules_are_a_choice_of_their_own(te: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside attention that is portable by the recipe, or because of the model; FP8 needs modules only."""
    for overrides in ([WINDOW], ["attention.backend=portable"]):
        found = choose(config(*overrides), "cuda").library
        assert type(found) is TransformerEngineLibrary and found.marks_norms
        assert choose(config(*overrides), "cpu").library.name == "local"
        local = choose(config(*overrides, "run.modules=local"), "cuda").library
        assert (type(local), str(local)) == (LocalLibrary, "local")
    assert choose(config("run.modules=local"), "cuda").name == "portable"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert choose(config(WINDOW, "run.fp8=blockwise"), "cuda").library.is_te
    with pytest.raises(ConfigError, match=r"run.fp8 = mxfp8: it needs a GPU of compute capability 10.0"):
        choose(config(WINDOW, "run.fp8=mxfp8"), "cuda")


def test_modules_without_transformer_engine(without_te: None) -> None:
    found = choose(config(WINDOW), "cuda").library
    assert str(found).startswith("local (not te: transformer_engine cannot be imported (")
    for overrides, key in ((["run.modules=te"], "run.modules = te: t"), (["run.fp8=delayed"], "run.fp8 = delayed n")):
        with pytest.raises(ConfigError, match=key):
            choose(config(WINDOW, *overrides), "cuda")


@pytest.mark.parametrize(
    "overrides, key, reason",
    [
        (["run.modules=te", "run.device=cpu"], "run.modules", "needs CUDA"),
        (["run.modules=te", "run.precision=fp32"], "run.modules", "needs run.precision = bf16"),
        (["run.modules=local", "run.fp8=delayed"], "run.fp8", "run.modules is local"),
        (["run.modules=local", "attention.backend=te"], "run.modules", "does not fit attention.backend = te"),
        ([*EXPERTS, "model.mlp_bias=true", "parallel.etp=2", "run.fp8=delayed"], "run.fp8", "would have it 2 times"),
        ([*EXPERTS, "model.mlp_bias=true", "parallel.etp=2", "run.modules=te"], "run.modules", "would have it 2 times"),
    ],
)
def test_refused_modules(overrides: list[str], key: str, reason: str) -> None:
    lines = " ".join(refusal_lines(RECIPE, *overrides))
    assert key.split(".")[-1] in lines and reason in lines


def test_biases_of_experts_over_etp_stay_local(te: None) -> None:
    """auto says why."""
    found = choose(config(*EXPERTS, "model.mlp_bias=true", "parallel.etp=2"), "cuda")
    assert found.name == "portable" and "not te: its experts have the whole second bias" in str(found.library)


def test_without_transformer_engine(without_te: None) -> None:
    found = choose(config(), "cuda")
    assert isinstance(found, Portable)
    assert {kind: kernel.name for kind, kernel in found.chosen.items()} == {"full attention": "torch's flash kernel"}
    assert str(found).startswith("portable (torch's flash kernel; not te: transformer_engine cannot be imported (")
    assert str(choose(config("attention.backend=portable"), "cuda")) == "portable (torch's flash kernel)"
    with pytest.raises(ConfigError) as caught:
        choose(config("attention.backend=te"), "cuda")
    assert str(caught.value).startswith("attention.backend = te: transformer_engine cannot be imported (")
    assert str(caught.value).endswith(
        'Install it with: pip install --no-build-isolation "transformer-engine[pytorch]" (docs/start/install.md).  '
        "attention.backend=portable runs everywhere."
    )


WIDE = ["model.sliding_window=64", "model.sliding_window_layers=[1]", "model.full_attention.head_dim=512"]
WIDE += ["model.rope.window_base=1e4"]


def test_heads_that_are_too_wide_for_the_flash_kernel() -> None:
    """Layers without a window have heads of 512; layers with a window have heads that the kernel supports."""
    found = choose(config(*WIDE, "attention.backend=portable"), "cuda")
    assert isinstance(found, Portable)
    assert str(found) == (
        "portable (window attention on torch's flash kernel, full attention on plain torch (it has heads of up to 256 "
        "in multiples of 8, but heads of this model are 512 wide))"
    )
    lengths = np.array([0, 128], dtype=np.int32)
    make: Any = found.kernels["full attention"]
    assert isinstance(make(lengths, 1, 0, torch.device("cpu"), window=None), TorchKernel)
    in_windows: Any = found.kernels["window attention"]
    assert isinstance(in_windows(lengths, 1, 0, torch.device("cpu"), window=64), FlashKernel)
    assert "plain torch, no flash kernel" in str(choose(config(*WIDE), "cpu"))


def test_what_a_kernel_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is asked once for each kind of layer."""
    asked: list[Demand] = []
    refusing = Operators(*2 * [lambda *_: None], lambda demand: asked.append(demand) or "no")  # type: ignore[arg-type]
    monkeypatch.setattr(kernels, "FLASH", {"a kernel": refusing})
    groups = ["model.num_attention_heads=8", "model.num_query_groups=2", "model.full_attention.num_query_groups=1"]
    choose(config(*WIDE, *groups, "model.head_dim=64", "run.deterministic=true", "attention.backend=portable"), "cuda")
    narrow = Demand("cuda", torch.bfloat16, 64, 64, heads_per_key=4, has_window=True, is_deterministic=True)
    wide = Demand("cuda", torch.bfloat16, 512, 512, heads_per_key=8, is_deterministic=True)
    assert asked == [narrow, wide]
    choose(config("model.attention_softcap=50", "attention.backend=portable"), "cuda")
    assert asked[-1].softcap == 50.0


def test_with_transformer_engine(te: None) -> None:
    assert str(choose(config(), "cuda")) == "te (Transformer Engine)"
    assert choose(config("attention.backend=portable"), "cuda").name == "portable"
    # there are no keys and values to send
    assert choose(config("parallel.cp_comm=a2a", "parallel.cp=1"), "cuda").name == "te"


@pytest.mark.parametrize(
    "way, since, before, sizes",
    [
        ("a2a", "2.10", "2.9.0+abc", ["parallel.cp=2"]),
        ("all_gather", "2.18", "2.9.0+abc", ["parallel.cp=2"]),
        ("a2a+p2p", "2.19", "2.18.0", ["parallel.cp=4", "parallel.cp_a2a=2"]),
    ],
)
def test_a_release_that_cannot_is_refused(
    te: None, monkeypatch: pytest.MonkeyPatch, way: str, since: str, before: str, sizes: list[str]
) -> None:
    wanted = config(f"parallel.cp_comm={way}", *sizes)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: before)
    with pytest.raises(ConfigError) as caught:
        choose(wanted, "cuda")
    assert str(caught.value) == (
        f"parallel.cp_comm = {way} needs Transformer Engine {since} or newer for packed documents, but {before} is "
        "installed.  parallel.cp_comm=p2p works."
    )
    monkeypatch.setattr(importlib.metadata, "version", lambda package: f"{since}.0")
    assert choose(wanted, "cuda").name == "te"


@pytest.fixture
def gpu(te: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int], str, str], None]:
    """Pretends that this GPU, this release of Transformer Engine and this CUDA exist."""

    def be(capability: tuple[int, int], release: str = "2.20.2", cuda: str = "13.0") -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(importlib.metadata, "version", lambda package: release)
        monkeypatch.setattr(torch.version, "cuda", cuda)

    return be


ADA, HOPPER, BLACKWELL, CONSUMER = (8, 9), (9, 0), (10, 0), (12, 0)
DO_FP8 = {
    (8, 0): [],
    ADA: ["delayed", "tensorwise"],
    HOPPER: ["delayed", "tensorwise", "blockwise"],
    BLACKWELL: ["delayed", "tensorwise", "blockwise", "mxfp8"],
    CONSUMER: ["delayed", "tensorwise", "blockwise"],
}


@pytest.mark.parametrize("capability, able", DO_FP8.items())
def test_fp8_by_gpu(gpu: Callable[..., None], capability: tuple[int, int], able: list[str]) -> None:
    gpu(capability)
    for name in ("delayed", "tensorwise", "blockwise", "mxfp8"):
        if name in able:
            assert choose(config(f"run.fp8={name}"), "cuda").name == "te"
        else:
            with pytest.raises(ConfigError, match=f"^run.fp8 = {name}: it needs a GPU of compute capability"):
                choose(config(f"run.fp8={name}"), "cuda")


def test_fp8_refused(gpu: Callable[..., None]) -> None:
    gpu(HOPPER)
    with pytest.raises(ConfigError) as caught:
        choose(config("run.fp8=mxfp8"), "cuda")
    assert str(caught.value) == (
        "run.fp8 = mxfp8: it needs a GPU of compute capability 10.0 or more, below 12.0 (Blackwell of data centres), "
        "but this GPU has 9.0.  This GPU can run: delayed, tensorwise, blockwise, null."
    )
    gpu(HOPPER, "2.20.2", "12.8")
    with pytest.raises(ConfigError) as caught:
        choose(config("run.fp8=blockwise"), "cuda")
    assert str(caught.value) == (
        "run.fp8 = blockwise: it needs CUDA 12.9, but torch was built for 12.8.  This GPU can run: delayed, "
        "tensorwise, null."
    )


def test_deterministic_attention_of_transformer_engine(
    gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper for short packs only, and on Blackwell from cuDNN 9.18.1 on, by the source of Transformer Engine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    wanted = config("run.deterministic=true", "data.seq_length=1024")
    for capability, cudnn, name in (
        (HOPPER, 92000, "te"),
        (BLACKWELL, 91800, "portable"),
        (BLACKWELL, 91801, "te"),
        (ADA, 92000, "portable"),
    ):
        gpu(capability)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        assert choose(wanted, "cuda").name == name
    for overrides, reason in (
        (
            ["data.seq_length=8192", "model.num_attention_heads=32", "parallel.tp=2"],
            "has a deterministic backward on Hopper only if documents x heads x (length of the longest) ** 2 is below "
            "2 ** 30, but a pack of this recipe may have 41,201,270,784",
        ),
        ([], None),
    ):
        gpu(HOPPER if reason else ADA)
        with pytest.raises(ConfigError) as caught:
            choose(config("run.deterministic=true", "attention.backend=te", *overrides), "cuda")
        assert str(caught.value) == (
            "attention.backend = te: run.deterministic is true, and Transformer Engine's attention over packed "
            "documents "
            + (
                reason
                or "is deterministic only on GPUs of compute capability 9.x, and from 10.0 on with cuDNN 9.18.1, but "
                "this GPU has 8.9"
            )
            + ".  attention.backend=portable runs everywhere."
        )


def test_most_scores_of_a_pack() -> None:
    """128 tokens: one document of 128, or two of 64.  192: one of 192 has 36,864, and 128 beside 64 has 32,768."""
    assert transformer_engine.most_scores(128, 64) == 128**2
    assert transformer_engine.most_scores(192, 64) == 192**2
    # 1,024 tokens: 704 beside five of 64
    assert transformer_engine.most_scores(1024, 64) == 6 * 704**2 == 2_973_696


def test_releases_that_bring_fp8(gpu: Callable[..., None]) -> None:
    """The table follows fp8_utils of megatron-core: each FP8 recipe and the release that has it first."""
    for name, since, before in [("tensorwise", "2.2", "2.1"), ("mxfp8", "2.1", "2.0"), ("blockwise", "2.3", "2.2")]:
        gpu(BLACKWELL, f"{since}.0+abc")
        assert choose(config(f"run.fp8={name}"), "cuda").name == "te"
        gpu(BLACKWELL, f"{before}.9")
        with pytest.raises(ConfigError, match=f"it needs Transformer Engine {since}, but {before} is installed"):
            choose(config(f"run.fp8={name}"), "cuda")


def test_fp8_without_transformer_engine(without_te: None) -> None:
    """With attention.backend = auto, portable would be used, which has no FP8."""
    with pytest.raises(ConfigError) as caught:
        choose(config("run.fp8=delayed"), "cuda")
    told = str(caught.value)
    assert told.startswith("run.fp8 = delayed needs Transformer Engine: transformer_engine cannot be imported (")
    with pytest.raises(ConfigError, match="run.fp8 = delayed needs Transformer Engine: .* this run is on the CPU"):
        choose(config("run.fp8=delayed"), "cpu")


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_weights_and_attention_stay_as_without_fp8(name: str) -> None:
    """So other runs can read the weights of a checkpoint."""
    found = fp8.fields(name)
    assert not any(found[key] for key in ("fp8_param", "fp8_dot_product_attention", "fp8_multi_head_attention"))
    assert found["fp8_recipe"] == name and found["fp8"] in ("hybrid", "e4m3")


def test_positions_begin_anew_with_every_document() -> None:
    """Two documents of 2 tokens each: the angles of positions 0, 1, 0, 1."""
    boundaries, positions = torch.tensor([0, 2, 4], dtype=torch.int32), torch.tensor([[0, 1, 0, 1]])
    rotation = (
        choose(config("run.precision=fp32"), "cpu").documents(boundaries, 2, positions, CpGroup(1, 0, None)).rotation
    )
    assert rotation is not None
    assert rotation.cos[:, 0, 0].tolist() == pytest.approx([1.0, 0.5403023, 1.0, 0.5403023], rel=1e-6)


def test_frequencies_are_those_of_the_rotated_part_of_a_head() -> None:
    """Heads of 16, of which the first 4 elements are rotated: two pairs, with angles of 1 and 1 / 100 per position."""
    backend = choose(config("model.rope.fraction=0.25"), "cpu")
    assert backend.frequencies(torch.device("cpu")).tolist() == pytest.approx([1.0, 0.01])
