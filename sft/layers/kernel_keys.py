"""Says which kernels the key `attention.kernels` names, and whether they can compute a model on any GPU.

Needs no torch.  sft/mcore/backends/kernels.py asks the kernels themselves, on the machine of the run.
"""

from collections.abc import Iterator, Mapping

from sft.config import Config
from sft.config.attention import Kernel
from sft.layers import kernel_rates
from sft.layers.kernel_rates import PEAKS
from sft.layers.kinds import all_layer_groups

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
    """Yield a sentence for each kind of layer that no kernel of `attention.kernels` can compute on any GPU."""
    wanted = config.attention.kernels
    if wanted is None:
        return
    for mixer in {group.mixer.kind: group.mixer for group in all_layer_groups(config.model)}.values():
        model, has_window = mixer.model, mixer.window is not None
        demand = (
            model.resolved_head_dim,
            model.resolved_value_head_dim,
            has_window,
            model.attention_softcap is not None,
            model.num_attention_heads > model.resolved_query_groups,
        )
        able = [key for key, name in NAMES.items() if any(kernel_rates.rate(name, gpu, *demand) for gpu in PEAKS)]
        if mixer.pair_width and not {*able} & {*wanted}:
            sizes = f"keys of width {model.resolved_head_dim}, values of width {model.resolved_value_head_dim}"
            sizes += ", a window" * has_window + ", a soft cap" * (model.attention_softcap is not None)
            yield (
                f"attention.kernels = [{', '.join(wanted)}] cannot compute the {mixer.kind} of this model on any GPU "
                f"({sizes}).  Add one that can ({', '.join(able)}), or use attention.kernels=null."
            )
