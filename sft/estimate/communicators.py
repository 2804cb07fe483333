"""Lists the NCCL communicators that a rank of a layout opens, and estimates their buffers on the GPU.

torch opens the communicator of a process group when the group is first used on the device.  This module lists the
groups that a step of training uses.  sft/mcore/process_groups.py builds these groups and many others.  Groups of one
rank have no communicator.  Saves, logs and metrics use gloo.  The buffers are outside of the memory of torch's
allocator.  Their sizes are assumed here.  After its first step, a run logs the memory that they really take
(sft/run/gpu_memory.py).
"""

from collections.abc import Mapping
from typing import NamedTuple

from sft.config import Config
from sft.estimate.attention_kernels import uses_portable
from sft.estimate.gpus import CONTEXT_BYTES, GIB
from sft.layers.kinds import all_layer_groups
from sft.parallel.layout import Layout

# Published: 0.56 GiB (sglang#30908, GB200) and 0.94 GiB (vLLM#46234, for two groups of 8).  An all-to-all opens buffers
# for each pair of ranks: the first one of 8 H100 took 3.3 GB (NVIDIA/nccl#1685).  Together, NCCL took 7 GB a rank with
# tp 2, pp 2 and dp 2, and 9.5 GB with experts (verl#6408).
COLLECTIVE_BYTES, ALL_TO_ALL_BYTES = 0.6 * GIB, 3.0 * GIB


class Communicator(NamedTuple):
    """One communicator of a rank.  has_all_to_all: whether a step runs all-to-alls over it"""

    ranks: int
    has_all_to_all: bool = False

    @property
    def bytes(self) -> float:
        return ALL_TO_ALL_BYTES if self.has_all_to_all else COLLECTIVE_BYTES


Communicators = Mapping[str, Communicator]


def communicators(config: Config, layout: Layout) -> Communicators:
    """The communicators by the name of their group.  A rank of a middle stage may open fewer.

    8 GPUs, tp 2, cp 2, dp 2, dense, distributed optimizer -> tp of 2, cp of 2, dp x cp of 4, all ranks 8
    """
    if config.run.device == "cpu":  # gloo has no buffers on a device
        return {}
    opened = {
        "tp": Communicator(layout.tp),
        **_context_parallel(config, layout),
        "dp x cp": Communicator(layout.dp * layout.cp),
        **_replicas(config, layout),
        **_stages(layout),
        # The first and the last stage sum their gradients of the tied embedding.
        "first and last stage": Communicator(2 if config.model.tie_embeddings and layout.pp > 1 else 1),
        "ep": Communicator(layout.ep, has_all_to_all=True),
        "ep x etp": Communicator(layout.ep * layout.etp if layout.etp > 1 else 1),  # with etp 1 the same ranks as ep
        "copies of an expert": Communicator(layout.expert_copies if config.model.moe.num_experts is not None else 1),
        **_gradient_norm(config, layout),
        # The largest absolute values of tensors are reduced over these ranks, for the scales of FP8.
        "tp x dp x cp": Communicator(layout.tp * layout.dp * layout.cp if config.run.fp8 == "delayed" else 1),
        "all ranks": Communicator(layout.world_size),
    }
    return {name: communicator for name, communicator in opened.items() if communicator.ranks > 1}


def _stages(layout: Layout) -> Communicators:
    """The communicators for hidden states.

    With virtual stages, messages are not batched, and torch opens a communicator for each pair of ranks.  With pp 2,
    megatron-core uses different groups for the two directions.
    """
    if layout.pp > 1 and layout.virtual_stages > 1:
        return {"previous stage": Communicator(2), "next stage": Communicator(2)}
    return {"pp": Communicator(layout.pp)}


def _replicas(config: Config, layout: Layout) -> Communicators:
    """The groups inside of dp x cp, and inside of the copies of an expert, with parallel.shard_size."""
    groups: dict[str, Communicator] = {}
    copies = layout.expert_copies if config.model.moe.num_experts is not None else 1
    for name, size, ranks in (
        ("", layout.shard_ranks, layout.dp * layout.cp),
        (" of experts", layout.expert_shard_ranks, copies),
    ):
        if 1 < size < ranks:
            groups |= {f"shards{name}": Communicator(size), f"replicas{name}": Communicator(ranks // size)}
    return groups


def _gradient_norm(config: Config, layout: Layout) -> Communicators:
    """The groups over which the norm of gradients is summed, without the group of all ranks.

    The distributed optimizer uses only the group of all ranks.
    """
    if config.parallel.distributed_optimizer:
        return {}
    has_experts = config.model.moe.num_experts is not None
    ranks = {
        "tp x pp": layout.tp * layout.pp,
        "ep x etp x pp": layout.ep * layout.etp * layout.pp if has_experts else 1,
    }
    return {name: Communicator(n) for name, n in ranks.items() if n < layout.world_size}


def _context_parallel(config: Config, layout: Layout) -> Communicators:
    """The groups of ranks that share a pack.

    Halos of windows, states of recurrences and heads (cp_comm a2a) travel by all-to-alls.  Metrics of documents are
    summed over the group cp.
    """
    mixers, is_portable = [group.mixer for group in all_layer_groups(config.model)], uses_portable(config)
    exchanges = any(mixer.num_states(1) for mixer in mixers) or (
        any(mixer.window for mixer in mixers) if is_portable else config.parallel.cp_comm == "a2a"
    )
    groups = {f"cp of {size}": Communicator(size, exchanges) for size in layout.cp_sizes[1:-1]}
    if not is_portable and config.parallel.cp_comm == "a2a+p2p" and layout.cp_a2a is not None:
        groups["cp, heads"] = Communicator(layout.cp_a2a, has_all_to_all=True)
        groups["cp, ring"] = Communicator(layout.cp // layout.cp_a2a)
    return {"cp": Communicator(layout.cp, exchanges), **groups}


def nccl_bytes(config: Config, layout: Layout) -> float:
    """Bytes of the buffers of all communicators of a rank."""
    return sum(communicator.bytes for communicator in communicators(config, layout).values())


def compared(config: Config, layout: Layout, measured: float) -> str:
    """One line that compares the assumed memory outside of torch with the measured one."""
    buffers = nccl_bytes(config, layout)
    names = ", ".join(
        f"{name} {communicator.bytes / GIB:.1f}" for name, communicator in communicators(config, layout).items()
    )
    nccl = f" and NCCL's buffers {buffers / GIB:.1f} ({names})" if names else ""
    return (
        f"GPU memory outside of torch's allocator: {measured / GIB:.2f} GiB (used on the GPU - reserved by torch).  "
        f"`sft check` and `sft plan` assume {(CONTEXT_BYTES + buffers) / GIB:.2f}: CUDA's context "
        f"{CONTEXT_BYTES / GIB:.2f}{nccl}"
    )
