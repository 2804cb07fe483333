"""Decides which attention kernel a prediction assumes for each kind of layer, and how fast this kernel is.

The assumed kernel is the fastest one that can compute the layers on the GPU, as if its package were installed.  On the
machine of a run, sft/mcore/backends asks the kernels themselves.
"""

from collections.abc import Mapping
from typing import NamedTuple

from sft.config import Config
from sft.config.mixer_section import LayerKind
from sft.estimate import gpus
from sft.estimate.constants import REFERENCE_WIDTH, Constants
from sft.layers import kernel_keys
from sft.layers.kernel_rates import (
    BACKWARD,
    FFPA,
    FLASH2,
    FLASH3,
    HOPPER,
    PLAIN,
    TRANSFORMER_ENGINE,
    Rate,
    fastest_first,
    rate,
)
from sft.layers.kinds import all_layer_groups
from sft.layers.mixer import Mixer

_WIDE = 256  # for heads of this width or wider, FlashAttention-3 does not promise repeatable gradients


class Assumed(NamedTuple):
    """The kernel assumed for a kind of layer.  rate: its rate in the table; None: constants of the device give it"""

    kernel: str
    rate: Rate | None


Kernels = Mapping[LayerKind, Assumed]


def uses_portable(config: Config) -> bool:
    """Whether attention runs on the portable backend.  attention.backend = auto is assumed to take te if it can."""
    is_portable = config.attention.backend == "portable" or config.auto_is_portable is not None
    return is_portable or config.model.portable_only is not None or _is_plain(config)


def _is_plain(config: Config) -> bool:
    return config.run.device == "cpu" or config.run.precision == "fp32"


def attention_kernels(config: Config, gpu: str) -> Kernels:
    """The kernel of each kind of layer with a softmax.  gpu: a name of `gpus.GPUS`"""
    mixers = {group.mixer.kind: group.mixer for group in all_layer_groups(config.model)}
    return {kind: _kernel_of(config, mixer, gpu) for kind, mixer in mixers.items() if mixer.pair_width}


def _kernel_of(config: Config, mixer: Mixer, gpu: str) -> Assumed:
    if gpu == "cpu":
        return Assumed(PLAIN, None)
    known, model = gpus.gpu(gpu).architecture, mixer.model
    # A GPU without rows in the table has torch's own kernels, with the ratios of Hopper.
    rates = dict(
        fastest_first(
            known or HOPPER,
            model.resolved_head_dim,
            model.resolved_value_head_dim,
            has_window=mixer.window is not None,
            has_softcap=model.attention_softcap is not None,
            is_grouped=model.num_attention_heads > model.resolved_query_groups,
        )
    )
    if known is None:
        rates = {name: rates[name] for name in (FLASH2, PLAIN) if name in rates}
    if _is_plain(config):
        return Assumed(PLAIN, rates[PLAIN])
    if not uses_portable(config) and TRANSFORMER_ENGINE in rates:
        return Assumed(TRANSFORMER_ENGINE, rates[TRANSFORMER_ENGINE])
    allowed = kernel_keys.allowed(config)
    if config.run.deterministic:
        allowed -= {FFPA} | ({FLASH3} if model.resolved_head_dim >= _WIDE else set())
    return next((Assumed(*item) for item in rates.items() if item[0] in allowed), Assumed(PLAIN, rates[PLAIN]))


def relative(assumed: Assumed, constants: Constants) -> tuple[float, float]:
    """The kernel's rates forward and backward, divided by those of the kernel that the constants describe."""
    architecture = gpus.gpu(constants.gpu).architecture or HOPPER
    reference = rate(constants.attention_kernel, architecture, REFERENCE_WIDTH, REFERENCE_WIDTH)
    if assumed.rate is None or reference is None:
        return 1.0, 1.0
    return assumed.rate.forward / reference.forward, assumed.rate.backward / reference.backward


def describe(config: Config, gpu: str) -> str:
    """`assumed kernels of attention: window attention by FlashAttention-4 (537 / 542 TFLOP/s, measured on ...)`"""
    kernels = attention_kernels(config, gpu)
    kinds: dict[Assumed, list[str]] = {}
    for kind, assumed in kernels.items():
        kinds.setdefault(assumed, []).append(kind)
    texts = [
        f"{' and '.join(names)} by {assumed.kernel}" + (f" ({assumed.rate.text()})" if assumed.rate else "")
        for assumed, names in kinds.items()
    ]
    return f"assumed kernels of attention: {'; '.join(texts)}" if texts else "no attention with a softmax"


def highest_tflops(config: Config, constants: Constants) -> float:
    """The highest TFLOP/s of attention among the kinds of layers, for forward and backward together.

    MFU counts 3 times the FLOPs of forward, so this function does, too.
    """
    forward, backward = (
        max(rate for _, rate in curve.points) for curve in (constants.attention_forward, constants.attention_backward)
    )
    factors = [relative(kernel, constants) for kernel in attention_kernels(config, constants.gpu).values()]
    return max((3 / (1 / (own * forward) + BACKWARD / (other * backward)) for own, other in factors), default=0.0)
