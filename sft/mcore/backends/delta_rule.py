"""Chooses the kernel of the gated delta rule from `attention.delta_rule`, the software and the device."""

from sft.config import Config
from sft.errors import ConfigError
from sft.mcore.linear_attention import fla_kernel
from sft.mcore.linear_attention.delta_rule import Kernel
from sft.mcore.linear_attention.fla_kernel import FlaKernel
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel


def choose(config: Config, device_type: str) -> Kernel:
    """`auto` is fla if FLA can compute what the recipe wants, else torch.  As text, the kernel says why.

    Raises ConfigError if the recipe names fla, and FLA cannot.
    """
    wanted = config.attention.delta_rule
    if wanted == "torch":
        return TorchDeltaKernel("attention.delta_rule = torch")
    problem = fla_kernel.why_not(config, device_type)
    if problem is None:
        return FlaKernel(fla_kernel.operator(), "flash-linear-attention")
    if wanted == "fla":
        raise ConfigError(f"attention.delta_rule = fla: {problem}.  attention.delta_rule=torch runs everywhere.")
    return TorchDeltaKernel("plain torch" if device_type == "cpu" else f"plain torch, slow on GPUs; not fla: {problem}")
