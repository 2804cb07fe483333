"""Fields of TransformerConfig that depend on installed packages: permutation, DeepEP, fused gradients."""

import importlib.util
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

from sft.errors import ConfigError
from sft.mcore.backends import kernels
from sft.mcore.backends.portable import Portable
from sft.mcore.backends.transformer_engine import TransformerEngine
from sft.mcore.checkpoint_io import megatron_arguments
from sft.mcore.model import core_config
from sft.parallel.layout import Layout
from tests.builders import LLAMA_8B, RECIPE, layout_config, parsed, refusal_lines

MOE = ["model.moe.num_experts=4", "model.moe.top_k=2"]
DEEPEP = [*MOE, "parallel.ep=2", "parallel.cp=2", "parallel.ep_comm=deepep"]


def fields(monkeypatch: pytest.MonkeyPatch, device_type: str, *overrides: str) -> dict[str, Any]:
    """The arguments of TransformerConfig, whose constructor would refuse kernels if Transformer Engine is missing."""
    config = parsed(*overrides).config
    te = device_type == "cuda" and config.attention.backend != "portable"
    backend = TransformerEngine(config) if te else Portable(config, "", kernels.choose(config, device_type))
    with monkeypatch.context() as patch:
        patch.setattr(core_config, "TransformerConfig", lambda **named: named)
        layout = Layout.resolve(config, config.parallel.cp)
        return dict(vars(core_config)["transformer_config"](config, layout, device_type, backend))


@pytest.mark.parametrize(
    "device_type, overrides, fused",
    [
        ("cuda", MOE, True),
        ("cuda", [*MOE, "model.megatron={moe_permute_fusion: false}"], False),
        ("cuda", [*MOE, "attention.backend=portable"], False),
        ("cuda", [], False),
        ("cpu", MOE, False),
    ],
)
def test_tokens_are_permuted_in_one_kernel_with_transformer_engine(
    monkeypatch: pytest.MonkeyPatch, device_type: str, overrides: list[str], fused: bool
) -> None:
    assert fields(monkeypatch, device_type, *overrides)["moe_permute_fusion"] is fused


def test_tokens_are_sent_by_deepep_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fields(monkeypatch, "cuda", *MOE)["moe_token_dispatcher_type"] == "alltoall"
    with pytest.raises(ConfigError) as caught:
        fields(monkeypatch, "cuda", *DEEPEP)
    assert str(caught.value) == (
        "parallel.ep_comm = deepep needs the package deep_ep (https://github.com/deepseek-ai/DeepEP), which is not "
        "installed here.  parallel.ep_comm=alltoall runs everywhere."
    )
    with pytest.raises(ConfigError, match="which runs on CUDA only, and this run is on the CPU"):
        fields(monkeypatch, "cpu", *DEEPEP)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    found = fields(monkeypatch, "cuda", *DEEPEP)
    assert (found["moe_token_dispatcher_type"], found["moe_flex_dispatcher_backend"]) == ("flex", "deepep")
    assert found["moe_router_dtype"] == "fp32"  # DeepEP accepts no other type of weights


def test_deepep_is_refused_where_it_cannot_work() -> None:
    assert "ep_comm=deepep) sends tokens to other ranks, which needs ep > 1;" in " ".join(
        refusal_lines(RECIPE, *DEEPEP, "parallel.ep=1")
    )
    assert "ep_comm=deepep) needs CUDA, and run.device is cpu" in " ".join(
        refusal_lines(RECIPE, *DEEPEP, "run.device=cpu")
    )


@pytest.mark.parametrize(
    "backend, train, fused",
    [
        ("te", {}, True),
        ("portable", {}, True),
        ("te", {"recompute": "selective"}, False),  # hooks lend inputs to products that are not repeated
        ("te", {"recompute": "full"}, False),
        ("te", {"recompute": "full", "offload_fraction": 0.5}, False),  # hooks also offload saved tensors
        ("te", {"mlp_tile": 64}, False),
        ("portable", {"recompute": "selective"}, False),  # hooks also recompute norms
    ],
)
def test_gradients_are_fused_without_hooks_and_with_apex(
    monkeypatch: pytest.MonkeyPatch, backend: str, train: dict[str, Any], fused: bool
) -> None:
    overrides = [f"attention.backend={backend}", *(f"train.{key}={value}" for key, value in train.items())]
    assert fields(monkeypatch, "cuda", *overrides)["gradient_accumulation_fusion"] is False  # Apex is not installed
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    assert fields(monkeypatch, "cuda", *overrides)["gradient_accumulation_fusion"] is fused
    assert fields(monkeypatch, "cpu", "attention.backend=portable")["gradient_accumulation_fusion"] is False


def test_windows_under_the_names_of_megatron_lm() -> None:
    """Arguments --window-size and --window-attn-skip-freq, in whose pattern 1 means a window."""
    sizes = {**LLAMA_8B, "num_layers": 4}
    windows = layout_config(model={**sizes, "sliding_window": 128, "sliding_window_layers": [1, 3]}).model
    found = megatron_arguments.model_arguments(windows, padded_vocab_size=256, positions=512, bf16=True)
    assert (found["window_size"], found["window_attn_skip_freq"]) == ((127, 0), [1, 0, 1, 0])
    plain = megatron_arguments.model_arguments(
        layout_config(model=sizes).model, padded_vocab_size=256, positions=9, bf16=True
    )
    assert "window_size" not in plain


def test_parts_of_heads_and_offsets_of_norms_under_the_names_of_megatron_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments --rotary-percent and --apply-layernorm-1p; megatron-core also gets the latter as a field, with
    Transformer Engine, too."""
    sizes = {**LLAMA_8B, "norm_zero_centered": True, "rope": {"fraction": 0.25}}
    own = layout_config(model=sizes).model
    found = megatron_arguments.model_arguments(own, padded_vocab_size=256, positions=512, bf16=True)
    assert (found["rotary_percent"], found["apply_layernorm_1p"]) == (0.25, True)
    for device_type in ("cpu", "cuda"):
        assert fields(monkeypatch, device_type, "model.norm_zero_centered=true")["layernorm_zero_centered_gamma"]


def test_other_activations_take_the_place_of_transformer_engine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    portable = "attention.backend=portable"
    for activation, is_own in (("swiglu", False), ("geglu", True), ("relu2", True)):
        found = fields(monkeypatch, "cuda", portable, f"model.activation={activation}")
        assert (found.get("use_te_activation_func", False), found["bias_activation_fusion"]) == (is_own, not is_own)
        assert found["gated_linear_unit"] is (activation != "relu2")
