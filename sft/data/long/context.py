"""Makes two samples of each held-out document: the whole document, and its last quarter alone.

    document    |----------------------------------------| n tokens
    whole       |................................... ####|
    nearest                                   |..... ####|  the last n / 4 tokens

In both, the same tokens are supervised (#): those of the last n / 8 tokens that the document supervises.  Each of them
has at least n / 8 tokens before it in both samples.  What the first 3/4 of the document say is missing in one only.
"""

import hashlib

import numpy as np

from sft.data.cache.corpus import Corpus
from sft.data.cache.row_report import LINE
from sft.data.cache.store import Store

LEAST = 64  # tokens of a document; shorter ones are not compared
_NEAREST, _SCORED = 4, 8  # the last 1/4 of a document is a sample; tokens of its last 1/8 are scored


def compared(corpus: Corpus) -> list[int]:
    """Ids of the documents that have a scored token.  The corpus must have no trees."""
    ids = np.flatnonzero((corpus.lengths >= LEAST) & (corpus.num_supervised > 0)).tolist()
    return [i for i in ids if corpus.sample(i).weights[_first_scored(int(corpus.lengths[i])) :].any()]


def pairs(corpus: Corpus, ids: list[int]) -> Corpus:
    """A corpus in memory: the whole documents of `ids`, in their order, then the last quarter of each."""
    samples = [corpus.sample(i) for i in ids]
    tokens, masks = list[np.ndarray](), list[np.ndarray]()
    lines: list[tuple[int, ...]] = []
    for is_whole in (True, False):
        for sample in samples:
            n = len(sample.tokens)
            mask = ((np.arange(n) >= _first_scored(n)) & (sample.weights > 0)).astype(np.uint8)
            start = 0 if is_whole else n - n // _NEAREST
            tokens.append(sample.tokens[start:])
            masks.append(mask[start:])
            count, supervised = n - start, int(mask.sum())
            lines.append((len(lines), 1, 1, count, supervised, count, count, supervised))
    stored = np.concatenate(tokens)
    store = Store(
        tokens=stored,
        mask=np.concatenate(masks),
        rows=np.array(lines, dtype=LINE),
        weights=np.array([0, 1], np.float32),
        row_report=corpus.row_reports[corpus.files[0]],
        digest=hashlib.sha256(stored.tobytes()).hexdigest(),
    )
    return Corpus([corpus.files[0]], [store])


def _first_scored(num_tokens: int) -> int:
    return num_tokens - num_tokens // _SCORED
