"""Runs a recurrence over packed documents whose tokens are split over the context-parallel (CP) group.

    1. Tokens of short documents are sent to the ranks that compute these documents (relayout.py).
    2. Each rank runs the recurrence on its fragments (recurrent_attention.py).  In long documents and in trees, states
       pass from fragment to fragment (state_passing.py).
    3. Outputs of short documents are sent back.

With cp 1, nothing is sent, and a document without branches is one fragment.  A rank computes the documents of trees
first, so tokens are copied only if a document of a tree comes after a document that is in no tree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sft.mcore.linear_attention.recurrence import Fragments, FragmentSchedule, InputsT, Kernel
from sft.mcore.linear_attention.recurrent_attention import recurrent_attention
from sft.mcore.linear_attention.relayout import TokenRelayout, to_computed, to_local
from sft.mcore.linear_attention.state_passing import HeadwisePassing
from sft.parallel.branches import Branches
from sft.parallel.cp_group import CpGroup
from sft.parallel.fragments import FragmentPlan
from sft.parallel.taps import Taps


@dataclass(frozen=True, kw_only=True)
class LinearDocuments:
    """Documents and fragments of a microbatch on this rank.  All layers with the same recurrence share one object."""

    cp: CpGroup  # the ranks that share the pack
    kernel: Any  # a `recurrence.Kernel`
    schedule: FragmentSchedule  # result of `kernel.schedule`
    convolution: Any  # `kernel.convolution_plan` of the microbatch
    passing: HeadwisePassing | None = None  # passes states between fragments; None: no rank has a linked fragment
    relayout: TokenRelayout | None = None

    @staticmethod
    def of(
        cu_seqlens: np.ndarray,
        cp: CpGroup,
        device: torch.device,
        kernel: Kernel[Any],
        *,
        heads: int,
        num_taps: int,
        max_short: int,
        branches: Branches | None = None,
    ) -> "LinearDocuments":
        """The documents of a microbatch on this rank.

        cu_seqlens: int32 [documents + 1], padded boundaries of the documents of the whole pack
        heads: heads with a state on this rank; num_taps: taps of the convolution
        max_short: length of the longest document that counts as short (`RecurrentSizes.max_short`)
        """
        plan = FragmentPlan.of(cu_seqlens, max_short, cp.size, cp.rank, branches)
        fragments = Fragments.of(plan.boundaries, linked=np.arange(plan.num_linked))
        return LinearDocuments(
            cp=cp,
            kernel=kernel,
            schedule=kernel.schedule(fragments, heads, device),
            convolution=kernel.convolution_plan(Taps.of(cu_seqlens, num_taps, cp.size, cp.rank, branches), device),
            passing=(
                HeadwisePassing.of(plan.links, heads, cp, device, maps=kernel.maps) if sum(plan.links.counts) else None
            ),
            relayout=None if plan.relayout is None else TokenRelayout.of(plan.relayout, device),
        )


# (function of inputs, inputs) -> the function's result
Call = Callable[[Callable[..., Tensor], Sequence[Tensor]], Tensor]


def linear_attention(inputs: InputsT, documents: LinearDocuments, call: Call) -> Tensor:
    """Outputs [t, heads, V] of this rank's tokens.  Collective over cp.

    call: calls the recurrence, so that the caller can keep its results for recomputation
    """
    cp_group, make = documents.cp.members, type(inputs)

    def recurrence(*tensors: Tensor) -> Tensor:
        own = make(*tensors)
        return recurrent_attention(own, documents.schedule, documents.kernel, documents.passing)

    if documents.relayout is None:
        return call(recurrence, [*inputs])
    out = call(recurrence, to_computed(documents.relayout, cp_group, *inputs))
    return to_local(documents.relayout, cp_group, out)[0]
