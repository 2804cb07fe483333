"""Saves and restores the states of all random number generators of a rank, in Megatron-LM's form.

No training step uses random numbers, because there is no dropout.  The states are stored nevertheless: if a later
version used random numbers, nobody would notice that states are missing.  A state belongs to a position in the layout
and to a kind of device.  A run with another layout or on another kind of device restores no state, and its generators
start from the seed.
"""

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from sft.mcore.process_groups import ProcessGroups
from sft.parallel.collectives import all_gather_objects

KEY = "rng_state"


def describe(groups: ProcessGroups) -> ShardedObject:
    """Describe the states for a checkpoint: one object for each pair (pipeline rank, tensor rank).  Collective.

    An object has the states of the data- and context-parallel ranks of its pair, in order of rank.  In Megatron-LM,
    all these ranks read the first state; with --data-parallel-random-init, each rank reads its own state.
    """
    states = all_gather_objects(_state, groups.control)
    return _object(groups, [states[rank] for rank in dist.get_process_group_ranks(groups.collection.dp_cp)])


def key_of(groups: ProcessGroups) -> str:
    """The key of this rank's object in a checkpoint of the same layout."""
    name: str = _object(groups, None).unique_key
    return name


def restore(groups: ProcessGroups, states: list[dict[str, Any]]) -> None:
    """Set every generator of this rank from the states of `describe`.  If Megatron-LM stored one state, all use it.

    Sets no generator if the states were saved on another kind of device.  The shape of `cuda_rng_state` shows the kind:
    on CUDA it has 16 bytes, and on a CPU it is the larger state of torch's CPU generator.
    """
    state = states[groups.collection.dp_cp.rank() if len(states) > 1 else 0]
    if state["cuda_rng_state"].shape != torch.cuda.get_rng_state().shape:
        return
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    get_cuda_rng_tracker().set_states(state["rng_tracker_states"])


def _state() -> dict[str, Any]:
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": get_cuda_rng_tracker().get_states(),
    }


def _object(groups: ProcessGroups, states: Any) -> ShardedObject:
    collection = groups.collection
    shape = (collection.pp.size(), collection.tp.size())
    return ShardedObject(KEY, states, shape, (groups.pp_rank, groups.tp_rank), replica_id=collection.dp_cp.rank())
