"""Says which kernels the key `attention.kernels` names, and whether they can compute a model on any GPU.

Needs no torch.  sft/mcore/backends/kernels.py asks the kernels themselves, on the machine of the run.
"""

from collections.abc import Iterator, Mapping

from sft.config import Config
from sft.config.attention import Kernel
from sft.layers import kernel_rates
from sft.layers.kinds import all_layer_groups
from sft.layers.mixer import Mixer

NAMES: Mapping[Kernel, str] = {
    "fa4": kernel_rates.FLASH4,
    "fa3": kernel_rates.FLASH3,
    "fa2": kernel_rates.FLASH2,
    "ffpa": kernel_rates.FFPA,
    "torch": kernel_rates.PLAIN,
}


def allowed(config: Config) -> set[str]:
    """The names of the kernels that the recipe allows."""
    return {NAMES[key] for key in config.attention.kernels or NAMES}


def problems(config: Config) -> Iterator[str]:
    """For each kind of layer that no kernel of `attention.kernels` computes on any GPU, a sentence about it."""
    wanted = config.attention.kernels
    if wanted is None:
        return
    for mixer in {group.mixer.kind: group.mixer for group in all_layer_groups(config.model)}.values():
        able = [key for key in NAMES if _has_kernel(NAMES[key], mixer)]
        if mixer.pair_width and not {*able} & {*wanted}:
            model = mixer.model
            sizes = f"keys of width {model.resolved_head_dim}, values of width {model.value_head_dim}"
            sizes += ", a window" * (mixer.window is not None) + ", a soft cap" * (model.attention_softcap is not None)
            yield (
                f"attention.kernels = [{', '.join(wanted)}] cannot compute the {mixer.kind} of this model on any GPU "
                f"({sizes}).  Add one that can ({', '.join(able)}), or use attention.kernels=null."
            )


def _has_kernel(name: str, mixer: Mixer) -> bool:
    model = mixer.model
    widths, kind = (model.resolved_head_dim, model.value_head_dim), (mixer.window is not None, model.attention_softcap)
    return any(
        kernel_rates.rate(name, architecture, *widths, kind[0], kind[1] is not None)
        for architecture in kernel_rates.PEAKS
    )
