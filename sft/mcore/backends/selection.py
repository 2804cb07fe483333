"""Chooses the attention backend of a run from `attention.backend` and the software and devices of this machine."""

from functools import partial

import torch

from sft.config import Config, ModelConfig
from sft.config.model import LayerKind
from sft.errors import ConfigError
from sft.layers.kinds import of_kind
from sft.mcore.attention import flash_kernel
from sft.mcore.attention.flash_kernel import FlashKernel
from sft.mcore.attention.torch_kernel import TorchKernel
from sft.mcore.backend import AttentionBackend, params_dtype
from sft.mcore.backends import delta_rule, transformer_engine
from sft.mcore.backends.portable import KernelByWindow, Portable
from sft.mcore.backends.transformer_engine import TransformerEngine

HOPPER = (9, 0)  # first compute capability with attention kernels that torch's flash kernel does not have


def choose(config: Config, device_type: str) -> AttentionBackend:
    """`auto` is te if Transformer Engine and CUDA are available, else portable.

    Raises ConfigError if te cannot run here, and the recipe names te or sets run.fp8, which only te has.
    """
    candidates = config.attention.candidates
    te_problem = transformer_engine.why_not(config, device_type)
    if te_problem and Portable.name not in candidates:
        raise ConfigError(f"attention.backend = te: {te_problem}.  attention.backend=portable runs everywhere.")
    if te_problem and config.run.fp8:
        raise ConfigError(
            f"run.fp8 = {config.run.fp8} needs Transformer Engine: {te_problem}.  run.fp8=null does not need it."
        )
    te_problem = te_problem or config.auto_is_portable
    if not te_problem and TransformerEngine.name in candidates:
        transformer_engine.check_release(config)
        return TransformerEngine(config)
    te_was_possible = TransformerEngine.name in candidates and device_type != "cpu"
    return _portable(config, device_type, f"; not te: {te_problem}" if te_was_possible else "")


def slower_than_possible(config: Config, backend: AttentionBackend, device_type: str) -> str | None:
    """A warning if the GPU has faster attention than `backend`, with the expected cost and what to do; else None."""
    if backend.name != Portable.name or transformer_engine.unfit(config, device_type):
        return None
    if config.model.latent_attention.is_used:  # which one to use depends on memory, too (latent-attention.md)
        return None
    if not torch.cuda.is_available() or (capability := torch.cuda.get_device_capability()) < HOPPER:
        return None
    major, minor = capability
    advice = f"{transformer_engine.INSTALL}; then " if transformer_engine.missing() else "It is installed: "
    return (
        f"WARNING: attention runs on {backend}.  Transformer Engine has faster attention for this GPU (compute "
        f"capability {major}.{minor}).\n"
        "Expected on an H100, not measured here: 370 TFLOP/s forward and 310 backward with torch's flash kernel, 600 "
        "and 500 with Transformer Engine.\n"
        "A step with documents of 128K tokens takes about 1.5 times as long.\n"
        f"{advice}attention.backend=auto uses it."
    )


def _portable(config: Config, device_type: str, why_not_te: str) -> Portable:
    model = config.model
    delta_kernel = delta_rule.choose(config, device_type) if model.linear_attention.layers else None
    plain = partial(TorchKernel.of, softcap=model.attention_softcap)
    why_not = {window: _why_not_flash(config, kind, device_type) for window, kind in _kinds_by_window(model).items()}
    problems = {problem for problem in why_not.values() if problem}
    if not problems:
        return Portable(config, f"torch's flash kernel{why_not_te}", FlashKernel.of, delta_kernel)
    problem, *others = sorted(problems)
    assert not others
    if all(why_not.values()):
        return Portable(config, f"plain torch, no flash kernel: {problem}{why_not_te}", plain, delta_kernel)
    makers = {window: plain if why_not[window] else FlashKernel.of for window in why_not}
    fast, slow = ("with a window", "without one") if why_not[None] else ("without a window", "with one")
    reason = f"torch's flash kernel in layers {fast}, plain torch in layers {slow}: {problem}{why_not_te}"
    return Portable(config, reason, KernelByWindow(makers), delta_kernel)


def _kinds_by_window(model: ModelConfig) -> dict[int | None, LayerKind]:
    """The kind of the layers with each window; None: no window."""
    numbers = range(1, model.num_layers + 1)
    return {model.window_of(number): model.kind_of(number) for number in numbers}


def _why_not_flash(config: Config, kind: LayerKind, device_type: str) -> str | None:
    """The reason why layers of this kind cannot use the flash kernel; None if they can."""
    model = of_kind(config.model, kind)
    if model.attention_softcap is not None:
        return "it has no model.attention_softcap"
    if model.value_head_dim > model.resolved_head_dim:
        return "it has no values that are wider than keys"
    return flash_kernel.why_not(model.resolved_head_dim, params_dtype(config), device_type)
