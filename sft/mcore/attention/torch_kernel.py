"""A kernel of packed_attention.py in plain torch, on any device and in any precision.

The kernel computes each chunk of queries tile by tile with an online softmax (Dao 2023, FlashAttention-2).  In forward
and in backward, no score matrix is larger than one tile.  Tiles never span documents, so the result of a document is
bitwise independent of other documents.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sft.mcore.device import send
from sft.parallel import context_parallel

QUERY_TILE = 256  # rows of a tile of scores
KEY_TILE = 512  # columns of a tile of scores


@dataclass(frozen=True, kw_only=True)
class TorchKernel:
    """The kernel with the chunks of one microbatch.  The kernel needs the keys of the whole pack, in pack order.

    chunks     the queries of this rank
    key_order  int64 [t * cp_size]: concat(local parts)[key_order] is the pack; None with cp 1
    """

    chunks: tuple[context_parallel.Chunk, ...]
    key_order: Tensor | None

    @staticmethod
    def of(cu_seqlens: np.ndarray, cp_size: int, cp_rank: int, device: torch.device) -> "TorchKernel":
        order = None
        if cp_size > 1:
            order = send(torch.from_numpy(context_parallel.gathered_positions(cu_seqlens, cp_size)), device)
        return TorchKernel(chunks=context_parallel.local_chunks(cu_seqlens, cp_size, cp_rank), key_order=order)

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """As `Kernel.forward`; log-sum-exp [t, heads]."""
        out = torch.empty_like(query)
        lse = torch.empty(query.shape[:2], dtype=_compute_dtype(query), device=query.device)
        for chunk in self.chunks:
            for tile in _query_tiles(chunk):
                out[tile.rows], lse[tile.rows] = _attend(query[tile.rows], keys, values, tile, scale)
        return out, lse

    def backward(
        self, grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, keys and values.  The gradients of keys and values have the dtype of `lse`."""
        dquery = torch.empty_like(query)
        dkeys = torch.zeros(keys.shape, dtype=lse.dtype, device=keys.device)
        dvalues = torch.zeros_like(dkeys)
        for chunk in self.chunks:
            for tile in _query_tiles(chunk):
                rows = tile.rows
                saved = query[rows], out[rows], lse[rows], grad[rows]
                dquery[rows] = _attend_backward(saved, (keys, values), (dkeys, dvalues), tile, scale)
        return dquery, dkeys, dvalues


@dataclass(frozen=True)
class _Tile:
    """Up to QUERY_TILE consecutive queries of one document."""

    rows: slice  # indices of these queries among the local queries
    document: int  # the position in the pack where the document starts
    position: int  # the position of the first query within the document

    def key_tiles(self) -> Iterator[tuple[slice, bool]]:
        """Slices of the pack whose keys these queries may attend to, and whether each slice needs a causal mask."""
        num_queries = self.rows.stop - self.rows.start
        num_keys = self.position + num_queries
        for start in range(0, num_keys, KEY_TILE):
            stop = min(start + KEY_TILE, num_keys)
            yield slice(self.document + start, self.document + stop), stop > self.position + 1

    def hidden(self, keys: slice, device: torch.device) -> Tensor:
        """bool [queries, keys]: true if the key comes after the query."""
        queries = torch.arange(self.position, self.position + self.rows.stop - self.rows.start, device=device)
        positions = torch.arange(keys.start - self.document, keys.stop - self.document, device=device)
        return positions[None, :] > queries[:, None]


def _query_tiles(chunk: context_parallel.Chunk) -> Iterator[_Tile]:
    for start in range(0, chunk.length, QUERY_TILE):
        stop = min(start + QUERY_TILE, chunk.length)
        yield _Tile(
            slice(chunk.local_start + start, chunk.local_start + stop), chunk.document_start, chunk.position + start
        )


def _attend(query: Tensor, keys: Tensor, values: Tensor, tile: _Tile, scale: float) -> tuple[Tensor, Tensor]:
    """query [n, heads, d] -> out [n, heads, d], log-sum-exp of the scores [n, heads]."""
    rows = _grouped(query, keys.shape[1])
    largest = rows.new_full((*rows.shape[:-1], 1), -math.inf)
    total = torch.zeros_like(largest)
    out = torch.zeros_like(rows)
    for columns, masked in tile.key_tiles():
        scores = _scores(rows, keys[columns], tile, columns, masked, scale)
        new_largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
        shrink = torch.exp(largest - new_largest)
        weights = scores.sub_(new_largest).exp_()
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + weights.flatten(1, 2).matmul(_by_group(values[columns])).view(rows.shape)
        largest = new_largest
    lse = largest + total.log()
    return _ungrouped(out / total).to(query.dtype), _ungrouped(lse).squeeze(-1)


def _attend_backward(
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    gathered: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor],
    tile: _Tile,
    scale: float,
) -> Tensor:
    """Add this tile's contribution to the gradients of keys and values; return the gradient of its queries."""
    query, out, lse, grad = saved
    (keys, values), (dkeys, dvalues) = gathered, gradients
    groups = keys.shape[1]
    rows, dout = _grouped(query, groups), _grouped(grad, groups)
    delta = (dout * _grouped(out, groups)).sum(-1, keepdim=True)
    norm = _grouped(lse.unsqueeze(-1), groups)
    drows = torch.zeros_like(rows)
    for columns, masked in tile.key_tiles():
        weights = _scores(rows, keys[columns], tile, columns, masked, scale).sub_(norm).exp_()
        dvalues[columns] += weights.flatten(1, 2).transpose(1, 2).matmul(dout.flatten(1, 2)).transpose(0, 1)
        dweights = dout.flatten(1, 2).matmul(_by_group(values[columns]).transpose(1, 2)).view(weights.shape)
        dscores = dweights.sub_(delta).mul_(weights).mul_(scale).flatten(1, 2)
        drows += dscores.matmul(_by_group(keys[columns])).view(rows.shape)
        dkeys[columns] += dscores.transpose(1, 2).matmul(rows.flatten(1, 2)).transpose(0, 1)
    return _ungrouped(drows).to(query.dtype)


def _scores(rows: Tensor, keys: Tensor, tile: _Tile, columns: slice, masked: bool, scale: float) -> Tensor:
    """rows [groups, heads per group, n, d], keys [k, groups, d] -> scores [groups, heads per group, n, k]."""
    scores = rows.flatten(1, 2).matmul(_by_group(keys).transpose(1, 2)).mul_(scale)
    scores = scores.view(*rows.shape[:-1], keys.shape[0])
    return scores.masked_fill_(tile.hidden(columns, rows.device), -math.inf) if masked else scores


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[n, heads, d] -> [groups, heads per group, n, d] in the dtype of the computation."""
    return x.to(_compute_dtype(x)).unflatten(1, (groups, -1)).permute(1, 2, 0, 3).contiguous()


def _ungrouped(x: Tensor) -> Tensor:
    """[groups, heads per group, n, d] -> [n, heads, d]"""
    return x.permute(2, 0, 1, 3).flatten(1, 2)


def _by_group(x: Tensor) -> Tensor:
    """[k, groups, d] -> [groups, k, d]"""
    return x.to(_compute_dtype(x)).transpose(0, 1)
