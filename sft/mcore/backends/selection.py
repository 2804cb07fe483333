"""Chooses the attention backend of a run from `attention.backend` and the software and devices of this machine."""

from collections.abc import Mapping
from typing import Any

from sft.config import Config
from sft.config.mixer_section import LayerKind
from sft.errors import ConfigError
from sft.layers import kernel_rates
from sft.mcore.backend import AttentionBackend
from sft.mcore.backends import agreement, kernels, transformer_engine
from sft.mcore.backends.kernels import Chosen
from sft.mcore.backends.portable import Portable
from sft.mcore.backends.transformer_engine import TransformerEngine
from sft.mcore.modules import choice as modules
from sft.parallel.collectives import all_gather_objects
from sft.parallel.position import Position


def choose(config: Config, device_type: str) -> AttentionBackend:
    """The backend for this recipe on this machine.

    attention.backend = auto means te if Transformer Engine can compute this run and `Config.auto_is_portable` names no
    reason against it, else portable.

    Raises ConfigError if the recipe names te, modules or a kernel that cannot run here, or if it sets run.fp8 and
    Transformer Engine has no modules for this run.
    """
    te_problem = transformer_engine.unfit(config, device_type) or transformer_engine.missing()
    if te_problem and not config.attention.may_be_portable:
        raise ConfigError(f"attention.backend = te: {te_problem}.  attention.backend=portable runs everywhere.")
    te_problem = te_problem or config.auto_is_portable
    may_be_te = config.attention.may_be_te(device_type)
    if not te_problem and may_be_te:
        transformer_engine.check_release(config)
        return TransformerEngine(config)
    chosen = kernels.choose(config, device_type)
    library = modules.choose(config, device_type)
    others = "".join(f"; {kind} on {kernel.name}" for kind, kernel in chosen.items() if not kernel.has_softmax)
    not_te = f"; not te: {te_problem}" if may_be_te else ""
    return Portable(config, f"{_softmax_kernels(chosen)}{not_te}{others}", chosen, library)


def choose_alike(config: Config, groups: Position) -> AttentionBackend:
    """The backend of `choose`, after a check that all ranks have the same kernels.  Collective.

    Raises ConfigError on every rank if one rank cannot run the recipe, or if the kernels of ranks differ.
    """
    chosen = list[AttentionBackend]()

    def own() -> dict[str, Any]:
        chosen.append(choose(config, groups.device.type))
        return agreement.kernels_here(chosen[0], groups.device.type)

    agreement.check(all_gather_objects(own, groups.control))
    return chosen[0]


def _softmax_kernels(chosen: Mapping[LayerKind, Chosen]) -> str:
    """The softmax kernels as text.

    `plain torch, no flash kernel: it needs CUDA`, or with different kernels
    `window attention on torch's flash kernel, full attention on plain torch (...)`
    """
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
    """The reason why torch's own flash kernel cannot compute these layers."""
    return kernel.why_not.get(kernel_rates.FLASH2) or [*kernel.why_not.values()][-1]
