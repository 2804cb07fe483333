"""Implements LoRA: trains two small factors beside each frozen weight (Hu et al., 2021, arXiv:2106.09685).

    output = W x + scale * B (A x)        W [out, in] frozen, A [rank, in], B [out, rank]

An adapter is a pair of factors for one Linear of the Hugging Face model, such as `q_proj`.  Our weight `linear_qkv`
consists of the rows of three such Linears and has up to three adapters, so an export has exactly the trained factors.
One factor is split over tp as the weight is, and the other factor is replicated:

    column parallel (qkv, gate and up)   B holds this rank's rows, A is replicated
    row parallel (proj, down)            A holds this rank's columns, B is replicated

The output of an adapter is added to the output of its layer, so both must be split over ranks in the same way: into
rows, or summed over tp, or summed over tp and split by tokens.

The factors of all experts of a layer on this rank are one tensor, and a checkpoint holds one tensor for all experts of
a layer (see experts/grouped.py).

`sft.weights.lora.targets` selects the weights.  `checkpoint_io` stores the factors under the names of PEFT.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from sft.config.lora import LoraConfig
from sft.layers.adapters import AdaptedWeight, names_of
from sft.mcore.experts.grouped import layer_by_layer
from sft.mcore.experts.router import Router
from sft.mcore.experts.rows import RowsOfExperts
from sft.mcore.lora.factors import Factors
from sft.mcore.lora.products import OutputSlice, added, added_rows, projected
from sft.mcore.lora.routed import RouterAdapter
from sft.mcore.lora.split import Split
from sft.mcore.modules.unrepeated import around
from sft.mcore.process_groups import ProcessGroups
from sft.mcore.sharding.parts import held


class Adapted(torch.nn.Module):
    """A frozen layer of core with its adapters.  It replaces the layer in the model."""

    def __init__(self, base: Any, weight: AdaptedWeight, split: Split, lora: LoraConfig) -> None:
        super().__init__()
        self.base, self.weight, self.split, self.scale = base, weight, split, lora.scale
        assert lora.rank is not None
        like = next(base.parameters())
        factors = [Factors(adapter, weight, lora.rank, split, like) for adapter in weight.adapters]
        self.factors: Any = torch.nn.ModuleList(factors)
        self.output_slices = self._output_slices()

    def _output_slices(self) -> tuple[OutputSlice, ...]:
        """For each part of each factor B, the rows of the layer's output to which its product is added.

        If the weight has several parts, its rows form groups, and each group has rows of all parts, as in linear_qkv.
        """
        ranks = 1 if self.split.by_columns else self.split.size
        groups = max(1, self.weight.num_groups // ranks) if len(self.weight.part_rows) > 1 else 1
        ends = list(accumulate(rows // ranks // groups for rows in self.weight.part_rows))
        rows = [slice(first, end) for first, end in zip([0, *ends], ends)]
        return tuple(
            OutputSlice(slice(number * factors.rank, (number + 1) * factors.rank), groups, rows[part])
            for number, factors in enumerate(self.factors)
            for part in factors.adapter.parts
        )

    def output_rows(self, x: Tensor, rows: slice) -> Tensor:
        """The given rows of the output, without bias: x [k, 1, in] -> [k, 1, rows].

        x has the same k tokens on every tp rank.  The weight must be column-parallel and belong to one Linear.  The
        gradient of x is that through this rank's rows.
        """
        (factors,) = self.factors
        # With sequence parallelism, core sums the gradient of A over ranks.
        a = factors.a if self.split.sequence_parallel else self.split.summing_gradients(factors.a)
        x, inner = projected(x, a)
        output = torch.nn.functional.linear(x, self.base.weight[rows])
        return added(output, inner, [factors.b[0][rows]], [OutputSlice(slice(None), 1, slice(None))], self.scale)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The entries of the base layer alone; `leaves` describes the adapters."""
        return self.base.sharded_state_dict(*args, **kwargs)


class AdaptedLinear(Adapted):
    """A frozen linear layer outside of experts, with its adapters."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """x [t, 1, in] -> [t, 1, out] and the layer's bias, as the layer itself returns them."""
        x, inner = projected(x, torch.cat([factors.a for factors in self.factors]))
        inner = self.split.for_outputs(inner)
        b = [matrix for factors in self.factors for matrix in factors.b]

        def adapted(linear: Any, x: Tensor, inner: Tensor, *_: Tensor) -> tuple[Tensor, Tensor | None]:
            output, bias = linear(x, *args, **kwargs)
            return added(output, inner, b, self.output_slices, self.scale), bias

        return around(self.base, adapted, [x, inner], b)


class AdaptedExperts(Adapted):
    """A frozen linear layer of this rank's experts, with their adapters.

    The adapters of all experts are computed at once.  The dispatcher of experts sums outputs and input gradients over
    etp, so each etp rank adds only its term of these sums.
    """

    def forward(self, x: Tensor, counts: list[int], *weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [n, in], sorted by expert -> [n, out], and the bias of the layer.  counts: number of rows of each expert"""
        by_columns, summing = self.split.by_columns, self.split.summing_gradients
        rows = RowsOfExperts.of(counts, x.device)
        a = [factors.a if by_columns else summing(factors.a) for factors in self.factors]
        inners = [rows.times(x, matrices) * self.scale for matrices in a]

        def adapted(linear: Any, x: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor | None]:
            output, bias = linear(x, counts, *weights)
            slices = iter(self.output_slices)
            for factors, inner in zip(self.factors, tensors):
                for b in factors.b:  # one product at a time is in memory
                    output = added_rows(output, rows.times(inner, summing(b) if by_columns else b), next(slices))
            return output, bias

        return around(self.base, adapted, [x, *inners], [b for factors in self.factors for b in factors.b])


def attach(chunk: Any, weights: Iterable[AdaptedWeight], lora: LoraConfig, groups: ProcessGroups) -> None:
    """Attach adapters to the layers of a frozen model chunk.  Their factors are NaN until they are drawn or loaded.

    Call this function before core allocates buffers for gradients.
    """
    layers = {layer.layer_number - 1: layer for layer in chunk.decoder.layers}
    for weight in weights:
        if weight.layer not in layers:
            continue
        layer, path = layers[weight.layer], weight.module
        split = _split(layer.config, weight, groups)
        if weight.num_experts:
            layer.mlp.experts = layer_by_layer(layer.mlp.experts)
            path = path.replace(".experts.experts.", ".experts.")
        if isinstance(router := layer.get_submodule(path), Router):
            router.adapter = RouterAdapter(weight, split, lora, router.weight)
            continue
        parent, _, name = path.rpartition(".")
        adapted = (AdaptedExperts if weight.num_experts else AdaptedLinear)(
            layer.get_submodule(path), weight, split, lora
        )
        setattr(layer.get_submodule(parent), name, adapted)


def _split(core: TransformerConfig, weight: AdaptedWeight, groups: ProcessGroups) -> Split:
    collection, is_expert = groups.collection, weight.num_experts > 0
    group = collection.expt_tp if is_expert else collection.tp
    count = weight.num_experts // collection.ep.size()
    return Split(
        group=group,
        by_columns=not weight.is_column_parallel,
        sequence_parallel=core.sequence_parallel and not is_expert and group.size() > 1,
        replica=(collection.expt_dp if is_expert else collection.dp_cp).rank(),
        is_duplicated=weight.is_duplicated,
        experts=range(collection.ep.rank() * count, (collection.ep.rank() + 1) * count),
    )


def factors_of(chunks: Iterable[torch.nn.Module]) -> Iterator[Factors]:
    """Yield the factors of all adapters on this rank."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, Factors))


def leaves(chunks: Iterable[torch.nn.Module]) -> Iterator[ShardedTensor | ShardedTensorFactory]:
    """Yield every factor of this rank as a checkpoint holds it: as a part of PEFT's tensor, or of a stack of tensors.

    The factors of the experts of a layer are one tensor [experts, ...], whose name has * for the expert's number.  A
    factor whose rows are in separate blocks of PEFT's tensor is a factory of several parts.
    """
    for factors in factors_of(chunks):
        yield from factors.leaves()


def factor_parts(chunks: Iterable[torch.nn.Module]) -> Iterator[ShardedTensor]:
    """Yield every factor of this rank as a part of the tensor of a checkpoint; `data` is a view of the factor."""
    whole, parts = held(chunks, list(leaves(chunks)))
    yield from (*whole, *parts)


def of_linears(shard: ShardedTensor) -> Iterator[ShardedTensor]:
    """Yield a factor as a part of a 2-D tensor, or that of each expert; `data` is a view of the factor."""
    if len(shard.global_shape) == 2:
        yield shard
        return
    names = names_of(shard.key, range(shard.global_offset[0], shard.global_offset[0] + shard.local_shape[0]))
    for name, data in zip(names, shard.data.detach()):
        shape, offset = shard.global_shape[1:], shard.global_offset[1:]
        yield replace(
            shard, key=name, data=data, local_shape=tuple(data.shape), global_shape=shape, global_offset=offset
        )


def linear_tensors(chunks: Iterable[torch.nn.Module]) -> Iterator[ShardedTensor]:
    """Yield every factor of this rank as a part of a 2-D tensor, or that of each expert; see `of_linears`."""
    for shard in factor_parts(chunks):
        yield from of_linears(shard)


@torch.no_grad()
def initialise(chunks: Iterable[torch.nn.Module], seed: int) -> None:
    """Set the values of a new run: A is uniform in +-1 / sqrt(columns), as in PEFT, and B is 0.

    A value is a function of (seed, name, position), so it is the same on every layout and device.
    """
    for shard in linear_tensors(chunks):
        if shard.key.endswith("lora_B.weight"):
            shard.data.zero_()
            continue
        digest = hashlib.sha256(f"{seed}:{shard.key}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        bound = 1 / math.sqrt(shard.global_shape[1])
        whole = torch.empty(shard.global_shape).uniform_(-bound, bound, generator=generator)
        row, column = shard.global_offset
        shard.data.copy_(whole[row:, column:][: shard.data.shape[0], : shard.data.shape[1]])
