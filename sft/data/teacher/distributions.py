"""Checks a teacher's distributions, and brings them to one width.

Decides which values are refused, and which tokens are kept.  `inline.py` and `records.py` read the values.
"""

from typing import NamedTuple

import numpy as np

from sft.config.teacher import TeacherConfig
from sft.errors import DataError

LARGEST_ID = 2**31 - 1
# A log-probability may be above 0, and a sum of probabilities above 1, by the rounding of other programs.  Such values
# are lowered to 0 and 1.
ABOVE_0, ABOVE_1 = 1e-5, 1e-4


class Entries(NamedTuple):
    """The values of m distributions as they were read.

    positions       int64 [m], the token whose distribution it is, as an index in the tokens of a row or a sample
    counts          int64 [m], the number of values of each distribution
    ids             int64 [sum of counts], tokens of the vocabulary
    logprobs        float64 [sum of counts], their log-probabilities
    label_logprobs  float64 [m], the log-probability of the token itself, NaN where it is not given; None: nowhere
    """

    positions: np.ndarray
    counts: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray
    label_logprobs: np.ndarray | None = None


class Distributions(NamedTuple):
    """m distributions: for tokens `positions`, int64 [m], rising, and `rows` [m] of the type `row_dtype`."""

    positions: np.ndarray
    rows: np.ndarray

    def at(self, positions: np.ndarray) -> np.ndarray:
        """The rows of the tokens `positions`.  Raises DataError with the number of a token without a distribution."""
        index = np.minimum(np.searchsorted(self.positions, positions), max(0, len(self.positions) - 1))
        is_there = self.positions[index] == positions if len(self.positions) else np.zeros(len(positions), dtype=bool)
        if not is_there.all():
            lacking = positions[~is_there]
            raise DataError(
                f"token {int(lacking[0]) + 1:,} is supervised, but has no distribution of the teacher, as have "
                f"{len(lacking):,} of the {len(positions):,} supervised tokens.  Score these tokens too, or set "
                "data.teacher.missing = labels, which learns such rows from their labels only."
            )
        return self.rows[index]


def row_dtype(teacher: TeacherConfig) -> np.dtype:
    """The type of a stored distribution: ids, int32, -1 where there are fewer, and log-probabilities by falling
    value."""
    number = np.float16 if teacher.logprob_dtype == "fp16" else np.float32
    return np.dtype([("ids", np.int32, (teacher.width,)), ("logprobs", number, (teacher.width,))])


def distributions(entries: Entries, tokens: np.ndarray, teacher: TeacherConfig) -> Distributions:
    """The k most likely tokens of each distribution, and with data.teacher.label the token itself.

    tokens: the tokens of the row or the sample.  Raises DataError for invalid values.
    """
    _check(entries, tokens)
    owner = np.repeat(np.arange(len(entries.counts)), entries.counts)
    order = np.lexsort((entries.ids, -entries.logprobs, owner))
    ids, logprobs = entries.ids[order], entries.logprobs[order]
    rank = np.arange(len(ids)) - np.repeat(np.cumsum(entries.counts) - entries.counts, entries.counts)
    kept = rank < (teacher.k or 0)
    all_ids = np.full((len(entries.counts), teacher.width), -1, dtype=np.int64)
    values = np.full(all_ids.shape, -np.inf)
    all_ids[owner[kept], rank[kept]], values[owner[kept], rank[kept]] = (ids[kept], logprobs[kept])
    if teacher.label:
        _add_labels(entries, tokens, all_ids, values)
    total = np.exp(values).sum(1)
    if (beyond := np.flatnonzero(total > 1 + ABOVE_1)).size:
        at = int(beyond[0])
        raise DataError(
            f"the teacher's probabilities for token {int(entries.positions[at]) + 1:,} have the sum {total[at]:.6g}, "
            "which is above 1.  They are no log-probabilities over the whole vocabulary, or were rounded to 16 bits.  "
            "Write them in 32 bits."
        )
    values = np.minimum(values - np.log(np.maximum(total, 1))[:, None], 0)
    rows = np.zeros(len(all_ids), dtype=row_dtype(teacher))
    rows["ids"], rows["logprobs"] = all_ids, _rounded_down(np.where(all_ids < 0, 0, values), rows["logprobs"].dtype)
    return Distributions(entries.positions, rows)


def _check(entries: Entries, tokens: np.ndarray) -> None:
    """Raises DataError if a position, an id or a log-probability is not possible."""
    positions, owner = entries.positions, np.repeat(entries.positions, entries.counts)
    if len(positions) and not ((np.diff(positions) > 0).all() and 0 <= positions[0] and positions[-1] < len(tokens)):
        raise DataError(
            f"the teacher's positions are {_shown(positions)} for {len(tokens):,} tokens; expected rising indices of "
            "tokens, counted from 0.  The distributions belong to other tokens."
        )
    if (empty := np.flatnonzero(entries.counts == 0)).size:
        raise DataError(f"the teacher's distribution for token {int(positions[empty[0]]) + 1:,} has no value.")
    if (outside := np.flatnonzero((entries.ids < 0) | (entries.ids > LARGEST_ID))).size:
        raise DataError(
            f"the teacher's distribution for token {int(owner[outside[0]]) + 1:,} has the id "
            f"{entries.ids[outside[0]]}; ids are integers from 0 to {LARGEST_ID:,}."
        )
    logprobs = entries.logprobs
    if (above := np.flatnonzero(~np.isfinite(logprobs) | (logprobs > ABOVE_0))).size:
        raise DataError(
            f"the teacher's distribution for token {int(owner[above[0]]) + 1:,} has the log-probability "
            f"{logprobs[above[0]]:g}; expected a finite number of at most 0.  Logits are no log-probabilities."
        )
    order = np.lexsort((entries.ids, owner))
    is_repeated = (np.diff(owner[order]) == 0) & (np.diff(entries.ids[order]) == 0)
    if (repeated := np.flatnonzero(is_repeated)).size:
        at = order[repeated[0]]
        raise DataError(
            f"the teacher's distribution for token {int(owner[at]) + 1:,} has the id {entries.ids[at]} twice."
        )


def _add_labels(entries: Entries, tokens: np.ndarray, ids: np.ndarray, values: np.ndarray) -> None:
    """Adds the log-probability of the token itself to each distribution that lacks the token, after its last value."""
    of_labels = entries.label_logprobs
    if of_labels is None or len(of_labels) != len(ids):
        raise DataError(
            "the teacher gives no label_logprobs for its positions, but data.teacher.label is true.  Add them, or set "
            "data.teacher.label = false."
        )
    labels = tokens[entries.positions]
    lacking = np.flatnonzero((ids != labels[:, None]).all(1) & ~np.isnan(of_labels))
    at, least = (ids[lacking] >= 0).sum(1), values[lacking]
    least = np.where(np.isfinite(least), least, 0).min(1, initial=0)
    above = np.flatnonzero(~np.isfinite(of_labels[lacking]) | (of_labels[lacking] > least + ABOVE_0))
    if above.size:
        token = lacking[above[0]]
        raise DataError(
            f"the teacher's log-probability of token {int(entries.positions[token]) + 1:,} itself is "
            f"{of_labels[token]:g}, which is above that of the least likely token of its distribution, although the "
            "distribution lacks the token.  It belongs to another token."
        )
    ids[lacking, at], values[lacking, at] = labels[lacking], of_labels[lacking]


def _rounded_down(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The values in a narrower type, none above the exact value, so that no sum of probabilities grows."""
    narrow = values.astype(dtype)
    return np.where(narrow > values, np.nextafter(narrow, dtype.type(-np.inf)), narrow)


def _shown(numbers: np.ndarray) -> str:
    return ", ".join(map(str, numbers[:6].tolist())) + (", ..." if len(numbers) > 6 else "")
