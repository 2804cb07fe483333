"""One pass over the tokens of all samples: which are alike, where answers end, which answer is the longest.

Decides what alike means: equal tokens, or equal tokens up to the first answer and another answer; and that an answer
which goes on in the next window of its row is counted there.  Does not judge or print what it finds (`findings.py`,
`text.py`).  Memory is 48 bytes per sample, however long it is: tokens are hashed as they are mapped from disk
(blake2b, 16 bytes: two different samples of a billion share one with probability 1e-21).
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from sft.batch import Sample
from sft.console import Console
from sft.data.cache.corpus import Corpus

_DIGEST_BYTES = 16
_KIND = np.dtype(f"S{_DIGEST_BYTES}")
_UNFINISHED_LISTED = 16


class Scan(NamedTuple):
    """What one pass over a corpus of n samples finds.

    wholes, prompts, openings  S16 [n]: digests of all tokens, of those before the first answer (its first supervised
                               run), of those to its end; of all tokens where there is no prompt, and for every window
                               of a row but its first
    num_runs         unbroken stretches of supervised tokens, which are the assistant's turns
    unfinished_runs  of these, how many do not end with the end-of-turn token; unfinished: which samples they are in
    longest_run      tokens of the longest one, and longest_sample which sample has it
    """

    wholes: np.ndarray
    prompts: np.ndarray
    openings: np.ndarray
    num_runs: int
    unfinished_runs: int
    unfinished: list[int]
    longest_run: int
    longest_sample: int


def scan(corpus: Corpus, ends_of_turn: Sequence[int], console: Console) -> Scan:
    """Reads every token once.  Of samples with unfinished turns the first few are kept, and all are counted."""
    digests = bytearray()
    num_runs = unfinished_runs = longest_run = longest_sample = 0
    unfinished: list[int] = []
    lines = sample_lines(corpus)
    windows = zip(lines["window"].tolist(), lines["windows"].tolist(), strict=True)
    with console.track("reading samples", len(corpus), "samples") as progress:
        for sample_id, (window, of) in enumerate(windows):
            sample = corpus.sample(sample_id)
            starts, ends = supervised_runs(sample.weights)
            digests += _digests(sample, starts, ends, has_prompt=window == 1)
            is_open = ~np.isin(sample.tokens[ends - 1], ends_of_turn)
            if window < of and len(ends) and ends[-1] == len(sample.tokens) and is_open[-1]:
                is_open = is_open[:-1]  # the turn goes on in the next window, which counts it
            if is_open.any() and len(unfinished) < _UNFINISHED_LISTED:
                unfinished.append(sample_id)
            unfinished_runs += int(is_open.sum())
            num_runs += len(is_open)
            longest = int((ends - starts).max(initial=0))
            if longest > longest_run:
                longest_run, longest_sample = longest, sample_id
            progress.advance(1)
    wholes, prompts, openings = np.frombuffer(digests, dtype=_KIND).reshape(-1, 3).T
    return Scan(wholes, prompts, openings, num_runs, unfinished_runs, unfinished, longest_run, longest_sample)


def sample_lines(corpus: Corpus) -> np.ndarray:
    """LINE [n]: the line of each sample."""
    return np.concatenate([table[table["tokens"] > 0] for table in corpus.tables])


def _digests(sample: Sample, starts: np.ndarray, ends: np.ndarray, *, has_prompt: bool) -> bytes:
    """Whole, prompt and opening, end to end."""
    start, end = (int(starts[0]), int(ends[0])) if len(starts) else (0, 0)
    digest = blake2b(sample.tokens[:start].data, digest_size=_DIGEST_BYTES)
    prompt = digest.digest()
    digest.update(sample.tokens[start:end].data)
    opening = digest.digest()
    digest.update(sample.tokens[end:].data)
    whole = digest.digest()
    return whole + prompt + opening if has_prompt and start > 1 else 3 * whole


def supervised_runs(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where supervised stretches start and end; a sample's first token is never learnt.

    1 1 1 0 0 2 -> starts 1 5, ends 3 6
    """
    is_supervised = np.zeros(len(weights) + 2, dtype=bool)
    is_supervised[2:-1] = weights[1:] > 0
    edges = np.flatnonzero(is_supervised[1:] != is_supervised[:-1])
    return edges[::2], edges[1::2]


def copies(digests: np.ndarray) -> np.ndarray:
    """Samples that an earlier one equals, each with the first of these, int64 [k, 2]: a b a c a -> (2, 0), (4, 0)"""
    _, firsts, inverse = np.unique(digests, return_index=True, return_inverse=True)
    originals = firsts[inverse]
    later = np.flatnonzero(originals != np.arange(len(digests)))
    return np.stack([later, originals[later]], axis=1)


def other_answers(prompts: np.ndarray, openings: np.ndarray) -> np.ndarray:
    """Samples whose prompt an earlier one has too, and whose first answer is a new one for it; pairs as above.

    prompts p p q p, openings pa pb qa pa -> (1, 0): the last one's answer is that of the first
    """
    distinct = np.sort(np.unique(openings, return_index=True)[1])
    return distinct[copies(prompts[distinct])]
