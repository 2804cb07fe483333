"""Writes the lines that say at the start of a run which kernel computes each kind of layer, and which would be faster.

sft/layers/kernel_rates.py has the rates.  On a CPU there are no lines.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from sft.config import Config
from sft.config.mixer_section import LayerKind
from sft.layers import kernel_rates
from sft.layers.kernel_rates import Rate
from sft.layers.kinds import all_layer_groups
from sft.mcore.attention.flash_kernel import Demand
from sft.mcore.backend import AttentionBackend
from sft.mcore.backends import kernels, transformer_engine
from sft.mcore.backends.portable import Portable

WORTH = 1.05  # a kernel is named as faster if it is at least this many times as fast
INSTALL: Mapping[str, str] = {
    kernel_rates.FLASH4: 'pip install "sft-megatron[kernels]"',
    kernel_rates.FFPA: "pip install --no-deps ffpa-attn==0.2.4",
    kernel_rates.FLASH3: "build it from the folder hopper of github.com/Dao-AILab/flash-attention",
}


class Faster(NamedTuple):
    """A kernel that is faster than the chosen one.  advice: what the user must do to use it"""

    name: str
    rate: Rate
    advice: str


def kernel_lines(config: Config, backend: AttentionBackend, device_type: str) -> list[str]:
    """A line for each kind of layer with a softmax.

    On the portable backend, a line begins with WARNING if a faster kernel is missing or is left out.  On te there is no
    warning, because te also brings fused modules and FP8.
    """
    if device_type == "cpu" or not torch.cuda.is_available():
        return []
    is_portable = isinstance(backend, Portable)
    lines = []
    for kind, (name, demand, why_not) in _softmax_layers(config, backend, device_type).items():
        rate = demand.rate(name)
        line = f"{kind}: {name}, " + (f"expected {rate.text()}" if rate else "whose rate on this GPU is not known")
        groups = [_packages(why_not, is_portable), _te(config, device_type) if is_portable else ()]
        faster = [best for options in groups if (best := _fastest(options, demand, rate))]
        for best in faster:
            line += f".  {best.name} would be faster, {best.rate.text()}: {best.advice}"
        if faster and is_portable:
            line = f"WARNING: {line}"
        lines.append(line)
    return lines


def _fastest(options: Iterable[tuple[str, str]], demand: Demand, rate: Rate | None) -> Faster | None:
    """The fastest of the options; None if none is faster than `rate`."""
    rates = (Faster(name, known, advice) for name, advice in options if (known := demand.rate(name)))
    faster = [x for x in rates if rate is None or x.rate.together > WORTH * rate.together]
    return max(faster, key=lambda x: x.rate.together, default=None)


def _softmax_layers(
    config: Config, backend: AttentionBackend, device_type: str
) -> dict[LayerKind, tuple[str, Demand, Mapping[str, str | None]]]:
    """For each kind of layer: the name of its kernel, its demand, and the reason why it does not use each other kernel.

    The reason is None if that kernel could run.
    """
    if isinstance(backend, Portable):
        chosen = {kind: x for kind, x in backend.chosen.items() if x.demand is not None}
        return {kind: (x.name, x.demand, x.why_not) for kind, x in chosen.items() if x.demand is not None}
    mixers = {group.mixer.kind: group.mixer for group in all_layer_groups(config.model) if group.mixer.pair_width}
    demands = {kind: kernels.demand_of(config, mixer, device_type) for kind, mixer in mixers.items()}
    return {
        kind: (
            kernel_rates.TRANSFORMER_ENGINE,
            demand,
            {name: operators.why_not(demand) for name, operators in kernels.FLASH.items()},
        )
        for kind, demand in demands.items()
    }


def _packages(why_not: Mapping[str, str | None], is_portable: bool) -> Iterator[tuple[str, str]]:
    """Yield each kernel that could run, with the change that it needs.

    The change is an installation, another backend, or another value of attention.kernels.
    """
    to_portable = "" if is_portable else "attention.backend=portable uses it"
    for name, reason in why_not.items():
        package = kernels.FLASH[name].package if name in kernels.FLASH else None
        if reason is None:
            yield name, to_portable
        elif reason == kernels.LEFT_OUT:
            yield name, kernels.LEFT_OUT
        elif package is not None and reason == package.absent():
            yield name, "; then ".join(filter(None, (INSTALL[name], to_portable))) + " (docs/start/install.md)"
        elif package is not None and reason == package.broken():
            yield name, reason


def _te(config: Config, device_type: str) -> Iterator[tuple[str, str]]:
    """Transformer Engine, if it can compute the model, and how to get it."""
    if transformer_engine.unfit(config, device_type) or config.attention.kernels is not None:
        return
    latents = config.model.latent_attention.is_used
    key = "attention.backend=te" if latents else "attention.backend=auto"
    use = f"{key} uses it" + ", and saves keys and values instead of latents" * latents
    missing = transformer_engine.missing()
    yield kernel_rates.TRANSFORMER_ENGINE, f"{transformer_engine.INSTALL}; then {use}" if missing else use
