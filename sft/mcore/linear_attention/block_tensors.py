"""Computes with the chunks of a block: gathers and scatters tokens, and sums and multiplies within chunks."""

import torch
from torch import Tensor

from sft.mcore.linear_attention.schedule import CHUNK, Block


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add a @ b to total [n, heads, ...], in place, without a temporary tensor."""
    total.flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1))
    return total


def per_key_head(x: Tensor, ratio: int) -> Tensor:
    """Sum over the `ratio` value heads of each key head: [n, heads, ...] -> [n, key heads, ...]."""
    return x.unflatten(1, (-1, ratio)).sum(2)


def running_sums(x: Tensor) -> Tensor:
    """Sums of x [..., c] from the start of the chunk to each token.  torch's cumsum is not deterministic on GPUs."""
    return x @ torch.ones(CHUNK, CHUNK, dtype=x.dtype, device=x.device).triu()


def sums_to_end(x: Tensor) -> Tensor:
    """Sums of x [..., c] from each token to the end of the chunk."""
    return x @ torch.ones(CHUNK, CHUNK, dtype=x.dtype, device=x.device).tril()


def gathered(x: Tensor, block: Block) -> Tensor:
    """The tokens of a block, by chunk: [t, heads, d] -> [n, heads, c, d].  Padding repeats the chunk's last token."""
    return x.index_select(0, block.tokens).unflatten(0, (-1, CHUNK)).transpose(1, 2).contiguous()


def without_padding(x: Tensor, block: Block) -> Tensor:
    """x [n, heads, c, d] with zeros for padding."""
    return x if block.padding is None else x.masked_fill(block.padding[:, None, :, None], 0)


def scatter(x: Tensor, values: Tensor, block: Block) -> None:
    """Write values [n, heads, c, ...] to the block's tokens in x [t, heads, ...], in the dtype of x; drop padding."""
    by_token, tokens = values.transpose(1, 2).flatten(0, 1), block.tokens
    if block.kept is not None:
        by_token, tokens = by_token[block.kept], tokens[block.kept]
    x.index_copy_(0, tokens, by_token.to(x.dtype))
