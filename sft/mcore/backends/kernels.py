"""The kernels of each kind of layer of the portable backend, the fastest first, and the reasons why one cannot run."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from sft.config import Config, ModelConfig
from sft.config.model import LayerKind
from sft.layers.kinds import layer_groups, mtp_groups
from sft.mcore.attention import flash_kernel
from sft.mcore.attention.flash_kernel import FlashKernel
from sft.mcore.attention.packed_attention import AttentionKernel
from sft.mcore.attention.torch_kernel import TorchKernel
from sft.mcore.backend import params_dtype
from sft.mcore.backends import delta_rule

# cu_seqlens of the whole pack, cp size, cp rank, device; window -> the kernel of a microbatch
MakeKernel = Callable[..., AttentionKernel]


class Chosen(NamedTuple):
    """The kernel of one kind of layer.

    kernel   a `MakeKernel`, of linear attention a `delta_rule.Kernel`
    name     for the log
    why_not  the reason why no faster kernel computes these layers; None: there is none, or the kernel says it itself
    has_softmax  whether it computes attention with a softmax
    """

    kernel: Any
    name: str
    why_not: str | None = None
    has_softmax: bool = False


def _flash(config: Config, model: ModelConfig, device_type: str) -> MakeKernel | str:
    if model.attention_softcap is not None:
        return "it has no model.attention_softcap"
    if model.value_head_dim > model.resolved_head_dim:
        return "it has no values that are wider than keys"
    problem = flash_kernel.why_not(model.resolved_head_dim, params_dtype(config), device_type)
    return problem or FlashKernel.of


def _plain(config: Config, model: ModelConfig, device_type: str) -> MakeKernel | str:
    return partial(TorchKernel.of, softcap=model.attention_softcap)


# Each makes the kernel for layers like those of a model, or says why it cannot.
FLASH, PLAIN = "torch's flash kernel", "plain torch"
SOFTMAX: Mapping[str, Callable[[Config, ModelConfig, str], MakeKernel | str]] = {FLASH: _flash, PLAIN: _plain}


def _softmax(config: Config, model: ModelConfig, device_type: str) -> Chosen:
    why_not = None
    for name, make in SOFTMAX.items():
        made = make(config, model, device_type)
        if not isinstance(made, str):
            return Chosen(made, name, why_not, has_softmax=True)
        why_not = why_not or made
    raise AssertionError("plain torch computes all layers")


def _delta(config: Config, model: ModelConfig, device_type: str) -> Chosen:
    kernel = delta_rule.choose(config, device_type)
    return Chosen(kernel, str(kernel))


KERNELS: Mapping[LayerKind, Callable[[Config, ModelConfig, str], Chosen]] = {
    "full attention": _softmax,
    "window attention": _softmax,
    "latent attention": _softmax,
    "linear attention": _delta,
}


def choose(config: Config, device_type: str) -> dict[LayerKind, Chosen]:
    """The kernel of each kind of layer that the model has and that is in the table: others bring their own.

    Raises ConfigError if the recipe names a kernel that cannot run.
    """
    groups = {group.mixer.kind: group.model for group in (*layer_groups(config.model), *mtp_groups(config.model))}
    return {kind: KERNELS[kind](config, model, device_type) for kind, model in groups.items() if kind in KERNELS}
