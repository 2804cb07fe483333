"""LoRA: trains two small factors beside each frozen weight (Hu et al., 2021, arXiv:2106.09685).

    output = W x + scale * B (A x)        W [out, in] frozen, A [rank, in], B [out, rank]

An adapter is a pair of factors for one Linear of the Hugging Face model, such as `q_proj`.  Our weight `linear_qkv`
consists of the rows of three such Linears and has up to three adapters, so an export is exactly what was trained.
One factor is split over tp as the weight is, and the other factor is replicated:

    column parallel (qkv, gate and up)   B holds this rank's rows, A is replicated
    row parallel (proj, down)            A holds this rank's columns, B is replicated

An adapter adds to the output of its layer, so its output must be in the same state: this rank's rows, the sum over tp,
this rank's tokens of that sum, or this rank's term of a sum that the dispatcher of experts makes later.

`sft.hf.lora_targets` selects the weights.  `checkpoint_io` stores the factors under the names of PEFT.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from sft.adapters import AdaptedWeight, Adapter
from sft.config.lora import LoraConfig
from sft.errors import ConfigError
from sft.mcore.process_groups import ProcessGroups
from sft.parallel.collectives import all_gather_objects

PREFIX = "adapter."  # of the keys of adapters in a checkpoint


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a layer is split over the ranks of `group`.

    by_columns         ranks hold columns of the weight (row parallel); False: rows (column parallel)
    sequence_parallel  between layers, ranks hold different tokens
    sums_later         another module sums the outputs of a row-parallel layer, and the input gradients of a
                       column-parallel layer
    replica            rank among the ranks that hold the same part of the weight
    """

    group: dist.ProcessGroup
    by_columns: bool
    sequence_parallel: bool
    sums_later: bool
    replica: int

    @property
    def size(self) -> int:
        return self.group.size()

    def project(self, x: Tensor, a: Tensor) -> Tensor:
        """A x for the tokens of the layer's output, [t, 1, rank]; a: this rank's part of A"""
        if self.by_columns:
            inner = x @ a.t()
            if self.size == 1 or self.sums_later:
                return inner
            reduce = reduce_scatter_to_sequence_parallel_region if self.sequence_parallel else _sum
            return reduce(inner, group=self.group)
        if self.sums_later:  # each rank's rows give a part of A's gradient
            return x @ self._replicated(a).t()
        inner = x @ a.t()
        if self.size == 1:
            return inner
        return (_gather if self.sequence_parallel else _copy)(inner, group=self.group)

    def outer(self, b: Tensor) -> Tensor:
        """B, as the output must be multiplied with."""
        return self._replicated(b) if self.by_columns and self.sums_later else b

    def _replicated(self, factor: Tensor) -> Tensor:
        """`factor`, whose gradient backward sums over the group."""
        return factor if self.size == 1 else _copy(factor, group=self.group)


_copy: Callable[..., Tensor] = copy_to_tensor_model_parallel_region
_sum: Callable[..., Tensor] = reduce_from_tensor_model_parallel_region
_gather: Callable[..., Tensor] = gather_from_sequence_parallel_region  # backward sums over ranks and scatters tokens


class Factors(torch.nn.Module):
    """This rank's parts of A and B of one adapter.

    a: [rank, columns]; b: one matrix [rows, rank] for each part of our weight that the Linear consists of
    """

    def __init__(self, adapter: Adapter, weight: AdaptedWeight, rank: int, split: Split, base: Tensor) -> None:
        super().__init__()
        self.adapter, self.weight, self.split, self.rank = adapter, weight, split, rank
        num_columns = weight.num_columns // (split.size if split.by_columns else 1)
        num_rows = [weight.part_rows[part] // (1 if split.by_columns else split.size) for part in adapter.parts]
        self.a = torch.nn.Parameter(base.new_full((rank, num_columns), math.nan))
        self.b = torch.nn.ParameterList(base.new_full((rows, rank), math.nan) for rows in num_rows)
        self._mark(self.a, base, is_split=split.by_columns, axis=1)
        for factor in self.b:
            self._mark(factor, base, is_split=not split.by_columns, axis=0)

    def _mark(self, factor: Any, base: Any, *, is_split: bool, axis: int) -> None:
        """Mark the factor for core: over which ranks it sums the gradient, and on which it counts it in the norm."""
        split, of_dense = self.split, getattr(base, "allreduce", True)
        factor.allreduce = of_dense
        factor.sequence_parallel = split.sequence_parallel and not is_split  # each rank has seen its own tokens only
        if of_dense:
            is_counted = is_split and split.size > 1  # otherwise core counts it on the first rank of tp
        else:
            is_counted = is_split or split.group.rank() == 0
        if is_counted:
            set_tensor_model_parallel_attributes(factor, True, axis, 1)

    def shards(self) -> Iterator[ShardedTensor]:
        """The factors as parts of PEFT's tensors."""
        rank = self.split.group.rank()
        a_shape, b_shape = (self.rank, self.weight.num_columns), (self.weight.rows_of(self.adapter), self.rank)
        column = rank * self.a.shape[1] if self.split.by_columns else 0
        yield self._shard("lora_A", self.a, a_shape, (0, column), is_split=self.split.by_columns)
        first = 0
        for part, factor in zip(self.adapter.parts, self.b):
            row = first if self.split.by_columns else first + rank * factor.shape[0]
            yield self._shard("lora_B", factor, b_shape, (row, 0), is_split=not self.split.by_columns)
            first += self.weight.part_rows[part]

    def _shard(
        self, name: str, factor: Tensor, shape: tuple[int, ...], offset: tuple[int, ...], *, is_split: bool
    ) -> ShardedTensor:
        return ShardedTensor(
            key=f"{PREFIX}{self.adapter.name}.{name}.weight",
            data=factor,
            dtype=factor.dtype,
            local_shape=tuple(factor.shape),
            global_shape=shape,
            global_offset=offset,
            axis_fragmentations=None,
            replica_id=(0, 0 if is_split else self.split.group.rank(), self.split.replica),
        )


class AdaptedLinear(torch.nn.Module):
    """A frozen linear layer of core with its adapters; takes the layer's place in the model."""

    def __init__(self, base: Any, weight: AdaptedWeight, split: Split, lora: LoraConfig) -> None:
        super().__init__()
        self.base, self.weight, self.split, self.scale = base, weight, split, lora.scale
        assert lora.rank is not None
        factors = [Factors(adapter, weight, lora.rank, split, base.weight) for adapter in weight.adapters]
        self.factors: Any = torch.nn.ModuleList(factors)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """x [t, 1, in] -> [t, 1, out] and the layer's bias, as the layer itself returns them."""
        output, bias = self.base(x, *args, **kwargs)
        return output + self._adapters_output(x), bias

    def _adapters_output(self, x: Tensor) -> Tensor:
        inner = self.split.project(x, torch.cat([factors.a for factors in self.factors])) * self.scale
        by_part: dict[int, Tensor] = {}
        for factors, of_factors in zip(self.factors, inner.split([factors.rank for factors in self.factors], -1)):
            for part, b in zip(factors.adapter.parts, factors.b):
                by_part[part] = of_factors @ self.split.outer(b).t()
        if len(self.weight.part_rows) == 1:
            return by_part[0]
        ranks = 1 if self.split.by_columns else self.split.size
        groups = max(1, self.weight.num_groups // ranks)
        parts = []
        for part, rows in enumerate(self.weight.part_rows):
            output = by_part.get(part)
            if output is None:
                output = inner.new_zeros(*inner.shape[:-1], rows // ranks)
            parts.append(output.unflatten(-1, (groups, -1)))
        return torch.cat(parts, -1).flatten(-2)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Of the layer alone: `shards` describes the adapters."""
        return self.base.sharded_state_dict(*args, **kwargs)


def attach(chunk: Any, weights: Iterable[AdaptedWeight], lora: LoraConfig, groups: ProcessGroups) -> None:
    """Freeze every weight of a model chunk, and give its layers their adapters, without values.

    Call this function before core allocates buffers for gradients.
    """
    chunk.requires_grad_(False)
    _require_input_gradient(chunk)
    layers = {layer.layer_number - 1: layer for layer in chunk.decoder.layers}
    for weight in weights:
        if weight.layer not in layers:
            continue
        path = _path(weight, groups)
        if path is not None:
            parent, _, name = path.rpartition(".")
            base = layers[weight.layer].get_submodule(path)
            split = _split(base, weight, groups)
            setattr(layers[weight.layer].get_submodule(parent), name, AdaptedLinear(base, weight, split, lora))


def check_stages(chunks: Iterable[torch.nn.Module], groups: ProcessGroups) -> None:
    """Raise ConfigError unless all ranks train the same kinds of weights.  Collective.

    Core has an optimizer for experts and one for other weights, and ranks sum norms for each of them.
    """
    kinds = sorted(
        {"experts" if factors.weight.expert is not None else "other layers" for factors in factors_of(chunks)}
    )
    by_rank = all_gather_objects(lambda: (groups.pp_rank, kinds), groups.control)
    if len({tuple(of_rank) for _, of_rank in by_rank}) > 1:
        stages = "; ".join(f"stage {stage}: {', '.join(names) or 'nothing'}" for stage, names in sorted(by_rank))
        raise ConfigError(
            f"lora.targets gives some pipeline stages other kinds of adapters than others ({stages}).  Name targets in "
            "all layers, or use parallel.pp=1."
        )


def _require_input_gradient(chunk: Any) -> None:
    """Make the embedding's output need a gradient.

    A recomputed layer has a gradient only if one of its inputs needs one, and with a frozen embedding none would.
    """
    if chunk.pre_process:
        chunk.embedding.register_forward_hook(
            lambda module, args, output: output.requires_grad_() if torch.is_grad_enabled() else output
        )


def _path(weight: AdaptedWeight, groups: ProcessGroups) -> str | None:
    """The layer's module that holds the weight; None if another rank holds this expert."""
    if weight.expert is None:
        return weight.module
    count = weight.num_experts // groups.collection.ep.size()
    local = weight.expert - groups.collection.ep.rank() * count
    return (
        weight.module.replace(".experts.experts.", f".experts.local_experts.{local}.") if 0 <= local < count else None
    )


def _split(base: Any, weight: AdaptedWeight, groups: ProcessGroups) -> Split:
    collection, is_expert = groups.collection, weight.expert is not None
    group = collection.expt_tp if is_expert else collection.tp
    return Split(
        group=group,
        by_columns=not weight.is_column_parallel,
        sequence_parallel=base.config.sequence_parallel and not is_expert and group.size() > 1,
        sums_later=is_expert and group.size() > 1,
        replica=(collection.expt_dp if is_expert else collection.dp_cp).rank(),
    )


def factors_of(chunks: Iterable[torch.nn.Module]) -> Iterator[Factors]:
    """The adapters of this rank."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, Factors))


def sharded_tensors(chunks: Iterable[torch.nn.Module]) -> Iterator[ShardedTensor]:
    """Every factor of this rank as a part of a tensor with PEFT's name."""
    for factors in factors_of(chunks):
        yield from factors.shards()


@torch.no_grad()
def initialise(chunks: Iterable[torch.nn.Module], seed: int) -> None:
    """Set the values of a new run: A is uniform in +-1 / sqrt(columns), as in PEFT, and B is 0.

    A value is a function of (seed, name, position), so it is the same on every layout and device.
    """
    for shard in sharded_tensors(chunks):
        if shard.key.endswith("lora_B.weight"):
            shard.data.zero_()
            continue
        digest = hashlib.sha256(f"{seed}:{shard.key}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        bound = 1 / math.sqrt(shard.global_shape[1])
        whole = torch.empty(shard.global_shape).uniform_(-bound, bound, generator=generator)
        first = shard.global_offset[1]
        shard.data.copy_(whole[:, first : first + shard.data.shape[1]])
