"""A model chunk whose weights or gradients are sharded; takes the place of core's DistributedDataParallel.

Forward: before a unit runs, its weights are gathered, and the gather of the next unit starts; afterwards they are
freed.  Backward: when the gradient of a unit's output arrives, the unit is opened: its weights are gathered again, and
a buffer for its gradients is made.  Opening a unit closes the one before: its weights are freed, its gradients are summed
over ranks, and each rank adds its part to its shard.  With recomputation, the repeated forward pass opens the unit, so
it needs no gather of its own.

    forward     embedding   layer 1   layer 2   final norm   output and loss
    backward    output and loss   final norm   layer 2   layer 1   embedding

So at most two units have whole weights.  One buffer of gradients exists, or two with `overlap`: the sum of one unit's
gradients is then under way while the next unit computes.  Every rank opens units in the same order, because the order
follows from the model alone.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.autograd import Variable

from sft.mcore.sharding.core_buffers import ShardParameter, buffers_of, shard_parameters
from sft.mcore.sharding.ranks import ShardRanks
from sft.mcore.sharding.units import Reduction, Unit, units_of


class ShardedModel(_BaseDataParallel):
    """Runs `module`, a HiddenStatesGPT.

    ranks          for dense weights (False) and for weights of experts (True)
    keeps_weights  whether whole weights stay in memory, and only gradients are sharded
    overlap        whether sums of gradients run while the next unit computes

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
        self.pre_process = module.pre_process  # core asks the chunk, to sum the gradients of a tied weight
        self.share_embeddings_and_output_weights = module.share_embeddings_and_output_weights
        self.keeps_weights, self._overlap = keeps_weights, overlap
        self.units = units_of(module, ranks, keeps_weights=keeps_weights)
        flats = [flat for unit in self.units for flat in unit.flats]
        names = {id(param): name for name, param in module.named_parameters()}
        self.shards = {names[id(part.whole)]: part for part in shard_parameters(flats)}
        parts = list(self.shards.values())
        self.buffers = buffers_of([flat for flat in flats if not flat.is_expert], parts, ddp_config)
        self.expert_parallel_buffers = buffers_of([flat for flat in flats if flat.is_expert], parts, ddp_config)
        self._opened: Unit | None = None  # the unit whose gradients are being computed
        self._reduction: Reduction | None = None  # under way
        self._in_backward = False
        self._last_used = -1  # number of the unit that the forward pass has reached
        for unit in self.units:
            if unit.module is not None:
                unit.module.register_forward_pre_hook(partial(self._before, unit))
                unit.module.register_forward_hook(partial(self._after, unit))
            for param in (param for flat in unit.flats if flat.is_trained for param in flat.params):
                param.register_post_accumulate_grad_hook(partial(self._add_gradient, unit))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, ShardParameter]]:
        yield from self.shards.items()

    def shard_of(self, weight: torch.nn.Parameter) -> ShardParameter | None:
        """This rank's part of a weight; None if other ranks hold all of it."""
        return next((part for part in self.shards.values() if part.whole is weight), None)

    def shared_embedding_or_output_weight(self) -> ShardParameter | None:
        """The tied weight whose gradients core sums over the first and the last pipeline stage."""
        return self.shard_of(self.module.output_weight())

    # forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._last_used = -1
        output = self.module(*args, **kwargs)
        for tensor in _with_gradient(output):
            tensor.register_hook(self._begin_backward)
        return output

    @contextmanager
    def output_weight_in_use(self, *, until_backward: bool) -> Iterator[None]:
        """A context in which the loss head finds the whole output weight, and a buffer for its gradient.

        until_backward: whether backward of the loss head also needs both; they then stay until the next unit is opened
        """
        weight = self.module.output_weight()
        (unit,) = (unit for unit in self.units if any(weight is param for flat in unit.flats for param in flat.params))
        if torch.is_grad_enabled():
            self._open(unit)
            yield
            if not until_backward:
                self._close()
        else:
            unit.make_whole()
            yield
            unit.free()

    def _before(self, unit: Unit, module: torch.nn.Module, args: Any) -> None:
        if self._in_backward:  # backward repeats this forward pass
            self._open(unit)
            return
        unit.make_whole()
        number = self.units.index(unit)
        if self._last_used < number < len(self.units) - 1:  # not for the embedding of multi-token prediction
            self._last_used = number
            self.units[number + 1].gather()

    def _after(self, unit: Unit, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not self._in_backward:
            unit.free()
        for tensor in _with_gradient(output):
            tensor.register_hook(partial(self._on_gradient, unit))

    # backward

    def _begin_backward(self, grad: Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._end_backward)

    def _on_gradient(self, unit: Unit, grad: Tensor) -> None:
        self._begin_backward(grad)
        self._open(unit)

    def _open(self, unit: Unit) -> None:
        if self._opened is unit:
            return
        self._close()
        unit.make_whole()
        self._opened = unit
        before = self.units.index(unit) - 1
        if self._in_backward and before > 0:  # backward of the embedding, the first unit, does not read its weight
            self.units[before].gather()
        unit.open_gradients()

    def _close(self) -> None:
        if self._opened is not None:
            unit, self._opened = self._opened, None
            unit.free()
            if unit.is_trained:
                self._finish_reduction()
                self._reduction = unit.reduce()
        if not self._overlap:
            self._finish_reduction()

    def _add_gradient(self, unit: Unit, param: Any) -> None:
        """Add the gradient that autograd computed; a kernel or the loss head may have added it already."""
        if not param.grad_added_to_main_grad or getattr(param, "zero_out_wgrad", False):
            self._open(unit)
            param.main_grad.add_(param.grad)
        param.grad = None

    def _end_backward(self) -> None:
        self._close()
        self._in_backward = False
        for unit in self.units:
            unit.free()

    def _finish_reduction(self) -> None:
        if self._reduction is not None:
            self._reduction.finish()
            self._reduction = None

    # the step, as core calls it

    def zero_grad_buffer(self) -> None:
        for flat in self._trained:
            for param in flat.params:
                param.grad_added_to_main_grad = False
            flat.shard_grad.zero_()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Finish all sums, and sum the gradients over the replicas of this rank's shards."""
        self._finish_reduction()
        for flat in self._trained:
            if flat.ranks.replicas is not None:
                dist.all_reduce(flat.shard_grad, group=flat.ranks.replicas)

    def scale_gradients(self, scaling_factor: float) -> None:
        for flat in self._trained:
            flat.shard_grad.mul_(scaling_factor)

    def start_param_sync(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: core 0.16 calls this after an update, core 0.19 does not.  See `publish`."""

    def publish(self) -> None:
        """Send the updated shards to all ranks, if these keep whole weights."""
        for unit in self.units if self.keeps_weights else ():
            unit.publish()

    @property
    def _trained(self) -> Iterator[Any]:
        return (flat for unit in self.units for flat in unit.flats if flat.is_trained)


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
    """What this rank holds of the summed gradient of `weight`; None if other ranks hold all of it."""
    held = chunk.shard_of(weight) if isinstance(chunk, ShardedModel) else weight
    return None if held is None else held.main_grad


def _with_gradient(output: Any) -> Iterator[Tensor]:
    """The tensors of a module's output that require a gradient."""
    for value in output if isinstance(output, tuple) else (output,):
        if isinstance(value, Tensor) and value.requires_grad:
            yield value
