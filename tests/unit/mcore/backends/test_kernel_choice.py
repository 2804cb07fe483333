"""Which kernel computes each kind of layer on each GPU, what the log says of it, and what is refused."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sft.config import Config
from sft.errors import ConfigError
from sft.estimate.attention_kernels import attention_kernels
from sft.mcore.attention.package import Package
from sft.mcore.backends import agreement, selection, transformer_engine
from sft.mcore.backends.kernel_lines import kernel_lines
from sft.mcore.backends.portable import Portable
from sft.mcore.backends.selection import choose
from sft.recipe.run_checks import check_run
from tests.builders import parsed
from tools import kernel_table

AMPERE, HOPPER, BLACKWELL, CONSUMER = (8, 0), (9, 0), (10, 0), (12, 0)
FA2, FA3, FA4 = "torch's flash kernel", "FlashAttention-3", "FlashAttention-4"
FFPA, PLAIN, TE = "ffpa-attn", "plain torch", "te"
HEADS = ["model.hidden_size=64", "model.num_attention_heads=2", "model.num_query_groups=2"]
KINDS = {
    "64": ["model.head_dim=64"],
    "128": ["model.head_dim=128"],
    "window": ["model.head_dim=64", "model.sliding_window=128"],
    "window 256": ["model.head_dim=256", "model.sliding_window=1024"],
    "sinks": ["model.head_dim=64", "model.attention_sinks=true"],
    "soft cap": ["model.head_dim=128", "model.attention_softcap=50"],
    "soft cap 256": ["model.head_dim=256", "model.attention_softcap=50"],
    "256": ["model.head_dim=256", "model.attention_output_gate=true"],
    "512": ["model.head_dim=512", "model.value_norm=true"],
    "latent": ["model.latent_attention.kv_lora_rank=512"],
    "window, repeatable": ["model.head_dim=128", "model.sliding_window=128", "run.deterministic=true"],
    "256, repeatable": ["model.head_dim=256", "model.attention_output_gate=true", "run.deterministic=true"],
    "512, repeatable": ["model.head_dim=512", "model.value_norm=true", "run.deterministic=true"],
}
# All packages are installed.  From left to right: Ampere, Hopper, Blackwell, and a GPU without published rates.
BEST = {
    "64": (TE, TE, TE, TE),
    "128": (TE, TE, TE, TE),
    "window": (FA2, FA4, FA4, FA2),
    "window 256": (FA2, FA3, FA2, FA2),
    "sinks": (FA2, FA4, FA4, FA2),
    "soft cap": (PLAIN, FA4, FA4, PLAIN),
    "soft cap 256": (PLAIN, FA4, PLAIN, PLAIN),
    "256": (FA2, FA3, FA2, FA2),
    "512": (PLAIN, FFPA, PLAIN, PLAIN),
    "latent": (FA2, FA4, FA4, FA2),
    "window, repeatable": (FA2, FA4, FA4, FA2),
    "256, repeatable": (FA2, FA4, FA2, FA2),
    "512, repeatable": (PLAIN, PLAIN, PLAIN, PLAIN),
}

Be = Callable[..., None]


@pytest.fixture
def be(monkeypatch: pytest.MonkeyPatch) -> Be:
    """As if there were this GPU, and all packages but the absent ones."""

    def make(capability: tuple[int, int], absent: tuple[str, ...] = (), broken: tuple[str, ...] = ()) -> None:
        def missing(package: Package) -> str | None:
            return f"{package.name} is not installed" if package.name in absent else None

        def unusable(package: Package) -> str | None:
            return f"{package.name} 1.0 cannot be imported (no)" if package.name in broken else None

        monkeypatch.setattr(Package, "absent", missing)
        monkeypatch.setattr(Package, "broken", unusable)
        monkeypatch.setattr(Package, "function", lambda package, name: lambda *_: None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(transformer_engine, "missing", lambda: "not here" if "te" in absent else None)
        monkeypatch.setattr(transformer_engine, "check_release", lambda config: None)

    return make


def config(kind: str, *overrides: str) -> Config:
    return parsed(*HEADS, *KINDS[kind], *overrides).config


def kernels_of(wanted: Config) -> list[str]:
    """The kernel of each kind of layer, or te."""
    backend = choose(wanted, "cuda")
    return [kernel.name for kernel in backend.chosen.values()] if isinstance(backend, Portable) else [backend.name]


@pytest.mark.parametrize("capability", [AMPERE, HOPPER, BLACKWELL, CONSUMER], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_fastest_kernel(be: Be, kind: str, capability: tuple[int, int]) -> None:
    be(capability)
    assert kernels_of(config(kind)) == [BEST[kind][(AMPERE, HOPPER, BLACKWELL, CONSUMER).index(capability)]]


@pytest.mark.parametrize(
    "kind, absent, kernel",
    [
        ("128", ("te",), FA4),
        ("128", ("te", "flash-attn-4"), FA3),
        ("128", ("te", "flash-attn-4", "flash-attn-3"), FA2),
        ("256", ("flash-attn-3",), FA4),
        ("latent", ("flash-attn-4",), FA3),
        ("512", ("ffpa-attn",), PLAIN),
    ],
)
def test_the_next_kernel(be: Be, kind: str, absent: tuple[str, ...], kernel: str) -> None:
    be(HOPPER, absent)
    assert kernels_of(config(kind)) == [kernel]


def test_values_of_latents_are_padded_only_for_torch(be: Be) -> None:
    """Keys of 192 with values of 128."""
    for absent, is_padded in (((), False), (("flash-attn-4",), False), (("flash-attn-4", "flash-attn-3"), True)):
        be(HOPPER, absent)
        found: Any = choose(config("latent"), "cuda")
        assert found.chosen["latent attention"].kernel.keywords["operators"].pads_values is is_padded


def lines(wanted: Config) -> list[str]:
    return kernel_lines(wanted, choose(wanted, "cuda"), "cuda")


H200 = "measured on one H200 (docs/numbers/h200.md)"


def test_lines_of_the_log(be: Be) -> None:
    be(HOPPER)
    (line,) = lines(config("window"))
    assert line == f"window attention: FlashAttention-4, expected 537 / 542 TFLOP/s, {H200}"
    be(HOPPER, ("flash-attn-4", "flash-attn-3"))
    (line,) = lines(config("window"))
    assert line == (
        f"WARNING: window attention: torch's flash kernel, expected 319 / 292 TFLOP/s, {H200}.  FlashAttention-4 would "
        f'be faster, 537 / 542 TFLOP/s, {H200}: pip install "sft-megatron[kernels]" (docs/start/install.md)'
    )
    be(HOPPER, broken=("flash-attn-4", "flash-attn-3"))
    assert lines(config("window"))[0].endswith(f"{H200}: flash-attn-4 1.0 cannot be imported (no)")
    (line,) = lines(config("128"))  # te, although FlashAttention-4 has no problem
    be(HOPPER)
    (line,) = lines(config("128"))
    assert line.startswith("full attention: Transformer Engine, expected 602 / 530 TFLOP/s, ")
    assert line.endswith(
        f"FlashAttention-4 would be faster, 667 / 592 TFLOP/s, {H200}: attention.backend=portable uses it"
    )


def test_lines_without_anything_faster(be: Be) -> None:
    """A kernel that is not known to be 1.05 times as fast is not worth an installation; others cannot run there."""
    be(HOPPER, ("flash-attn-3",))
    (line,) = lines(config("256"))
    assert line == f"full attention: FlashAttention-4, expected 705 / 381 TFLOP/s, {H200}"
    be(CONSUMER, ("te",))
    (line,) = lines(config("128"))
    assert line == "full attention: torch's flash kernel, whose rate on this GPU is not known"
    assert kernel_lines(config("128"), choose(config("128"), "cpu"), "cpu") == []


def test_lines_about_transformer_engine(be: Be) -> None:
    """Latent attention may run on it, for more memory."""
    others = ("flash-attn-4", "flash-attn-3")
    be(HOPPER, (*others, "te"))
    (line,) = lines(config("128"))  # both ways to something faster
    assert "FlashAttention-4 would be faster, 667 / 592 TFLOP/s, " in line and 'pip install "sft-meg' in line
    assert line.endswith("docs/start/install.md); then attention.backend=auto uses it")
    be(HOPPER, others)
    (line,) = lines(config("128", "attention.backend=portable"))
    assert line.endswith("cuDNN called by torch: attention.backend=auto uses it")
    (line,) = lines(config("latent"))
    assert line.endswith("attention.backend=te uses it, and saves keys and values instead of latents")


@pytest.mark.parametrize(
    "kernels, kind, found",
    [("[fa2]", "128", FA2), ("[fa2,torch]", "128", FA2), ("[torch]", "128", PLAIN), ("[fa2,fa4]", "256", FA4)],
)
def test_kernels_of_the_recipe(be: Be, kernels: str, kind: str, found: str) -> None:
    """With kernels in the recipe, auto is portable; the fastest of them runs."""
    be(HOPPER)
    assert kernels_of(config(kind, f"attention.kernels={kernels}")) == [found]


def test_a_kernel_that_the_recipe_leaves_out(be: Be) -> None:
    be(HOPPER)
    (line,) = lines(config("window", "attention.kernels=[fa2]"))
    assert line.startswith("WARNING: window attention: torch's flash kernel, ")
    assert line.endswith(
        f"FlashAttention-4 would be faster, 537 / 542 TFLOP/s, {H200}: attention.kernels leaves it out"
    )


def test_kernels_that_this_machine_does_not_have(be: Be) -> None:
    be(HOPPER, ("flash-attn-4",))
    with pytest.raises(ConfigError) as caught:
        choose(config("128", "attention.kernels=[fa4,ffpa]"), "cuda")
    assert str(caught.value) == (
        "attention.kernels = [fa4, ffpa] has no kernel for the full attention of this model on this machine.  fa4 "
        "(FlashAttention-4): flash-attn-4 is not installed; ffpa (ffpa-attn): it is for heads of 512.  "
        "attention.kernels=[fa4, ffpa, torch] works (torch, slow on GPUs, computes all layers everywhere); null takes "
        "the fastest kernel that works."
    )


def test_kernels_that_no_gpu_has() -> None:
    """Known before a start."""
    with pytest.raises(ConfigError) as caught:
        check_run(parsed(*HEADS, *KINDS["512"], "attention.kernels=[fa4,fa2]"))
    assert str(caught.value) == (
        "attention.kernels = [fa4, fa2] cannot compute the full attention of this model on any GPU (keys of width 512, "
        "values of width 512).  Add one that can (ffpa, torch), or use attention.kernels=null."
    )
    check_run(parsed(*HEADS, *KINDS["512"], "attention.kernels=[ffpa]"))
    check_run(parsed(*HEADS, *KINDS["512"], "attention.kernels=torch"))  # one kernel needs no list
    check_run(parsed(*HEADS, *KINDS["soft cap"], "attention.kernels=[fa4]"))


@pytest.mark.parametrize(
    "overrides, problem",
    [
        (["attention.kernels=[fa4]", "attention.backend=te"], "but attention.backend is te; use portable or auto"),
        (["attention.kernels=[fa4]", "run.device=cpu"], "needs torch, because .* run.device is cpu; add torch"),
        (["attention.kernels=[fa4]", "run.precision=fp32"], "needs torch, because .* in bf16 only; add torch"),
        (["attention.kernels=[fa4,fa4]"], "names a kernel twice"),
        (["attention.kernels=[]"], "attention.kernels"),
        (["attention.kernels=[fa5]"], "attention.kernels"),
    ],
)
def test_kernels_against_other_keys(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parsed(*overrides)


def test_the_prediction_takes_the_kernels_of_the_recipe() -> None:
    def predicted(*overrides: str) -> str:
        return attention_kernels(config("window", *overrides), "h100")["window attention"].kernel

    assert predicted() == FA4 and predicted("attention.kernels=[fa2,torch]") == FA2
    assert predicted("attention.kernels=torch") == predicted("run.precision=fp32") == PLAIN


def rank(host: str, kernel: str, why_not: dict[str, str] | None = None, backend: str = "portable") -> dict[str, Any]:
    kernels = {"backend": backend, "full attention": kernel} if backend == "portable" else {"backend": backend}
    return {
        "host": host, "gpu": "H100", "kernels": kernels, "why_not": {"full attention": why_not or {}},
        "reason": "torch's flash kernel; not te: it cannot be imported",
    }  # fmt: skip


def test_all_ranks_must_have_the_same_kernels() -> None:
    agreement.check([rank("a", FA4)] * 4)
    missing = {FA4: "flash-attn-4 is not installed"}
    with pytest.raises(ConfigError) as caught:
        agreement.check([*[rank("a", FA4)] * 2, *[rank("b", FA2, missing)] * 2, rank("a", FA4)])
    assert str(caught.value) == (
        "All ranks must compute attention alike, but the kernel of full attention is FlashAttention-4 on ranks 0, 1, 4 "
        "(a, H100), and torch's flash kernel on ranks 2 to 3 (b, H100).  On ranks 2 to 3, FlashAttention-4 does not "
        "run: flash-attn-4 is not installed.  Install the same packages on every machine, use GPUs of one type, or "
        "name a choice that all have: attention.kernels."
    )
    with pytest.raises(ConfigError, match="the backend of attention is te on rank 0 .a, H100., and portable on rank 1"):
        agreement.check([rank("a", "", backend="te"), rank("b", FA2)])
    others = [rank(host, FA4) for host in "ab"]
    for own, library in zip(others, ("te", "local")):
        own["kernels"]["modules"] = library
    with pytest.raises(ConfigError, match="library of modules is te on rank 0 .*all have: run.modules"):
        agreement.check(others)


def test_what_a_rank_tells_the_others(be: Be) -> None:
    be(HOPPER, ("flash-attn-4",))
    wanted = config("window")
    own = agreement.kernels_here(choose(wanted, "cpu"), "cpu")
    assert own["kernels"] == {"backend": "portable", "modules": "local", "window attention": PLAIN} and own["gpu"] == ""
    assert own["why_not"]["window attention"][FA4] == "it needs CUDA"


@pytest.mark.parametrize("other, problem", [(FA4, "All ranks must compute attention alike"), (PLAIN, None)])
def test_ranks_choose_together(monkeypatch: pytest.MonkeyPatch, other: str, problem: str | None) -> None:
    """Rank 1 has the kernel `other`; this rank, on a CPU, has plain torch."""

    def gathered(make: Callable[[], dict[str, Any]], group: Any) -> list[dict[str, Any]]:
        own = make()
        return [own, {**own, "kernels": {**own["kernels"], "window attention": other}}]

    monkeypatch.setattr(selection, "all_gather_objects", gathered)
    groups: Any = SimpleNamespace(device=torch.device("cpu"), control=None)
    if problem is None:
        assert selection.choose_alike(config("window"), groups).name == "portable"
    else:
        with pytest.raises(ConfigError, match=problem):
            selection.choose_alike(config("window"), groups)


@pytest.mark.parametrize("gpu", kernel_table.GPUS)
def test_the_page_about_kernels_says_what_runs(be: Be, gpu: str) -> None:
    capability = kernel_table.GPUS[gpu]
    be(capability)
    for sizes in kernel_table.KINDS.values():
        found = kernel_table.row(sizes, capability).kernel
        assert kernels_of(kernel_table.config(sizes)) == ["te" if found == "Transformer Engine" else found]


def test_reasons_on_the_page_about_kernels() -> None:
    found = kernel_table.row("head_dim: 256, sliding_window: 1024", BLACKWELL)
    assert (found.kernel, found.refusals) == (
        FA2,
        {
            FA4: "its heads of 256 were not compared with plain torch on GPUs of compute capability 10.x",
            "Transformer Engine": "it does not have model.sliding_window",
        },
    )
