"""Describes the weights of modules for checkpoints, and lists the tensors in such descriptions."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint


class OwnWeights(torch.nn.Module):
    """A module of this trainer with weights that core cannot describe for checkpoints.

    split_axes: {name of a weight: the axis along which the ranks of `tp_group` split it}; every rank holds the other
        weights whole
    """

    split_axes: ClassVar[Mapping[str, int]] = {}
    tp_group: Any

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Iterable[Any] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            self.split_axes,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


def sharded_tensors(state: Any) -> Iterator[ShardedTensor]:
    """Yield every tensor of this rank in a sharded state dict or a list, including the tensors that factories make."""
    for leaf in nested_values(state):
        if isinstance(leaf, ShardedTensorFactory):
            with memory_for_views(leaf.data):
                built = leaf.build()
            yield from sharded_tensors([built])
        elif isinstance(leaf, ShardedTensor) and leaf.data is not None:
            yield leaf


@contextmanager
def memory_for_views(tensor: torch.Tensor) -> Iterator[None]:
    """A context in which views of `tensor` can be made, also while its memory is freed (`sharding/flat.py`).

    torch makes no view outside of a storage, so a freed storage gets memory, but no values, until the context ends.
    """
    storage, end = tensor.untyped_storage(), int(tensor.storage_offset()) + tensor.numel()
    is_free = storage.nbytes() == 0
    if is_free:
        storage.resize_(end * tensor.element_size())
    try:
        yield
    finally:
        if is_free:
            storage.resize_(0)
