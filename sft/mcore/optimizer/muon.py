"""Muon (Jordan et al., 2024): the momentum of a matrix is orthogonalised before it is added to the weight.

Muon and core's Adam together replace the Adam in core's optimizer, and each updates some of the parameter groups.  A
rank keeps momentum and weights of the elements that its optimizer updates, as with Adam.  `matrix_plan.py` says how
ranks exchange momentum and updates, so that each matrix is whole on its owner.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor
from torch.optim import Optimizer

from sft.config.muon import MuonConfig
from sft.config.train import MUON
from sft.layers.adapters import Rows, Trained
from sft.mcore.lora import adapted
from sft.mcore.lora.factors import PREFIX
from sft.mcore.optimizer.inner import all_chained, held_parts, is_empty, moments_of
from sft.mcore.optimizer.matrix_plan import ChunkTransfer, MatrixChunk, MatrixName, Round, WholeMatrix, num_rows, rounds
from sft.mcore.optimizer.newton_schulz import orthogonalised
from sft.mcore.process_groups import ProcessGroups
from sft.mcore.sharding.parts import pieces, shards_by_param, with_all_axes
from sft.parallel.collectives import all_gather_objects

UPDATER = "updater"  # key of a parameter group that Muon updates, with the value "muon"
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Held = tuple[str, tuple[int, ...], tuple[int, int], list[tuple[int, int, int, int]]]


@dataclass(frozen=True)
class HeldSlice:
    """The slice of a rank's tensor that is a chunk: elements `first` to `first + numel - 1` of the flattened `main`."""

    main: Tensor
    first: int


class Muon(Optimizer):
    """Updates the parameters of its groups, flat parts of matrices, as torch.optim.Muon updates whole matrices.

    slices: for each matrix with chunks on this rank, the slice of each chunk
    group: the ranks of this pipeline stage, None if there is one; rank numbers are those in this group
    """

    def __init__(self, groups: list[dict[str, Any]], config: MuonConfig, device: torch.device) -> None:
        super().__init__([{"params": []}], {})
        self.param_groups = groups  # shared with core, which sets the learning rate
        self.config, self.dtype, self.device = config, _DTYPES[config.ns_dtype], device
        self.slices: dict[MatrixName, dict[MatrixChunk, HeldSlice]] = {}
        self.rounds: list[Round] = []
        self.group: dist.ProcessGroup | None = None

    def state_types(self, param: Tensor) -> dict[str, torch.dtype]:
        return dict.fromkeys(MUON.moments, torch.float32)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make an update.  Collective over the ranks of the pipeline stage."""
        settings: dict[Tensor, dict[str, Any]] = {}
        for values in self.param_groups:
            values["step"] = values.get("step", 0) + 1
            for param in values["params"]:
                settings[param] = values
                self._momentum(param).lerp_(param.grad, 1 - self.config.momentum)
                param.mul_(1 - values["lr"] * values["weight_decay"])
        for planned in self.rounds:
            for transfer, update in self._updates(planned):
                held = self.slices[transfer.matrix.name][transfer.chunk]
                self._add(held, transfer, update, settings[held.main]["lr"])

    def _momentum(self, param: Tensor) -> Tensor:
        (momentum,) = moments_of(self, param).values()
        return momentum

    def _direction(self, transfer: ChunkTransfer) -> Tensor:
        """The momentum of a chunk of this rank, flat, as it is sent."""
        held = self.slices[transfer.matrix.name][transfer.chunk]

        def part(whole: Tensor) -> Tensor:
            return whole.view(-1).narrow(0, held.first, transfer.chunk.numel)

        momentum = part(self._momentum(held.main))
        if self.config.nesterov:
            assert held.main.grad is not None
            momentum = part(held.main.grad).lerp(momentum, self.config.momentum)
        return momentum.to(self.dtype)

    def _add(self, held: HeldSlice, transfer: ChunkTransfer, update: Tensor, rate: float) -> None:
        """Add the update of a chunk, flat, to this rank's weights."""
        chunk, columns = transfer.chunk, transfer.matrix.shape[1]
        weights = held.main.view(-1).narrow(0, held.first, chunk.numel).view(chunk.size)
        update = update.view(chunk.size)
        factors = [factor(self.config.scale, num_rows(rows), columns) for rows in transfer.matrix.projections]
        if len(set(factors)) == 1:
            weights.add_(update, alpha=-rate * factors[0])
            return
        for rows, scale in zip(transfer.matrix.projections, factors):
            for first, end in rows:
                own = slice(max(first - chunk.row, 0), max(min(end - chunk.row, chunk.size[0]), 0))
                if own.start < own.stop:
                    weights[own].add_(update[own], alpha=-rate * scale)

    def _updates(self, planned: Round) -> Iterator[tuple[ChunkTransfer, Tensor]]:
        """Exchange the matrices of a round.  Yields the update of each chunk of this rank, flat.  Collective."""
        rank = self.group.rank() if self.group is not None else 0
        sent = {owner: [t for t in listed if t.sender == rank] for owner, listed in planned.transfers.items()}
        own = planned.transfers.get(rank, [])
        received = self._all_to_all(
            {owner: [self._direction(transfer) for transfer in listed] for owner, listed in sent.items()},
            {sender: [t for t in own if t.sender == sender] for sender in {t.sender for t in own}},
        )
        matrices = planned.matrices.get(rank, [])
        whole = {matrix.name: self._empty(matrix.shape) for matrix in matrices}
        for transfer, values in received:
            _view(whole[transfer.matrix.name], transfer.chunk).copy_(values.view(transfer.chunk.size))
        del received
        self._orthogonalise(matrices, whole)
        holders = {holder for transfer in own for holder in transfer.holders}
        yield from self._all_to_all(
            {
                holder: [_view(whole[t.matrix.name], t.chunk).flatten() for t in own if holder in t.holders]
                for holder in holders
            },
            {owner: [t for t in listed if rank in t.holders] for owner, listed in planned.transfers.items()},
        )

    def _empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(tuple(shape), dtype=self.dtype, device=self.device)

    def _orthogonalise(self, matrices: Iterable[WholeMatrix], whole: dict[MatrixName, Tensor]) -> None:
        """Replace each projection by its orthogonalised values.  Projections of equal shape are computed together."""
        by_shape: dict[tuple[int, int], list[tuple[Tensor, Rows]]] = {}
        for matrix in matrices:
            for rows in matrix.projections:
                by_shape.setdefault((num_rows(rows), matrix.shape[1]), []).append((whole[matrix.name], rows))
        for listed in by_shape.values():
            stacked = torch.stack([torch.cat([values[a:b] for a, b in rows]) for values, rows in listed])
            for (values, rows), result in zip(listed, orthogonalised(stacked, self.config.ns_steps)):
                parts = result.split([end - first for first, end in rows])
                for (first, end), part in zip(rows, parts):
                    values[first:end].copy_(part)

    def _all_to_all(
        self, outgoing: dict[int, list[Tensor]], incoming: dict[int, list[ChunkTransfer]]
    ) -> list[tuple[ChunkTransfer, Tensor]]:
        """Send each rank its tensors, and return what other ranks send for `incoming`.  Collective."""
        size = self.group.size() if self.group is not None else 1
        in_order = [transfer for rank in range(size) for transfer in incoming.get(rank, [])]
        if size == 1:
            return list(zip(in_order, outgoing.get(0, [])))
        tensors = [tensor for rank in range(size) for tensor in outgoing.get(rank, [])]
        to_send = torch.cat(tensors) if tensors else self._empty((0,))
        counts = [sum(transfer.chunk.numel for transfer in incoming.get(rank, [])) for rank in range(size)]
        received = self._empty((sum(counts),))
        lengths = [sum(tensor.numel() for tensor in outgoing.get(rank, [])) for rank in range(size)]
        dist.all_to_all_single(received, to_send, counts, lengths, group=self.group)
        return list(zip(in_order, received.split([transfer.chunk.numel for transfer in in_order])))


class MuonAndAdam:
    """Muon for the parameter groups that UPDATER marks, and core's Adam for the others.

    Has the members that core's optimizers use.
    """

    def __init__(self, adam: Optimizer, config: MuonConfig, device: torch.device) -> None:
        groups = adam.param_groups
        marked = [values for values in groups if UPDATER in values]
        self.muon, self.adam = Muon(marked, config, device), adam
        adam.param_groups = [values for values in groups if UPDATER not in values]
        self.param_groups, self.defaults = groups, adam.defaults

    @property
    def sub_optimizers(self) -> list[Optimizer]:
        return [self.adam, self.muon]

    @property
    def state(self) -> dict[Tensor, Any]:
        return {**self.adam.state, **self.muon.state}

    def step(self, closure: Any = None) -> None:
        self.adam.step()
        self.muon.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for updater in self.sub_optimizers:
            updater.zero_grad(set_to_none)


def factor(scale: str, num_rows: int, num_columns: int) -> float:
    """The factor of the update of a matrix, as in torch.optim.Muon."""
    if scale == "match_rms_adamw":
        return 0.2 * sqrt(max(num_rows, num_columns))
    return sqrt(max(1, num_rows / num_columns))


def updates(key: str, trained: Trained) -> bool:
    """Whether Muon updates the weight or the factor with this key in a checkpoint."""
    return _projections(key, trained) is not None


def install(
    optimizer: MegatronOptimizer, config: MuonConfig, chunks: Iterable[Any], trained: Trained, groups: ProcessGroups
) -> None:
    """Let Muon update the groups of `optimizer` that UPDATER marks.  Collective over all ranks."""
    cores, shards, stage = all_chained(optimizer), shards_of(chunks), groups.collection.tp_dp_cp
    held: list[list[Held]] = []
    inners: list[Muon | None] = []
    for core in cores:
        if is_empty(core):
            held.append([])
            inners.append(None)
            continue
        core.optimizer = MuonAndAdam(core.optimizer, config, groups.device)
        muon = core.optimizer.muon
        inners.append(muon)
        shapes = _find_slices(core, muon, shards)
        held.append(
            [
                (name.key, name.index, shapes[name], [(c.row, c.column, *c.size) for c in chunks])
                for name, chunks in muon.slices.items()
            ]
        )
    everywhere = all_gather_objects(lambda: held, groups.control)
    ranks = dist.get_process_group_ranks(stage)
    for number, muon in enumerate(inners):
        matrices = _matrices([everywhere[rank][number] for rank in ranks], trained)
        if muon is None:
            assert not matrices, "a rank of the stage has no optimizer"
            continue
        muon.group = stage if len(ranks) > 1 else None
        muon.rounds = rounds(matrices, len(ranks), config)


def _find_slices(core: MegatronOptimizer, muon: Muon, shards: dict[int, Any]) -> dict[MatrixName, tuple[int, int]]:
    """Fill `muon.slices` with this rank's chunks.  Returns the shapes of their matrices."""
    shapes: dict[MatrixName, tuple[int, int]] = {}
    for part in held_parts(core):
        if part.updater is not muon:
            continue
        flat = part.main.detach().view(-1)
        for first, shard in shards[id(part.param)]:
            for piece in map(with_all_axes, pieces(shard, first, flat, part.start, replica=None)):
                begin = piece.data.storage_offset() - flat.storage_offset()
                rows, columns = piece.local_shape[-2:]
                axes = piece.local_shape[:-2]
                for number, inner in enumerate(product(*map(range, axes))):
                    index = tuple(first + local for first, local in zip(piece.global_offset, inner))
                    name = MatrixName(piece.key, index)
                    row, column = piece.global_offset[-2:]
                    chunk = MatrixChunk(row, column, (rows, columns))
                    shapes[name] = tuple(piece.global_shape[-2:])
                    held = HeldSlice(part.main, begin + number * rows * columns)
                    muon.slices.setdefault(name, {})[chunk] = held
    return shapes


def _matrices(held: Sequence[Sequence[Any]], trained: Trained) -> list[WholeMatrix]:
    """The matrices whose chunks ranks hold.  held: for each rank of the stage, its chunks"""
    shapes: dict[MatrixName, tuple[int, int]] = {}
    holders: dict[MatrixName, dict[int, tuple[MatrixChunk, ...]]] = {}
    for rank, of_rank in enumerate(held):
        for key, index, shape, chunks in of_rank:
            name = MatrixName(key, tuple(index))
            shapes[name] = tuple(shape)
            holders.setdefault(name, {})[rank] = tuple(MatrixChunk(row, column, (m, n)) for row, column, m, n in chunks)
    listed = []
    for name in sorted(holders):
        projections = _projections(name.key, trained)
        assert projections is not None, name
        shape = shapes[name]
        listed.append(
            WholeMatrix(name=name, shape=shape, projections=projections or (((0, shape[0]),),), holders=holders[name])
        )
    return listed


def _projections(key: str, trained: Trained) -> tuple[Rows, ...] | None:
    """The rows of each projection of a weight; () for a factor of an adapter, and None if Adam updates the weight."""
    return () if key.startswith(PREFIX) else trained.muon.get(key)


def shards_of(chunks: Iterable[Any]) -> dict[int, Any]:
    """The result of `shards_by_param` for the weights and adapters of all model chunks of this rank."""
    chunks = list(chunks)
    states = [chunk.module.sharded_state_dict() for chunk in chunks]
    return shards_by_param([*adapted.leaves(chunks), *states])


def _view(matrix: Tensor, chunk: MatrixChunk) -> Tensor:
    rows, columns = chunk.size
    return matrix[chunk.row : chunk.row + rows, chunk.column : chunk.column + columns]
