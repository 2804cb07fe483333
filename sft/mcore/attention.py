"""Attention over packed documents: the `portable` backend, context parallelism included.

On CUDA in bf16 torch's flash kernel does the work (`flash.py`); everywhere else what follows, in plain torch.

A token attends to the tokens of its own document up to itself.  Keys and values are all-gathered over the
context-parallel group and put back into pack order; queries stay where they are.  A document gives a rank two
chunks of queries, and each chunk is worked off in tiles with an online softmax (Dao 2023, FlashAttention-2), so
that no score matrix larger than one tile exists, forward or backward.  In backward the gradients of keys and values
are summed over the group by one reduce-scatter.

A document's result depends on nothing outside the document, bit for bit: tiles never span documents.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from sft import cp
from sft.mcore import flash

QUERY_TILE = 256  # rows of scores at once
KEY_TILE = 512  # columns of scores at once


@dataclass
class PackedDocuments(PackedSeqParams):
    """What attention must know of a microbatch; made by the engine on every pipeline stage, dropped there."""

    chunks: tuple[cp.Chunk, ...] = ()  # the query rows of this rank
    pack_order: Tensor | None = None  # int64 [t * cp]: concat(local parts)[pack_order] is the pack; None for cp 1
    sequences: flash.Sequences | None = None  # where torch's kernel is to be used


def describe(
    cu_seqlens: Tensor, max_seqlen: int, *, cp_size: int, cp_rank: int, device: torch.device, by_flash: bool = False
) -> PackedDocuments:
    """Boundaries of a whole pack -> what attention and RoPE need on this rank; by_flash: in torch's flash kernel.

    The same padded tensor is passed as padded and unpadded boundaries: padding is at the tail of a document, where
    causal attention cannot see it, and some Transformer Engine releases drop keys when the two differ.
    """
    boundaries = cu_seqlens.to(device)
    host = cu_seqlens.cpu().numpy()
    order = None if cp_size == 1 or by_flash else torch.from_numpy(cp.gathered_positions(host, cp_size)).to(device)
    return PackedDocuments(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=boundaries,
        cu_seqlens_kv_padded=boundaries,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        chunks=cp.local_chunks(host, cp_size, cp_rank),
        pack_order=order,
        sequences=flash.sequences(host, cp_size, cp_rank, device) if by_flash else None,
    )


class PortableAttention(torch.nn.Module):
    """megatron-core's CoreAttention protocol over `document_attention`."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,  # [t, heads, d]
        key: Tensor,  # [t, groups, d]
        value: Tensor,  # [t, groups, d]
        attention_mask: Tensor | None,
        /,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedDocuments | None = None,
        **unused: Any,
    ) -> Tensor:
        assert packed_seq_params is not None and attention_mask is None and attention_bias is None
        if packed_seq_params.sequences is not None:
            out = flash.attention(query, key, value, packed_seq_params.sequences, self.scale, self.cp_group)
        else:
            out = document_attention(query, key, value, packed_seq_params, self.scale, self.cp_group)
        return out.flatten(1)  # [t, heads * d]


def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: PackedDocuments,
    scale: float,
    cp_group: dist.ProcessGroup,
) -> Tensor:
    """Causal attention within documents.  query [t, heads, d], key and value [t, groups, d] -> [t, heads, d]."""
    out: Tensor = _DocumentAttention.apply(query, key, value, documents, scale, cp_group)
    return out


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: PackedDocuments,
        scale: float,
        cp_group: Any,
    ) -> Tensor:
        keys, values = _gather(key, value, documents, cp_group)
        out = torch.empty_like(query)
        lse = torch.empty(query.shape[:2], dtype=_compute_dtype(query), device=query.device)  # [t, heads]
        for chunk in documents.chunks:
            for tile in _query_tiles(chunk):
                out[tile.rows], lse[tile.rows] = _attend(query[tile.rows], keys, values, tile, scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.documents, ctx.scale, ctx.cp_group = documents, scale, cp_group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        query, key, value, out, lse = ctx.saved_tensors
        keys, values = _gather(key, value, ctx.documents, ctx.cp_group)
        dquery = torch.empty_like(query)
        dkeys = torch.zeros(keys.shape, dtype=lse.dtype, device=keys.device)
        dvalues = torch.zeros_like(dkeys)
        for chunk in ctx.documents.chunks:
            for tile in _query_tiles(chunk):
                rows = tile.rows
                dquery[rows] = _attend_backward(
                    (query[rows], out[rows], lse[rows], grad[rows]),
                    (keys, values),
                    (dkeys, dvalues),
                    tile,
                    ctx.scale,
                )
        dkey, dvalue = _scatter(dkeys, dvalues, ctx.documents, ctx.cp_group)
        return dquery, dkey.to(key.dtype), dvalue.to(value.dtype), None, None, None


@dataclass(frozen=True)
class _Tile:
    """Some consecutive queries of one document."""

    rows: slice  # of the local queries
    document: int  # where the document starts in the pack
    position: int  # of the first query, within the document

    def key_tiles(self) -> Iterator[tuple[slice, bool]]:
        """Keys these queries may see, in pack order, and whether a causal mask is needed."""
        num_queries = self.rows.stop - self.rows.start
        seen = self.position + num_queries
        for start in range(0, seen, KEY_TILE):
            stop = min(start + KEY_TILE, seen)
            yield slice(self.document + start, self.document + stop), stop > self.position + 1

    def hidden(self, keys: slice, device: torch.device) -> Tensor:
        """bool [queries, keys]: keys that come after the query."""
        queries = torch.arange(self.position, self.position + self.rows.stop - self.rows.start, device=device)
        positions = torch.arange(keys.start - self.document, keys.stop - self.document, device=device)
        return positions[None, :] > queries[:, None]


def _query_tiles(chunk: cp.Chunk) -> Iterator[_Tile]:
    for start in range(0, chunk.length, QUERY_TILE):
        stop = min(start + QUERY_TILE, chunk.length)
        yield _Tile(
            slice(chunk.local_start + start, chunk.local_start + stop),
            chunk.document_start,
            chunk.position + start,
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
    """Add this tile's part to the gradients of keys and values; return the gradient of its queries."""
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


def _gather(key: Tensor, value: Tensor, documents: PackedDocuments, cp_group: Any) -> tuple[Tensor, Tensor]:
    """Local keys and values -> those of the whole pack, in pack order."""
    if documents.pack_order is None:
        return key, value
    local = torch.cat((key, value), dim=-1).contiguous()
    gathered = local.new_empty((local.shape[0] * cp_group.size(), *local.shape[1:]))
    dist.all_gather_into_tensor(gathered, local, group=cp_group)
    keys, values = gathered.index_select(0, documents.pack_order).split(key.shape[-1], dim=-1)
    return keys, values


def _scatter(dkeys: Tensor, dvalues: Tensor, documents: PackedDocuments, cp_group: Any) -> tuple[Tensor, Tensor]:
    """Gradients for the whole pack, partial on every rank -> summed gradients of the local keys and values."""
    if documents.pack_order is None:
        return dkeys, dvalues
    partial = torch.cat((dkeys, dvalues), dim=-1)
    by_rank = torch.empty_like(partial)
    by_rank[documents.pack_order] = partial
    local = by_rank.new_empty((by_rank.shape[0] // cp_group.size(), *by_rank.shape[1:]))
    dist.reduce_scatter_tensor(local, by_rank, group=cp_group)
    dkey, dvalue = local.split(dkeys.shape[-1], dim=-1)
    return dkey, dvalue
