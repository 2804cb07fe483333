"""Plans which rank orthogonalises which matrix, and what the ranks of a pipeline stage exchange for it.

A rank's optimizer updates parts of weights: a tensor-parallel rank has some rows or columns, and the distributed
optimizer divides these once more.  Muon needs whole matrices.  So each weight gets an owner.  The holders of its chunks
send the owner their momentum, and the owner sends each holder the orthogonalised values of its chunks.  Chunks are
described by their positions in the unsharded weight, as in a checkpoint, so the plan depends on no kind of parallelism.

    weight [4, 6], dp 2, tp 2            owner rank 0
    rank 0  rows 0-1 | rank 2  rows 2-3  rank 2 -> rank 0: momentum of rows 2-3, columns 0-2; ranks 1 and 3 likewise
    rank 1  the columns 3-5 of rows 0-1  rank 0: Newton-Schulz of [4, 6]
    rank 3  the columns 3-5 of rows 2-3  rank 0 -> ranks 1, 2 and 3: the values of their chunks

Weights go to owners by their FLOPs, the largest first: to the rank with the most elements of the weight, unless it
already has more than its share of the FLOPs, else to the rank with the fewest FLOPs.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from sft.config.muon import BATCH, MuonConfig
from sft.layers.adapters import Rows

Index = tuple[int, ...]


@dataclass(frozen=True, order=True)
class MatrixChunk:
    """Rows `row` to `row + size[0] - 1` and columns `column` to `column + size[1] - 1` of an unsharded matrix."""

    row: int
    column: int
    size: tuple[int, int]

    @property
    def numel(self) -> int:
        return prod(self.size)


@dataclass(frozen=True, order=True)
class MatrixName:
    """The key of a weight in checkpoints, and the indices of its layer and expert, if the tensor has these axes."""

    key: str
    index: Index


@dataclass(frozen=True, kw_only=True)
class WholeMatrix:
    """An unsharded weight of `shape`, which consists of projections that are orthogonalised one by one.

    projections: the rows of each projection
    holders: for each rank that updates chunks of the weight, these chunks
    """

    name: MatrixName
    shape: tuple[int, int]
    projections: tuple[Rows, ...]
    holders: Mapping[int, tuple[MatrixChunk, ...]]

    def __post_init__(self) -> None:
        held = sum(chunk.numel for chunk in self.chunks)
        assert held == self.numel, f"{self.name}: ranks hold {dict(self.holders)}"

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def chunks(self) -> dict[MatrixChunk, list[int]]:
        """All chunks, each with the ranks that hold a copy."""
        ranks: dict[MatrixChunk, list[int]] = defaultdict(list)
        for rank, chunks in sorted(self.holders.items()):
            for chunk in chunks:
                ranks[chunk].append(rank)
        return dict(sorted(ranks.items()))

    def flops(self, config: MuonConfig) -> int:
        return sum(config.flops(num_rows(rows), self.shape[1]) for rows in self.projections)


def num_rows(rows: Rows) -> int:
    return sum(end - first for first, end in rows)


@dataclass(frozen=True, kw_only=True)
class ChunkTransfer:
    """The momentum of a chunk of a matrix, which `sender` sends the owner; all `holders` get the chunk's update."""

    matrix: WholeMatrix
    chunk: MatrixChunk
    sender: int
    holders: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Round:
    """The matrices that are orthogonalised at the same time: for each owner, its matrices."""

    matrices: Mapping[int, Sequence[WholeMatrix]]

    @cached_property
    def transfers(self) -> dict[int, list[ChunkTransfer]]:
        """For each owner, the chunks of its matrices, in the order in which they are sent."""
        return {owner: [t for m in matrices for t in _transfers(m, owner)] for owner, matrices in self.matrices.items()}


def _transfers(matrix: WholeMatrix, owner: int) -> list[ChunkTransfer]:
    return [
        ChunkTransfer(matrix=matrix, chunk=chunk, sender=owner if owner in ranks else ranks[0], holders=tuple(ranks))
        for chunk, ranks in matrix.chunks.items()
    ]


def rounds(matrices: Sequence[WholeMatrix], num_ranks: int, config: MuonConfig, batch: int = BATCH) -> list[Round]:
    """The rounds of an update.  Every rank computes the same."""
    owned = owners(matrices, num_ranks, config)
    batches = {owner: _batches(own, batch) for owner, own in enumerate(owned) if own}
    count = max(map(len, batches.values()), default=0)
    return [
        Round(matrices={owner: own[number] for owner, own in batches.items() if number < len(own)})
        for number in range(count)
    ]


def owners(matrices: Sequence[WholeMatrix], num_ranks: int, config: MuonConfig) -> list[list[WholeMatrix]]:
    """The matrices that each rank orthogonalises."""
    loads, owned = [0] * num_ranks, [list[WholeMatrix]() for _ in range(num_ranks)]
    share = sum(matrix.flops(config) for matrix in matrices) / num_ranks
    for matrix in sorted(matrices, key=lambda matrix: (-matrix.flops(config), matrix.name)):
        held = {rank: sum(chunk.numel for chunk in chunks) for rank, chunks in matrix.holders.items()}
        owner = min(held, key=lambda rank: (-held[rank], loads[rank], rank))
        if loads[owner] + matrix.flops(config) > share:
            owner = min(range(num_ranks), key=lambda rank: (loads[rank], -held.get(rank, 0), rank))
        loads[owner] += matrix.flops(config)
        owned[owner].append(matrix)
    return owned


def _batches(matrices: Sequence[WholeMatrix], most: int) -> list[list[WholeMatrix]]:
    """Divide an owner's matrices into batches of at most `most` elements.  Matrices of equal shape are neighbours."""
    batches: list[list[WholeMatrix]] = []
    left = 0
    for matrix in sorted(matrices, key=lambda matrix: (matrix.shape, matrix.name)):
        if not batches or matrix.numel > left:
            batches.append([])
            left = most
        batches[-1].append(matrix)
        left -= matrix.numel
    return batches
