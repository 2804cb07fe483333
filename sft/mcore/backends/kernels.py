"""Chooses the portable backend's kernel for each kind of layer: the fastest one that can compute the layers.

sft/layers/kernel_rates.py has the rates, by architecture, width and kind of layer.  The recipe key `attention.kernels`
limits the choice.  The reasons why faster kernels cannot compute the layers are kept for the log.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from sft.config import Config
from sft.config.attention import Kernel
from sft.config.mixer_section import LayerKind
from sft.errors import ConfigError
from sft.layers import kernel_keys, kernel_rates
from sft.layers.kernel_keys import NAMES
from sft.layers.kinds import all_layer_groups
from sft.layers.mixer import Mixer
from sft.mcore.attention.ffpa import FFPA
from sft.mcore.attention.flash2 import FLASH2
from sft.mcore.attention.flash3 import FLASH3
from sft.mcore.attention.flash4 import FLASH4
from sft.mcore.attention.flash_kernel import Demand, FlashKernel, Operators
from sft.mcore.attention.packed_attention import AttentionKernel
from sft.mcore.attention.torch_kernel import TorchKernel
from sft.mcore.backend import params_dtype
from sft.mcore.linear_attention import fla_kernel, ssd_fla
from sft.mcore.linear_attention.ssd_kernel import TorchSsdKernel
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel

# (cu_seqlens of the whole pack, cp size, cp rank, device, window=, branches=) -> the kernel of a microbatch
MakeKernel = Callable[..., AttentionKernel]

# The flash kernels of softmax attention.  Plain torch computes the layers that no flash kernel can compute.
FLASH: Mapping[str, Operators] = {
    kernel_rates.FLASH3: FLASH3,
    kernel_rates.FLASH4: FLASH4,
    kernel_rates.FFPA: FFPA,
    kernel_rates.FLASH2: FLASH2,
}
PLAIN = kernel_rates.PLAIN


class Chosen(NamedTuple):
    """The kernel of one kind of layer.

    kernel   a `MakeKernel`; for a recurrence, a `recurrence.Kernel`
    name     name of the kernel for the log
    why_not  for each kernel that was tried before, by name, the reason why it does not compute these layers
    demand   what the layers ask of a kernel; None: they have no softmax
    """

    kernel: Any
    name: str
    why_not: Mapping[str, str] = {}
    demand: Demand | None = None

    @property
    def has_softmax(self) -> bool:
        return self.demand is not None


def demand_of(config: Config, mixer: Mixer, device_type: str) -> Demand:
    """The properties of this kind of layer in this run that a kernel must support."""
    model = mixer.model
    return Demand(
        device_type,
        params_dtype(config),
        model.resolved_head_dim,
        model.resolved_value_head_dim,
        heads_per_key=model.num_attention_heads // model.resolved_query_groups,
        has_window=mixer.window is not None,
        softcap=model.attention_softcap,
        is_deterministic=config.run.deterministic,
    )


def by_rate(demand: Demand) -> list[str]:
    """The names of FLASH, the fastest kernel first.  Kernels without a known rate come last."""
    rates = {name: demand.rate(name) for name in FLASH}
    return sorted(FLASH, key=lambda name: -known.together if (known := rates[name]) else 0.0)


def _softmax(config: Config, mixer: Mixer, device_type: str) -> Chosen:
    needs, why_not = demand_of(config, mixer, device_type), dict[str, str]()
    left_out = {*NAMES.values()} - kernel_keys.allowed(config)
    for name in by_rate(needs):
        reason = LEFT_OUT if name in left_out else FLASH[name].why_not(needs)
        if reason is None:
            return Chosen(partial(FlashKernel.of, operators=FLASH[name], softcap=needs.softcap), name, why_not, needs)
        why_not[name] = reason
    if PLAIN in left_out:
        raise ConfigError(_no_kernel(mixer.kind, config.attention.kernels or [], why_not))
    return Chosen(partial(TorchKernel.of, softcap=needs.softcap), PLAIN, why_not, needs)


LEFT_OUT = "attention.kernels leaves it out"


def _no_kernel(kind: LayerKind, wanted: Sequence[Kernel], why_not: Mapping[str, str]) -> str:
    reasons = "; ".join(f"{key} ({NAMES[key]}): {why_not[NAMES[key]]}" for key in wanted)
    possible = "torch, slow on GPUs, computes all layers everywhere"
    return (
        f"attention.kernels = [{', '.join(wanted)}] has no kernel for the {kind} of this model on this machine.  "
        f"{reasons}.  attention.kernels=[{', '.join([*wanted, 'torch'])}] works ({possible}); null takes the fastest "
        "kernel that works."
    )


class RecurrentKernels(NamedTuple):
    """The kernels of one recurrence.

    plain         makes the kernel in plain torch, from the reason why it was chosen
    with_fla      makes the kernel of flash-linear-attention
    fla_problem   (config, device type) -> the reason why this run cannot use FLA; None if it can
    """

    plain: Callable[[str], Any]
    with_fla: Callable[[], Any]
    fla_problem: Callable[[Config, str], str | None]


def _recurrent(kernels: RecurrentKernels, config: Config, mixer: Mixer, device_type: str) -> Chosen:
    """The kernel of a recurrence.  str(kernel) says why it was chosen.

    attention.delta_rule = auto means fla if FLA can compute this run, else torch.  Raises ConfigError if the recipe
    names fla and FLA cannot compute this run.
    """
    wanted = config.attention.delta_rule
    if wanted == "torch":
        kernel = kernels.plain("attention.delta_rule = torch")
    elif (problem := kernels.fla_problem(config, device_type)) is None:
        kernel = kernels.with_fla()
    elif wanted == "fla":
        raise ConfigError(f"attention.delta_rule = fla: {problem}.  attention.delta_rule=torch runs everywhere.")
    else:
        slow = f"plain torch, slow on GPUs; not fla: {problem}"
        kernel = kernels.plain("plain torch" if device_type == "cpu" else slow)
    return Chosen(kernel, str(kernel))


KERNELS: Mapping[LayerKind, Callable[[Config, Mixer, str], Chosen]] = {
    "full attention": _softmax,
    "window attention": _softmax,
    "latent attention": _softmax,
    "linear attention": partial(_recurrent, RecurrentKernels(TorchDeltaKernel, fla_kernel.made, fla_kernel.why_not)),
    "Mamba-2": partial(_recurrent, RecurrentKernels(TorchSsdKernel, ssd_fla.made, ssd_fla.why_not)),
}


def choose(config: Config, device_type: str) -> dict[LayerKind, Chosen]:
    """The kernel of each kind of layer of the model, if KERNELS has the kind.

    Raises ConfigError if the recipe names a kernel that cannot run.
    """
    mixers = {group.mixer.kind: group.mixer for group in all_layer_groups(config.model)}
    return {kind: KERNELS[kind](config, mixer, device_type) for kind, mixer in mixers.items() if kind in KERNELS}
