"""What a pack of samples looks like: documents end to end, padded, with labels and filler.

Decides where labels come from and what padding is.  Labels are shifted here, per document and before any slicing,
so nothing later needs a neighbour's token.
Does not know which samples share a pack (`plan.py`, `balance.py`), read samples or know ranks (`loader.py`).
"""

from collections.abc import Sequence
from math import lcm

import numpy as np

from sft.batch import Pack, Sample
from sft.parallel.alignment import aligned


def make_pack(samples: Sequence[Sample], *, doc_multiple: int, pad_id: int, reduction: str = "token") -> Pack:
    """Lays samples end to end, padded, with labels and weights; `Pack` shows one in numbers.

    A document's last token predicts nothing, and neither does padding: the labels there are `pad_id`, a valid
    id that nothing is ever computed from.
    """
    lengths = np.array([len(sample.tokens) for sample in samples], dtype=np.int32)
    assert len(lengths) and lengths.min() > 0
    cu_seqlens = np.concatenate([[0], np.cumsum(aligned(lengths, doc_multiple))]).astype(np.int32)
    total = int(cu_seqlens[-1])
    tokens = np.full(total, pad_id, dtype=np.int32)
    labels = np.full(total, pad_id, dtype=np.int32)
    loss_weights = np.zeros(total, dtype=np.float32)
    for sample, start, length in zip(samples, cu_seqlens[:-1].tolist(), lengths.tolist(), strict=True):
        tokens[start : start + length] = sample.tokens
        labels[start : start + length - 1] = sample.tokens[1:]
        loss_weights[start : start + length - 1] = sample.weights[1:] * token_weight(sample.num_supervised, reduction)
    return Pack(
        tokens=tokens,
        labels=labels,
        loss_weights=loss_weights,
        position_ids=_positions(cu_seqlens),
        cu_seqlens=cu_seqlens,
        lengths=lengths,
        sources=np.array([sample.source for sample in samples], dtype=np.int32),
        sample_ids=tuple(sample.sample_id for sample in samples),
    )


def token_weight(num_supervised: int, reduction: str) -> np.float32:
    """Weight of each supervised token of a sample that has `num_supervised`, by `loss.reduction`.

    4 tokens: token 1, sample 1/4, sqrt 1/2
    """
    exponent = {"token": 0.0, "sample": -1.0, "sqrt": -0.5}[reduction]
    return np.float32(max(num_supervised, 1) ** exponent)


def add_filler(pack: Pack, *, multiple: int, doc_multiple: int, pad_id: int) -> Pack:
    """Adds filler documents of `doc_multiple` tokens until the pack's length is a multiple of `multiple`.

    length 96, multiple 64, doc_multiple 32 -> one filler document, length 128
    """
    length = aligned(len(pack.tokens), lcm(multiple, doc_multiple))
    return pad_to(pack, length=length, doc_multiple=doc_multiple, pad_id=pad_id)


def pad_to(pack: Pack, *, length: int, doc_multiple: int, pad_id: int) -> Pack:
    """Fills a pack to `length` with filler documents of `doc_multiple` tokens each.

    They are short, so they cost no attention.  Filler is unsupervised and has length 0 in `lengths`.
    """
    missing = length - len(pack.tokens)
    assert missing >= 0 and missing % doc_multiple == 0, (length, len(pack.tokens), doc_multiple)
    fillers = missing // doc_multiple
    if fillers == 0:
        return pack
    ends = pack.cu_seqlens[-1] + np.arange(1, fillers + 1, dtype=np.int32) * doc_multiple
    cu_seqlens = np.concatenate([pack.cu_seqlens, ends]).astype(np.int32)
    filler = np.full(missing, pad_id, dtype=np.int32)
    return Pack(
        tokens=np.concatenate([pack.tokens, filler]),
        labels=np.concatenate([pack.labels, filler]),
        loss_weights=np.concatenate([pack.loss_weights, np.zeros(missing, dtype=np.float32)]),
        position_ids=_positions(cu_seqlens),
        cu_seqlens=cu_seqlens,
        lengths=np.concatenate([pack.lengths, np.zeros(fillers, dtype=np.int32)]),
        sources=np.concatenate([pack.sources, np.zeros(fillers, dtype=np.int32)]),
        sample_ids=pack.sample_ids,
    )


def filler_pack(*, doc_multiple: int, pad_id: int) -> Pack:
    """A pack of one filler document and no sample, for places of an epoch's last batch that no pack takes."""
    return Pack(
        tokens=np.full(doc_multiple, pad_id, dtype=np.int32),
        labels=np.full(doc_multiple, pad_id, dtype=np.int32),
        loss_weights=np.zeros(doc_multiple, dtype=np.float32),
        position_ids=np.arange(doc_multiple, dtype=np.int32),
        cu_seqlens=np.array([0, doc_multiple], dtype=np.int32),
        lengths=np.zeros(1, dtype=np.int32),
        sources=np.zeros(1, dtype=np.int32),
        sample_ids=(),
    )


def _positions(cu_seqlens: np.ndarray) -> np.ndarray:
    """cu_seqlens [0, 4, 8] -> [0, 1, 2, 3, 0, 1, 2, 3]"""
    starts = np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
    return (np.arange(len(starts), dtype=np.int32) - starts).astype(np.int32)
