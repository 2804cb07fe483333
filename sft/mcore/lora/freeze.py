"""Freezes the weights that a run does not train.

A weight is frozen (`requires_grad` is False) before core allocates buffers.  So it has no gradient, no fp32 copy and no
optimizer state, and its gradient is not reduced over ranks.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from sft.layers.adapters import EMBEDDING, Trained
from sft.mcore.modules.stored import sharded_tensors

_ROWS = "trained_rows"  # attribute of a parameter: the numbers of its rows that are trained, if not all are


def apply(chunk: Any, trained: Trained, *, keeps_graph: bool) -> None:
    """Freeze all weights of a model chunk except the weights in `trained`.

    keeps_graph: whether the embedding's output needs a gradient even if the embedding is frozen (see
        `_require_input_gradient`)
    Call this function before core allocates buffers for gradients, and before the chunk has adapters.
    """
    if trained.whole is None:
        return
    chunk.requires_grad_(False)
    if keeps_graph and chunk.pre_process and not trained.has(EMBEDDING, ()):
        _require_input_gradient(chunk)
    for leaf in whole_leaves(chunk.sharded_state_dict(), trained):
        leaf.data.requires_grad_()
        part = next(sharded_tensors([leaf]))
        if (rows := trained.rows.get(part.key)) is not None:
            first, end = part.global_offset[0], part.global_offset[0] + len(part.data)
            setattr(leaf.data, _ROWS, [row - first for row in rows if first <= row < end])


def trains_rows(param: Any) -> bool:
    """Whether only some rows of a parameter are trained."""
    return hasattr(param, _ROWS)


def keep_trained_rows(chunks: Iterable[torch.nn.Module]) -> None:
    """Set the gradients of the rows that are not trained to zero.

    The rows then keep their values: Adam's moments stay zero, and `optimizer/build.py` gives them no weight decay.
    Call this function after gradients were reduced over ranks, and before their norm is computed.
    """
    params: Iterator[Any] = (param for chunk in chunks for param in chunk.parameters())
    for param in filter(trains_rows, params):
        rows, gradient = getattr(param, _ROWS), param.main_grad
        kept = gradient[rows].clone()
        gradient.zero_()
        gradient[rows] = kept


def whole_leaves(state: Any, trained: Trained) -> Iterator[ShardedTensor | ShardedTensorFactory]:
    """The entries of a sharded state dict whose weights are trained themselves, not by an adapter."""
    for leaf in nested_values(state):
        if isinstance(leaf, ShardedTensor | ShardedTensorFactory) and leaf.data is not None:
            part = next(sharded_tensors([leaf]))
            if trained.has(part.key, tuple(part.global_offset[: part.prepend_axis_num])):
                yield leaf


def _require_input_gradient(chunk: Any) -> None:
    """Make the embedding's output need a gradient, although the embedding is frozen.

    Core's recomputation computes gradients only if an input of the recomputed function requires one.  Core's pipeline
    schedule sends each stage the gradient of its output, which must therefore exist.
    """
    chunk.embedding.register_forward_hook(
        lambda module, args, output: output.requires_grad_() if torch.is_grad_enabled() else output
    )
