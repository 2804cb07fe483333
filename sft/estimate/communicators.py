"""Lists the NCCL communicators that a rank of a layout opens.  Each has buffers on the GPU, outside of torch's memory.

torch opens the communicator of a process group when the group is first used on the device.  This module lists the
groups that a step of training uses (sft/mcore/process_groups.py builds them, and many more).  Groups of one rank have
no communicator.  Saves, logs and metrics use gloo.
"""

from sft.config import Config
from sft.parallel.layout import Layout


def communicators(config: Config, layout: Layout) -> dict[str, int]:
    """The number of ranks of each communicator, by the name of its group.

    8 GPUs, tp 2, cp 2, dp 2, dense, distributed optimizer -> {"tp": 2, "cp": 2, "dp x cp": 4, "all ranks": 8}
    """
    is_mixture = config.model.moe.num_experts is not None
    copies = layout.tp * layout.cp * layout.dp // (layout.ep * layout.etp)  # number of ranks that hold an expert
    sizes = {
        "tp": layout.tp,
        "cp": layout.cp,
        **{f"cp of {size}": size for size in layout.cp_sizes[1:-1]},
        "dp x cp": layout.dp * layout.cp,
        **_of_pipeline(config, layout),
        **({"ep": layout.ep, "ep x etp": layout.ep * layout.etp, "copies of an expert": copies} if is_mixture else {}),
        "all ranks": layout.world_size,
    }
    if layout.etp == 1:
        sizes.pop("ep x etp", None)  # the same ranks as ep
    return {name: size for name, size in sizes.items() if size > 1}


def _of_pipeline(config: Config, layout: Layout) -> dict[str, int]:
    """The communicators of pipeline stages: to exchange hidden states, and to sum the gradients of tied embeddings."""
    return {"pp": layout.pp, "first and last stage": 2 if config.model.tie_embeddings and layout.pp > 1 else 1}


def num_communicators(config: Config, layout: Layout) -> int:
    """The largest number of communicators that a rank opens.  A rank of a middle pipeline stage may open fewer."""
    return len(communicators(config, layout))
