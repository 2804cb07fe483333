"""Lists the NCCL communicators that a rank of a layout opens.  Each has buffers on the GPU, outside of torch's memory.

torch opens the communicator of a process group when the group is first used on the device.  This module lists the
groups that a step of training uses (sft/mcore/process_groups.py builds them, and many more).  Groups of one rank have
no communicator.  Saves, logs and metrics use gloo.
"""

from sft.config import Config
from sft.parallel.layout import Layout


def communicators(config: Config, layout: Layout) -> dict[str, int]:
    """The number of ranks of each communicator, by the name of its group.  A rank of a middle stage may open fewer.

    8 GPUs, tp 2, cp 2, dp 2, dense, distributed optimizer -> {"tp": 2, "cp": 2, "dp x cp": 4, "all ranks": 8}
    """
    sizes = {
        "tp": layout.tp,
        "cp": layout.cp,
        **{f"cp of {size}": size for size in layout.cp_sizes[1:-1]},
        "dp x cp": layout.dp * layout.cp,
        "pp": layout.pp,  # exchanges hidden states
        "first and last stage": 2 if config.model.tie_embeddings and layout.pp > 1 else 1,  # sum gradients
        "ep": layout.ep,
        "ep x etp": layout.ep * layout.etp if layout.etp > 1 else 1,  # with etp 1 the same ranks as ep
        "copies of an expert": layout.expert_copies if config.model.moe.num_experts is not None else 1,
        "all ranks": layout.world_size,
    }
    return {name: size for name, size in sizes.items() if size > 1}
