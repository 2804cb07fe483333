"""A model chunk whose weights or gradients are sharded.  It replaces core's DistributedDataParallel."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from sft.mcore.sharding.core_buffers import ShardParameter, buffers_of
from sft.mcore.sharding.passes import UnitPasses
from sft.mcore.sharding.ranks import ShardRanks
from sft.mcore.sharding.units import units_of


class ShardedModel(_BaseDataParallel):
    """Runs `module`, a HiddenStatesGPT.

    ranks          for dense weights (False) and for weights of experts (True)
    keeps_weights  whether whole weights stay in memory, and only gradients are sharded
    overlap        see `UnitPasses`

    `parameters` and `named_parameters` give this rank's shards, which core's optimizer updates.
    """

    bucket_groups = expert_parallel_bucket_groups = ()  # after a step, core would gather the weights of these

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: Any,
        ranks: dict[bool, ShardRanks],
        *,
        keeps_weights: bool,
        overlap: bool,
    ) -> None:
        super().__init__(config=config, module=module)
        self.ddp_config, self.ranks = ddp_config, ranks
        self.pre_process = module.pre_process  # core reads it when it sums the gradients of a tied weight
        self.share_embeddings_and_output_weights = module.share_embeddings_and_output_weights
        grad_dtype = torch.float32 if ddp_config.grad_reduce_in_fp32 else config.params_dtype
        self.units = units_of(module, ranks, keeps_weights=keeps_weights, grad_dtype=grad_dtype)
        names = {id(param): name for name, param in module.named_parameters()}
        flats = [flat for unit in self.units for flat in unit.flats]
        parts = {flat: [ShardParameter.of(flat, piece) for piece in flat.pieces] for flat in flats}
        self.shards = {names[id(part.whole)]: part for own in parts.values() for part in own}
        self.buffers, self.expert_parallel_buffers = (
            buffers_of({flat: own for flat, own in parts.items() if flat.is_expert == is_expert}, ddp_config)
            for is_expert in (False, True)
        )
        module.apply(_forget_weight_tensor)
        self._passes = UnitPasses(self.units, overlap=overlap)

    @property
    def frees_weights(self) -> bool:
        """Whether whole weights are in memory only while they are used."""
        return any(flat.frees_weights for unit in self.units for flat in unit.flats)

    @property
    def outputs_kept(self) -> list[torch.nn.Module]:
        """The norms whose outputs must be kept for backward, because another unit uses them.

        To compute such an output again, the other unit would need the norm's weight, which is then not in memory.
        """
        if not self.frees_weights:
            return []
        owners = (self.module.decoder, self.module.multi_token)
        return [owner.final_layernorm for owner in owners if getattr(owner, "final_layernorm", None) is not None]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, ShardParameter]]:
        yield from self.shards.items()

    def shard_of(self, weight: torch.nn.Parameter) -> ShardParameter | None:
        """This rank's part of a weight; None if other ranks hold all of it."""
        return next((part for part in self.shards.values() if part.whole is weight), None)

    def shared_embedding_or_output_weight(self) -> ShardParameter | None:
        """The tied weight whose gradients core sums over the first and the last pipeline stage."""
        return self.shard_of(self.module.output_weight())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._passes.begin_forward()
        output = self.module(*args, **kwargs)
        self._passes.end_forward(output)
        return output

    def output_weight_in_use(self, *, until_backward: bool) -> AbstractContextManager[None]:
        """See `UnitPasses.weight_in_use`."""
        return self._passes.weight_in_use(self.module.output_weight(), until_backward=until_backward)

    def zero_grad_buffer(self) -> None:
        for flat in self._trained:
            for param in flat.params:
                param.grad_added_to_main_grad = False
            flat.shard_grad.zero_()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Finish all sums, and sum the gradients over the replicas of this rank's shards."""
        self._passes.finish()
        for flat in self._trained:
            if flat.ranks.replicas is not None:
                dist.all_reduce(flat.shard_grad, group=flat.ranks.replicas)

    def scale_gradients(self, scaling_factor: float) -> None:
        for flat in self._trained:
            flat.shard_grad.mul_(scaling_factor)

    def start_param_sync(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: core 0.16 calls this after an update, core 0.19 does not.  See `publish`."""

    def publish(self) -> None:
        """Send the updated shards to the ranks that keep whole weights."""
        for unit in self.units:
            unit.publish()

    @property
    def _trained(self) -> Iterator[Any]:
        return (flat for unit in self.units for flat in unit.flats if flat.is_trained)


def _forget_weight_tensor(module: torch.nn.Module) -> None:
    """Drop a second reference that modules of Transformer Engine may have to the memory of their first weights."""
    if hasattr(module, "weight_tensor"):
        module.weight_tensor = None  # type: ignore[assignment]


def publish_weights(chunks: Iterable[torch.nn.Module]) -> None:
    """Send the shards that an update has changed to the ranks that keep whole weights.  Collective."""
    for chunk in chunks:
        if isinstance(chunk, ShardedModel):
            chunk.publish()


def output_weight_in_use(chunk: torch.nn.Module, *, until_backward: bool) -> AbstractContextManager[None]:
    """See `ShardedModel.output_weight_in_use`; an unsharded chunk needs no preparation."""
    if isinstance(chunk, ShardedModel):
        return chunk.output_weight_in_use(until_backward=until_backward)
    return nullcontext()


def gradient_of(chunk: Any, weight: Any) -> Tensor | None:
    """This rank's part of the summed gradient of `weight`; None if other ranks hold all of it."""
    held = chunk.shard_of(weight) if isinstance(chunk, ShardedModel) else weight
    return None if held is None else held.main_grad


def leave_groups(chunks: Iterable[Any]) -> None:
    """Destroy the groups that were made for shards, unless all groups are destroyed.  Collective."""
    chunk = next(iter(chunks))  # all chunks have the same groups
    if isinstance(chunk, ShardedModel) and dist.is_initialized():
        for ranks in chunk.ranks.values():
            ranks.leave()
