"""Classes of sequences of similar lengths: blocks that FlashAttention-2 starts, and results like those of one call."""

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from sft.estimate.lengths import Lengths
from sft.layers.mixers.softmax_bytes import PortableBytes
from sft.layers.rank_share import RankShare
from sft.mcore.attention.flash2 import FLASH2
from sft.mcore.attention.flash4 import FLASH4
from sft.mcore.attention.flash_kernel import FlashKernel
from sft.parallel import length_classes
from tests.builders import LLAMA_8B, layout_config
from tests.plain_flash import PLAIN
from tests.ranks.alive import Alive

CPU, CP = torch.device("cpu"), 8
STARTS_ALL = replace(PLAIN, starts_all_blocks=True)
CHATS = [64 * round(16 * (1 + (7 * n % 23)) ** 1.3 / 16) for n in range(160)]  # 64 to 3,776 tokens


def boundaries(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def blocks(lengths: list[int], rank: int, operators: Any = STARTS_ALL) -> tuple[int, int, int]:
    """Blocks of a head with work and blocks that are started, forward and backward together; and the calls.

    FlashAttention-2 starts ceil(longest / 128) blocks for each sequence: by queries, and in backward by keys.
    """
    kernel = FlashKernel.of(boundaries(lengths), CP, rank, CPU, operators=operators)
    work, started = 0, 0
    for call in kernel.calls:
        for cu_seqlens, longest in ((call.cu_seqlens_q, call.max_seqlen_q), (call.cu_seqlens_k, call.max_seqlen_k)):
            own = -(-cu_seqlens.diff() // 128)
            work += int(own.sum())
            started += len(own) * -(-longest // 128)
    return work, started, len(kernel.calls)


@pytest.mark.parametrize("rank", [0, 3, 7])
@pytest.mark.parametrize("position", [0, 200, 512])
def test_one_long_document_beside_512_short_ones(position: int, rank: int) -> None:
    """In one call, 0.5% to 0.9% of the blocks have work: 1,026 sequences of up to 65,536 keys."""
    lengths = [128] * position + [65536] + [128] * (512 - position)
    work, started, calls = blocks(lengths, rank)
    assert work / started >= 0.8 and calls <= 3
    one = blocks(lengths, rank, PLAIN)
    assert one[0] == work and one[0] / one[1] < 0.009 and one[2] == 1


def test_blocks_of_one_call_by_hand() -> None:
    """Rank 0 of cp 8: chunks of 4,096 and 8 tokens, keys up to 65,536.  32 + 512 blocks for each of 1,026 sequences.

    This is 525,312 blocks of a head in backward, 33.6 million with 64 heads.
    """
    assert blocks([65536] + [128] * 512, 0, PLAIN) == (2 * 32 + 1024 + 32 + 512 + 1024, 1026 * (32 + 512), 1)


@pytest.mark.parametrize("lengths", [[131072], CHATS, [8192] * 16], ids=["one long", "chats", "equal"])
@pytest.mark.parametrize("rank", [0, 7])
def test_a_pack_is_split_only_where_it_pays(lengths: list[int], rank: int) -> None:
    """Copying the rows of 16K tokens takes longer than starting at most 0.4 blocks too many for each token."""
    work, started, calls = blocks(lengths, rank)
    if calls == 1:
        assert started - work <= 0.4 * sum(lengths) / CP + 256
    else:
        assert work / started >= 0.8


def test_only_a_kernel_that_starts_all_blocks_is_split() -> None:
    assert FLASH2.starts_all_blocks and not FLASH4.starts_all_blocks


@pytest.fixture
def always() -> Any:
    """Blocks of four tokens, and calls and copies without costs, so that small packs are split."""
    with mock.patch.multiple(length_classes, BLOCK=4, CALL_BLOCKS=0, COPY_BLOCKS=0.0):
        yield


def test_classes_of_small_sequences(always: Any) -> None:
    found = length_classes.length_classes(np.array([3, 16, 4, 20, 4]), np.array([4, 64, 30, 64, 3]))
    assert [part.tolist() for part in found] == [[0, 4], [2], [1], [3]]
    with mock.patch.object(length_classes, "CALL_BLOCKS", 2):  # 2 blocks less do not pay
        found = length_classes.length_classes(np.array([3, 16, 4, 20, 4]), np.array([4, 64, 30, 64, 3]))
    assert [part.tolist() for part in found] == [[0, 4], [2], [1, 3]]


def both_passes(kernel: FlashKernel, inputs: list[Tensor]) -> list[Tensor]:
    """Output, log-sum-exp and gradients.  Keys and values are given in the order of the sequences, and so returned."""
    query, key, value, grad = inputs
    order = getattr(kernel.key_source, "key_order", torch.arange(len(key)))
    keys, values = key[order], value[order]
    out, lse = kernel.forward(query, keys, values, 0.3)
    dquery, dkeys, dvalues = kernel.backward(grad, query, keys, values, out, lse, 0.3)
    return [out, lse, dquery, *(torch.zeros_like(key).index_add(0, order, x) for x in (dkeys, dvalues))]


@pytest.mark.parametrize("cp, rank, window", [(1, 0, None), (1, 0, 5), (2, 0, None), (2, 1, None)])
def test_results_are_those_of_one_call(always: Any, cp: int, rank: int, window: int | None) -> None:
    """Bit for bit: a sequence is computed from the same numbers.  Classes have rows here and there in the pack."""
    lengths = [8, 64, 4, 0, 16, 60, 8, 20]
    split, one = (
        FlashKernel.of(boundaries(lengths), cp, rank, CPU, operators=operators, window=window)
        for operators in (STARTS_ALL, PLAIN)
    )
    assert len(split.calls) > 2 and len(one.calls) == 1
    assert any(isinstance(call.queries, Tensor) for call in split.calls)
    generator = torch.Generator().manual_seed(1)
    tokens = sum(lengths)
    shapes = [(tokens // cp, 4, 8), (tokens, 2, 8), (tokens, 2, 8), (tokens // cp, 4, 8)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    for found, expected in zip(both_passes(split, inputs), both_passes(one, inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)  # sums of gradients of keys in another order


def test_the_memory_of_several_calls() -> None:
    """Backward of a document of 4,096 tokens beside 512 of 32 copies the rows of a class, and has its gradients beside
    those of all classes.  The estimate takes a class with all tokens; here the larger of the two has 4/5 of them."""
    lengths, heads, groups, width = [32] * 256 + [4096] + [32] * 256, 4, 2, 8
    tokens = sum(lengths)

    def backward(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in arguments[1:4])

    peaks = {}
    for starts_all in (False, True):
        operators = replace(PLAIN, backward=backward, pads_values=False, starts_all_blocks=starts_all)
        kernel = FlashKernel.of(boundaries(lengths), 1, 0, CPU, operators=operators)
        query = torch.zeros(tokens, heads, width)
        keys, values = torch.zeros(2, tokens, groups, width)
        with Alive() as alive:
            kernel.backward(query, query, keys, values, query, torch.zeros(heads, tokens), 1.0)
        assert len(kernel.calls) == 1 + starts_all
        peaks[starts_all] = alive.peak
    rank = RankShare(width=4)
    config = layout_config(
        model={**LLAMA_8B, "num_attention_heads": heads, "num_query_groups": groups, "head_dim": width},
        attention={"backend": "portable"},
    )
    uneven = Lengths.of_corpus(np.array(lengths)).of_rank(rank, tokens)
    assert uneven == replace(rank, documents=513.0, is_uneven=True)
    even = Lengths.all_of(4096).of_rank(rank, 16_384)
    assert even == replace(rank, documents=4.0)
    found = [PortableBytes(model=config.model, rank=share).local(tokens) for share in (rank, uneven)]
    sums = 4 * heads * width * 128 * 512  # fp32 sums of gradients of queries: 128 rows for each of 512 documents more
    extra = peaks[True] - peaks[False]
    assert 0.75 < extra / (found[1] - found[0] - sums) <= 1.0


def test_deterministic_sums_of_query_gradients() -> None:
    """One document on cp 8: two sequences x 8 heads of a group.  148 / 16 -> 10 tensors instead of one."""
    config = layout_config(model=LLAMA_8B, attention={"backend": "portable"})
    rank = RankShare(cp=8)
    once, more = (
        PortableBytes(model=config.model, rank=rank, is_deterministic=flag).local(1024) for flag in (False, True)
    )
    assert more - once == 9 * 4 * 8 * 128 * 1024
