"""A kernel of packed_attention.py in plain torch, on any device and in any precision.

The kernel computes each chunk of queries tile by tile with an online softmax (Dao 2023, FlashAttention-2).  In forward
and in backward, no score matrix is larger than one tile.  Tiles never span documents, so the result of a document is
bitwise independent of other documents.  A chunk of a branch (sft/parallel/branches.py) has the tiles of the tokens
before the branch, then those of its own document, so its result is bitwise independent of other branches.  With a
sliding window, a tile of n queries computes the scores of at most window - 1 + n keys.

Scores may be soft-capped: cap * tanh(score / cap) (Gemma 2, arXiv:2408.00118).

Products are in fp32, or in float64 if the inputs are in float64.  On CUDA in bf16, the factors of products are in bf16,
so that tensor cores multiply them, and tiles are larger.  All other values of a tile are in fp32 there, too.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sft.mcore.attention.key_source import AllGatheredKeys, HaloKeys, KeySource, LocalKeys
from sft.mcore.device import send
from sft.mcore.wide import wide, wide_dtype
from sft.parallel.branches import Branches
from sft.parallel.context_parallel import Chunk, gathered_positions, local_chunks
from sft.parallel.halo import Halo

QUERY_TILE = 256  # rows of a tile of scores
KEY_TILE = 512  # columns of a tile of scores
LARGE_QUERY_TILE, LARGE_KEY_TILE = 1024, 2048  # the same on tensor cores, for which small tiles have too little work


class Keys(NamedTuple):
    """The keys start .. stop - 1 among the kernel's keys.  position: position of the first key; others follow it"""

    start: int
    stop: int
    position: int


class Queries(NamedTuple):
    """The queries of one chunk, and the keys to which they attend unless the mask or the window hides them.

    start     index of the first query among the local queries
    length    number of queries
    position  position of the first query; positions count from the same token as those of the keys
    keys      for a branch, the first keys of its ancestors, then the keys of its document
    """

    start: int
    length: int
    position: int
    keys: tuple[Keys, ...]

    @staticmethod
    def of(chunk: Chunk, document: int, cu_seqlens: np.ndarray, branches: Branches | None) -> "Queries":
        """The queries of `chunk`, if the kernel has the keys of the whole pack.  document: number of its document"""
        depth = 0 if branches is None else int(branches.depths[document])
        path = () if branches is None else branches.path(document)
        starts = [int(cu_seqlens[piece.document]) for piece in path]
        before = [Keys(start, start + piece.length, piece.depth) for start, piece in zip(starts, path)]
        own = Keys(chunk.document_start, chunk.document_start + chunk.position + chunk.length, depth)
        return Queries(chunk.local_start, chunk.length, depth + chunk.position, (*before, own))


@dataclass(frozen=True, kw_only=True)
class TorchKernel:
    """The kernel and the chunks of queries of one microbatch.

    chunks      the queries of each chunk of this rank, and their keys
    key_source  gets the kernel's keys: all keys of the pack, or with cp > 1 and a window the keys that each chunk
                needs, one chunk after the other
    window      a token attends to itself and to the window - 1 tokens before it; None: to all tokens before it
    softcap     limit of the scores; None: no limit
    has_tensor_cores  whether bf16 factors are multiplied as they are; False: after conversion to fp32
    """

    chunks: tuple[Queries, ...]
    key_source: KeySource
    window: int | None = None
    softcap: float | None = None
    has_tensor_cores: bool = False

    @staticmethod
    def of(
        cu_seqlens: np.ndarray,
        cp_size: int,
        cp_rank: int,
        device: torch.device,
        *,
        window: int | None = None,
        softcap: float | None = None,
        branches: Branches | None = None,
    ) -> "TorchKernel":
        options: dict[str, Any] = {
            "window": window,
            "softcap": softcap,
            "has_tensor_cores": device.type == "cuda" and torch.version.hip is None,
        }
        if cp_size == 1 or window is None:
            local = local_chunks(cu_seqlens, cp_size, cp_rank)
            of_document = 1 if cp_size == 1 else 2  # number of chunks of a document on this rank
            chunks = [Queries.of(c, number // of_document, cu_seqlens, branches) for number, c in enumerate(local)]
            key_source: KeySource = LocalKeys()
            if cp_size > 1:
                order = torch.from_numpy(gathered_positions(cu_seqlens, cp_size))
                key_source = AllGatheredKeys(send(order, device))
            return TorchKernel(chunks=tuple(chunks), key_source=key_source, **options)
        halo = Halo.of(cu_seqlens, window, cp_size, cp_rank, branches)
        chunks, first = [], 0
        for chunk, before in zip(halo.chunks, halo.num_before.tolist()):
            stop = first + before + chunk.length
            chunks.append(Queries(chunk.local_start, chunk.length, before, (Keys(first, stop, 0),)))
            first = stop
        return TorchKernel(chunks=tuple(chunks), key_source=HaloKeys.of(halo, device), **options)

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Implements `AttentionKernel.forward`."""
        out = query.new_empty((*query.shape[:2], values.shape[-1]))
        lse = torch.empty(query.shape[1::-1], dtype=wide_dtype(query.dtype), device=query.device)
        for tile in self._tiles(query.dtype):
            out[tile.rows], lse[:, tile.rows] = _attend(query[tile.rows], keys, values, tile, scale)
        return out, lse

    def backward(
        self, grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, keys and values.  The gradients of keys and values have the dtype of `lse`."""
        dquery = torch.empty_like(query)
        dkeys = torch.zeros(keys.shape, dtype=lse.dtype, device=keys.device)
        dvalues = torch.zeros(values.shape, dtype=lse.dtype, device=keys.device)
        for tile in self._tiles(query.dtype):
            rows = tile.rows
            saved = query[rows], out[rows], lse[:, rows], grad[rows]
            dquery[rows] = _attend_backward(saved, (keys, values), (dkeys, dvalues), tile, scale)
        return dquery, dkeys, dvalues

    def _tiles(self, dtype: torch.dtype) -> Iterator["_Tile"]:
        """The tiles of all chunks.  dtype: the dtype of queries, keys and values"""
        is_large = self.has_tensor_cores and dtype != wide_dtype(dtype)
        num_queries, num_keys = (LARGE_QUERY_TILE, LARGE_KEY_TILE) if is_large else (QUERY_TILE, KEY_TILE)
        limits = _Limits(self.window, self.softcap, num_keys, dtype if is_large else wide_dtype(dtype))
        for chunk in self.chunks:
            for start in range(0, chunk.length, num_queries):
                stop = min(start + num_queries, chunk.length)
                rows = slice(chunk.start + start, chunk.start + stop)
                yield _Tile(rows, chunk.position + start, chunk.keys, limits)


class _Limits(NamedTuple):
    """Properties of all tiles of a kernel.

    num_keys  the most keys of a tile
    factors   dtype of the factors of products
    """

    window: int | None
    softcap: float | None
    num_keys: int
    factors: torch.dtype


@dataclass(frozen=True)
class _Tile:
    """Consecutive queries of one document: at most QUERY_TILE, or at most LARGE_QUERY_TILE on tensor cores."""

    rows: slice  # indices of these queries among the local queries
    position: int  # the position of the first query
    keys: tuple[Keys, ...]  # the keys of the chunk
    limits: _Limits

    def key_tiles(self) -> Iterator[Keys]:
        """Yield the keys to which these queries attend, at most `limits.num_keys` at a time."""
        last = self.position + self.rows.stop - self.rows.start
        window, size = self.limits.window, self.limits.num_keys
        first = 0 if window is None else max(0, self.position - window + 1)
        for keys in self.keys:
            stop = min(keys.stop, keys.start + last - keys.position)
            for start in range(keys.start + max(0, first - keys.position), stop, size):
                yield Keys(start, min(start + size, stop), keys.position + start - keys.start)

    def hidden(self, keys: Keys, device: torch.device) -> Tensor | None:
        """bool [queries, keys]: true if the query does not attend to the key; None: all queries attend to all keys."""
        first, num_queries, window = keys.position, self.rows.stop - self.rows.start, self.limits.window
        last = first + keys.stop - keys.start - 1
        is_before = window is not None and first <= self.position + num_queries - 1 - window
        if last <= self.position and not is_before:
            return None
        queries = torch.arange(self.position, self.position + num_queries, device=device)[:, None]
        positions = torch.arange(first, last + 1, device=device)[None, :]
        hidden = positions > queries
        return hidden if window is None else hidden | (positions <= queries - window)

    def factor(self, x: Tensor) -> Tensor:
        """x [n, groups, d] -> [groups, n, d], as a factor of a product."""
        return x.to(self.limits.factors).transpose(0, 1)


def _attend(query: Tensor, keys: Tensor, values: Tensor, tile: _Tile, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of a tile: query [n, heads, d] -> out [n, heads, width of values], log-sum-exp of scores [heads, n]."""
    rows, factors = _grouped(query, keys.shape[1]), tile.limits.factors
    largest = rows.new_full((*rows.shape[:-1], 1), -math.inf)
    total = torch.zeros_like(largest)
    out = rows.new_zeros((*rows.shape[:-1], values.shape[-1]))
    for block in tile.key_tiles():
        columns = slice(block.start, block.stop)
        scores, _ = _scores(rows, keys[columns], tile, block, scale)
        new_largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
        new_largest = new_largest.clamp_(min=torch.finfo(rows.dtype).min)  # a query that has no key yet has -inf
        shrink = torch.exp(largest - new_largest)
        weights = scores.sub_(new_largest).exp_()
        total = total * shrink + weights.sum(-1, keepdim=True)
        products = _product(weights.flatten(1, 2).to(factors), tile.factor(values[columns]))
        out = out * shrink + products.view(out.shape)
        largest = new_largest
    lse = largest + total.log()
    return _ungrouped(out / total).to(query.dtype), lse.flatten(0, 1).squeeze(-1)


def _attend_backward(
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    gathered: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor],
    tile: _Tile,
    scale: float,
) -> Tensor:
    """Add this tile's contribution to the gradients of keys and values, and return the gradient of the tile's queries.

    saved: query, out, lse and grad of the tile's rows
    gathered: all keys and values; gradients: their gradients, to which the contribution is added
    """
    query, out, lse, grad = saved
    (keys, values), (dkeys, dvalues) = gathered, gradients
    groups, factors = keys.shape[1], tile.limits.factors
    rows, dout = _grouped(query, groups), _grouped(grad, groups)
    delta = (dout * _grouped(out, groups)).sum(-1, keepdim=True)
    norm = lse.unflatten(0, (groups, -1)).unsqueeze(-1)
    drows = torch.zeros_like(rows)
    query_factor, grad_factor = (x.flatten(1, 2).to(factors) for x in (rows, dout))
    for block in tile.key_tiles():
        columns = slice(block.start, block.stop)
        scores, slope = _scores(rows, keys[columns], tile, block, scale)
        weights = scores.sub_(norm).exp_()
        narrow = weights.flatten(1, 2).to(factors)
        dvalues[columns] += _product(narrow.transpose(1, 2), grad_factor).transpose(0, 1)
        dweights = _product(grad_factor, tile.factor(values[columns]).transpose(1, 2)).view(weights.shape)
        dscores = dweights.sub_(delta).mul_(weights).mul_(scale)
        narrow = (dscores if slope is None else dscores.mul_(slope)).flatten(1, 2).to(factors)
        drows += _product(narrow, tile.factor(keys[columns])).view(rows.shape)
        dkeys[columns] += _product(narrow.transpose(1, 2), query_factor).transpose(0, 1)
    return _ungrouped(drows).to(query.dtype)


def _scores(rows: Tensor, keys: Tensor, tile: _Tile, block: Keys, scale: float) -> tuple[Tensor, Tensor | None]:
    """The scores of a tile, and the derivative of the soft cap; None: there is no soft cap.

    rows [groups, heads per group, n, d], keys [k, groups, d] -> scores [groups, heads per group, n, k]
    """
    scores = _product(rows.flatten(1, 2).to(tile.limits.factors), tile.factor(keys).transpose(1, 2)).mul_(scale)
    scores, slope, softcap = scores.view(*rows.shape[:-1], keys.shape[0]), None, tile.limits.softcap
    if softcap is not None:
        scores = scores.div_(softcap).tanh_()
        slope = scores.square().neg_().add_(1)  # no second tile for a moment
        scores = scores.mul_(softcap)
    hidden = tile.hidden(block, rows.device)
    return (scores if hidden is None else scores.masked_fill_(hidden, -math.inf)), slope


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Sort heads by their key head: [n, heads, d] -> [groups, heads per group, n, d] in fp32 or float64."""
    return wide(x).unflatten(1, (groups, -1)).permute(1, 2, 0, 3).contiguous()


def _ungrouped(x: Tensor) -> Tensor:
    """Undo `_grouped`: [groups, heads per group, n, d] -> [n, heads, d]."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The product of a [groups, n, m] and b [groups, m, k], summed in fp32 or float64.

    On CUDA, torch can multiply bf16 factors with a result in fp32.  On other devices the factors are converted first,
    which changes only the order of sums.
    """
    if a.is_cuda and a.dtype != wide_dtype(a.dtype):
        return torch.bmm(a, b, out_dtype=wide_dtype(a.dtype))
    return wide(a).matmul(wide(b))
