"""Sends hidden states between pipeline stages, in shapes that each rank computes from its own packs.

Packs differ in length.  In megatron-core, a stage would send the shape before each tensor, and the host of the receiver
would wait for the GPU to read the shape.  All stages of a pipeline have the same packs, so no shape needs to be sent.
"""

from collections.abc import Sequence
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from sft.batch import Microbatch
from sft.mcore.process_groups import ProcessGroups
from sft.parallel.layout import Layout


class PackCommunicator(P2PCommunicator):
    """Sends and receives the tensors of one forward and backward pass over `microbatches`.

    Core receives hidden states in the order of its schedule, and gradients in the same order of microbatches.  The
    first model chunk of the model receives no hidden states, and the last one receives no gradients.
    """

    def __init__(self, microbatches: Sequence[Microbatch], layout: Layout, groups: ProcessGroups, core: Any) -> None:
        super().__init__(groups.collection.pp, core)
        split = layout.tp if layout.sequence_parallel else 1
        shapes = [[mb.tokens.shape[1] // split, 1, core.hidden_size] for mb in microbatches]
        # (microbatch, chunk); backward takes the chunks from the last to the first
        order = get_schedule_table(len(shapes), layout.virtual_stages, core.microbatch_group_size_per_vp_stage)
        later_chunks = [shapes[microbatch] for microbatch, chunk in order if chunk > 0]
        all_chunks = [shapes[microbatch] for microbatch, _ in order]
        self._from_previous = iter(later_chunks if groups.pp_rank == 0 else all_chunks)
        self._from_next = iter(later_chunks if groups.is_last_stage else all_chunks)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        """The shapes of the next tensors to receive: hidden states from the previous stage, gradients from the next."""
        nothing = [0, 0, 0]
        return next(self._from_previous) if recv_prev else nothing, next(self._from_next) if recv_next else nothing


def transformer_fields(layout: Layout) -> dict[str, Any]:
    """The fields of core's TransformerConfig that say how stages exchange hidden states."""
    has_virtual = layout.virtual_stages > 1
    return {
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.virtual_stages if has_virtual else None,
        "variable_seq_lengths": True,  # packs differ in length
        # With pp 2 and virtual stages the next stage is also the previous one, so batched exchange is ambiguous.
        "overlap_p2p_comm": has_virtual,
        "batch_p2p_comm": not has_virtual,
        "batch_p2p_sync": False,  # the host would wait after each batch because of a race that torch no longer has
        # Backward does not need the values of a stage's output, so they are freed after sending.  Virtual stages send
        # while they compute, so their outputs must stay.
        "deallocate_pipeline_outputs": layout.pp > 1 and not has_virtual,
    }


def schedule_arguments(
    microbatches: Sequence[Microbatch], layout: Layout, groups: ProcessGroups, core: Any
) -> dict[str, Any]:
    """The communicator and the groups for core's schedule; empty without pipeline parallelism.

    core: TransformerConfig
    """
    if layout.pp == 1:
        return {}
    return {
        "p2p_communicator": PackCommunicator(microbatches, layout, groups, core),
        "pg_collection": groups.collection,
    }
