"""Chooses the attention backend of a run from `attention.backend` and the software and devices of this machine."""

from collections.abc import Mapping

import torch

from sft.config import Config
from sft.config.mixer_section import LayerKind
from sft.errors import ConfigError
from sft.mcore.backend import AttentionBackend
from sft.mcore.backends import kernels, transformer_engine
from sft.mcore.backends.kernels import Chosen
from sft.mcore.backends.portable import Portable
from sft.mcore.backends.transformer_engine import TransformerEngine

HOPPER = (9, 0)  # first compute capability for which Transformer Engine's attention is faster than torch's flash kernel


def choose(config: Config, device_type: str) -> AttentionBackend:
    """The backend for this recipe on this machine.

    attention.backend = auto means te if Transformer Engine can compute this run and `Config.auto_is_portable` names no
    reason against it, else portable.  Raises ConfigError if te cannot run here and the recipe names te, or sets
    run.fp8, which only te has; or if the recipe names a kernel that cannot run.
    """
    te_problem = transformer_engine.unfit(config, device_type) or transformer_engine.missing()
    if te_problem and not config.attention.may_be_portable:
        raise ConfigError(f"attention.backend = te: {te_problem}.  attention.backend=portable runs everywhere.")
    if te_problem and config.run.fp8:
        raise ConfigError(
            f"run.fp8 = {config.run.fp8} needs Transformer Engine: {te_problem}.  run.fp8=null does not need it."
        )
    te_problem = te_problem or config.auto_is_portable
    may_be_te = config.attention.may_be_te(device_type)
    if not te_problem and may_be_te:
        transformer_engine.check_release(config)
        return TransformerEngine(config)
    return _portable(config, device_type, f"; not te: {te_problem}" if may_be_te else "")


def slower_than_possible(config: Config, backend: AttentionBackend, device_type: str) -> str | None:
    """A warning that says how to get faster attention on this GPU than by `backend`; None if there is no faster one."""
    if not isinstance(backend, Portable) or device_type == "cpu" or not torch.cuda.is_available():
        return None
    return _faster_in_transformer_engine(config, backend, device_type) or _faster_by_other_kernels(backend)


def _faster_by_other_kernels(backend: Portable) -> str | None:
    chosen = backend.chosen.values()
    broken = sorted({reason for kernel in chosen for reason in kernel.broken})
    names = sorted({package.name for kernel in chosen for package in kernel.to_install})
    advice = [f"It would be faster, but {reason}." for reason in broken] + [_ADVICE[name] for name in names]
    return "\n".join([f"WARNING: attention runs on {backend}.", *advice]) if advice else None


_ADVICE = {
    "flash-attn-4": "On an H200, FlashAttention-4 took 0.4 to 0.9 of the time of torch's flash kernel "
    '(docs/numbers/h200.md).  It is used once it is installed: pip install "sft-megatron[kernels]"',
    "ffpa-attn": "On an H200, ffpa-attn computed heads of 512 at 603 TFLOP/s forward and 221 backward; plain torch "
    "computes them in fp32.  It is used once it is installed: pip install --no-deps ffpa-attn==0.2.4",
}


def _faster_in_transformer_engine(config: Config, backend: Portable, device_type: str) -> str | None:
    if transformer_engine.unfit(config, device_type):
        return None
    if any(kernel.name == kernels.FASTEST for kernel in backend.chosen.values()):
        return None
    if config.model.latent_attention.is_used:  # which one to use depends on memory, too (latent-attention.md)
        return None
    if (capability := torch.cuda.get_device_capability()) < HOPPER:
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
    chosen = kernels.choose(config, device_type)
    others = "".join(f"; {kind} on {kernel.name}" for kind, kernel in chosen.items() if not kernel.has_softmax)
    return Portable(config, f"{_softmax_kernels(chosen)}{why_not_te}{others}", chosen)


def _softmax_kernels(chosen: Mapping[LayerKind, Chosen]) -> str:
    """The softmax kernels as text: "plain torch, no flash kernel: it needs CUDA", or with different kernels "window
    attention on torch's flash kernel, full attention on plain torch (...)"."""
    of_softmax = {kind: kernel for kind, kernel in chosen.items() if kernel.has_softmax}
    names = {kernel.name for kernel in of_softmax.values()}
    if not names:
        return "no layers with a softmax"
    if names == {kernels.PLAIN}:
        return f"{kernels.PLAIN}, no flash kernel: {_last_refusal(next(iter(of_softmax.values())))}"
    if len(names) == 1:
        return names.pop()
    texts = {kind: kernel.name for kind, kernel in of_softmax.items()}
    texts |= {k: f"{x.name} ({_last_refusal(x)})" for k, x in of_softmax.items() if x.name == kernels.PLAIN}
    return ", ".join(f"{kind} on {text}" for kind, text in texts.items())


def _last_refusal(kernel: Chosen) -> str:
    """The reason why torch's own flash kernel, the last one that was tried, cannot compute these layers."""
    return [*kernel.why_not.values()][-1]
