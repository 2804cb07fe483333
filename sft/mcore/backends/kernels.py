"""Chooses the portable backend's kernel for each kind of layer: the fastest one that can compute the layers.

Keeps the reasons why faster kernels cannot compute them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from sft.config import Config
from sft.config.mixer_section import LayerKind
from sft.errors import ConfigError
from sft.layers.kinds import all_layer_groups
from sft.layers.mixer import Mixer
from sft.mcore.attention.ffpa import FFPA
from sft.mcore.attention.flash2 import FLASH2
from sft.mcore.attention.flash4 import FLASH4
from sft.mcore.attention.flash_kernel import Demand, FlashKernel, Operators
from sft.mcore.attention.package import Package
from sft.mcore.attention.packed_attention import AttentionKernel
from sft.mcore.attention.torch_kernel import TorchKernel
from sft.mcore.backend import params_dtype
from sft.mcore.linear_attention import fla_functions, fla_kernel
from sft.mcore.linear_attention.delta_rule import Kernel
from sft.mcore.linear_attention.fla_kernel import FlaKernel
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel

# (cu_seqlens of the whole pack, cp size, cp rank, device, window=) -> the kernel of a microbatch
MakeKernel = Callable[..., AttentionKernel]

# The flash kernels of softmax attention, the fastest first.  Plain torch computes the layers that they cannot.
FASTEST = "FlashAttention-4"
FLASH: Mapping[str, Operators] = {
    FASTEST: FLASH4,
    "ffpa-attn": FFPA,
    "torch's flash kernel": FLASH2,
}
PLAIN = "plain torch"
_PACKAGES = {name: operators.package for name, operators in FLASH.items() if operators.package is not None}


class Chosen(NamedTuple):
    """The kernel of one kind of layer.

    kernel   a `MakeKernel`; for linear attention, a `delta_rule.Kernel`
    name     name of the kernel for the log
    why_not  for each faster kernel, by name, the reason why it cannot compute these layers
    has_softmax  whether the kernel computes attention with a softmax
    """

    kernel: Any
    name: str
    why_not: Mapping[str, str] = {}
    has_softmax: bool = False

    @property
    def to_install(self) -> list[Package]:
        """The packages that are not installed, and whose faster kernels could otherwise be tried."""
        packages = {package: self.why_not.get(name) for name, package in _PACKAGES.items()}
        return [package for package, reason in packages.items() if reason and reason == package.absent()]

    @property
    def broken(self) -> list[str]:
        """The problems of installed packages that have faster kernels and cannot be used."""
        reasons = {self.why_not.get(name): package for name, package in _PACKAGES.items()}
        return [
            reason
            for reason, package in reasons.items()
            if reason and not package.absent() and reason == package.broken()
        ]


def _demand(config: Config, mixer: Mixer, device_type: str) -> Demand:
    model = mixer.model
    return Demand(
        device_type,
        params_dtype(config),
        model.resolved_head_dim,
        model.value_head_dim,
        heads_per_key=model.num_attention_heads // model.resolved_query_groups,
        has_window=mixer.window is not None,
        softcap=model.attention_softcap,
        is_deterministic=config.run.deterministic,
    )


def _softmax(config: Config, mixer: Mixer, device_type: str) -> Chosen:
    needs, why_not = _demand(config, mixer, device_type), dict[str, str]()
    for name, operators in FLASH.items():
        if (reason := operators.why_not(needs)) is None:
            make = partial(FlashKernel.of, operators=operators, softcap=needs.softcap)
            return Chosen(make, name, why_not, has_softmax=True)
        why_not[name] = reason
    return Chosen(partial(TorchKernel.of, softcap=needs.softcap), PLAIN, why_not, has_softmax=True)


def _delta(config: Config, mixer: Mixer, device_type: str) -> Chosen:
    """The kernel of linear attention; `str` of it says why it was chosen.

    attention.delta_rule = auto means fla if FLA can compute this run, else torch.  Raises ConfigError if the recipe
    names fla and FLA cannot compute this run.
    """
    wanted = config.attention.delta_rule
    kernel: Kernel
    if wanted == "torch":
        kernel = TorchDeltaKernel("attention.delta_rule = torch")
    elif (problem := fla_kernel.why_not(config, device_type)) is None:
        kernel = FlaKernel(fla_functions.functions(), "flash-linear-attention")
    elif wanted == "fla":
        raise ConfigError(f"attention.delta_rule = fla: {problem}.  attention.delta_rule=torch runs everywhere.")
    else:
        slow = f"plain torch, slow on GPUs; not fla: {problem}"
        kernel = TorchDeltaKernel("plain torch" if device_type == "cpu" else slow)
    return Chosen(kernel, str(kernel))


KERNELS: Mapping[LayerKind, Callable[[Config, Mixer, str], Chosen]] = {
    "full attention": _softmax,
    "window attention": _softmax,
    "latent attention": _softmax,
    "linear attention": _delta,
}


def choose(config: Config, device_type: str) -> dict[LayerKind, Chosen]:
    """The kernel of each kind of layer of the model that is in KERNELS.  Raises ConfigError if the recipe names a
    kernel that cannot run."""
    mixers = {group.mixer.kind: group.mixer for group in all_layer_groups(config.model)}
    return {kind: KERNELS[kind](config, mixer, device_type) for kind, mixer in mixers.items() if kind in KERNELS}
