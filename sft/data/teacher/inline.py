"""Reads the key `teacher` of a row: a teacher's distributions for the row's tokens.

    ids, logprobs    for each token of the row, the list of likely tokens and of their log-probabilities at its place;
                     null or an empty list: none
    positions        then ids and logprobs have an entry for each of these tokens only, counted from 0
    offsets          in place of positions: for each entry the characters [start, end] of the token in the row's text,
                     as the teacher's tokenizer gives them
    label_logprobs   for each entry, the log-probability of the row's own token
    tokenizer        the digest of the tokenizer, as `sft score` writes it
    digest           the digest of the row's tokens (`token_digest`)

The entry of a token is the distribution of that token given the tokens before it, so entries and labels are aligned.

Decides which keys and values are accepted.  `distributions.py` checks numbers.
"""

import hashlib
from itertools import chain
from typing import Any

import numpy as np

from sft.batch import Tree
from sft.config.teacher import TeacherConfig
from sft.data.rows.messages import type_name
from sft.data.teacher.distributions import Distributions, Entries, distributions
from sft.errors import DataError

KEY = "teacher"
_KEYS = ("ids", "logprobs", "positions", "offsets", "label_logprobs", "tokenizer", "digest")
Spans = tuple[np.ndarray, np.ndarray]  # the first character of each token, and the one after its last


def token_digest(tokens: np.ndarray, tree: Tree | None = None) -> str:
    """32 hexadecimal digits: the beginning of the SHA-256 of the ids as little-endian int32, and of the tree if any."""
    digest = hashlib.sha256(np.ascontiguousarray(tokens, dtype="<i4").tobytes())
    if tree is not None:
        for part in (tree.starts, tree.branches.parents, tree.branches.forks):
            digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
    return digest.hexdigest()[:32]


def check_tokenizer(of_teacher: str, ids_digest: str, where: str = "") -> None:
    """Raises DataError if the teacher's tokenizer makes other ids than that of the recipe.  Both are digests.

    where: the beginning of the message
    """
    if of_teacher != ids_digest:
        raise DataError(
            f"{where}the teacher's ids are of another tokenizer (digest {of_teacher[:12]}) than that of this recipe "
            f"({ids_digest[:12]}), so its distributions belong to other tokens.  Score with a teacher that has this "
            "tokenizer, and with the same data.add_tokens."
        )


def read_inline(
    value: object, tokens: np.ndarray, spans: Spans | None, ids_digest: str, teacher: TeacherConfig
) -> Distributions:
    """The distributions of the key `teacher` of a row.

    tokens  int32 [n], the tokens of the row
    spans   the characters of each token, if the row is a text
    Raises DataError if they do not belong to these tokens, or if a value is invalid.
    """
    if not isinstance(value, dict) or "ids" not in value or "logprobs" not in value:
        raise DataError(f"{KEY} must be an object with ids and logprobs; got {type_name(value)}.")
    fields = {key: item for key, item in value.items() if item is not None}
    if unknown := [key for key in fields if key not in _KEYS]:
        raise DataError(f"{KEY} has the key {unknown[0]}; known keys are {', '.join(_KEYS)}.")
    if "tokenizer" in fields:
        check_tokenizer(str(fields["tokenizer"]), ids_digest)
    if "digest" in fields and fields["digest"] != token_digest(tokens):
        raise DataError(
            f"{KEY}.digest is {fields['digest']}, but the tokens of this row have {token_digest(tokens)}: the "
            "distributions were made for other tokens.  Score the row again."
        )
    ids, logprobs = _lists(fields, "ids"), _lists(fields, "logprobs")
    counts = np.array([len(items) for items in ids], dtype=np.int64)
    if [*map(len, logprobs)] != counts.tolist():
        raise DataError(f"{KEY}.ids and {KEY}.logprobs have lists of different lengths.")
    positions = _positions(fields, len(ids), tokens, spans)
    flat = [*chain.from_iterable(ids)], [*chain.from_iterable(logprobs)]
    for key, items, kinds in (("ids", flat[0], {int}), ("logprobs", flat[1], {int, float})):
        if not set(map(type, items)) <= kinds:
            other = next(item for item in items if type(item) not in kinds)
            raise DataError(f"{KEY}.{key} has {type_name(other)}; it holds lists of numbers.")
    labels = fields.get("label_logprobs")
    if labels is not None and (not isinstance(labels, list) or len(labels) != len(ids)):
        raise DataError(f"{KEY}.label_logprobs must have an entry for each of the {len(ids):,} entries of ids.")
    is_given = counts > 0
    of_labels = None if labels is None else np.array([np.nan if x is None else x for x in labels], dtype=np.float64)
    entries = Entries(
        positions[is_given],
        counts[is_given],
        np.array(flat[0], dtype=np.int64),
        np.array(flat[1], dtype=np.float64),
        None if of_labels is None else of_labels[is_given],
    )
    return distributions(entries, tokens, teacher)


def _lists(fields: dict[str, Any], key: str) -> list[list[Any]]:
    """The lists under a key, one for each entry; null becomes an empty list."""
    items = fields[key]
    if not isinstance(items, list) or not all(item is None or isinstance(item, list) for item in items):
        raise DataError(f"{KEY}.{key} must be a list with a list of numbers for each token.")
    return [item or [] for item in items]


def _positions(fields: dict[str, Any], count: int, tokens: np.ndarray, spans: Spans | None) -> np.ndarray:
    """int64 [count]: the token to which each entry belongs."""
    if "positions" in fields:
        positions = fields["positions"]
        if not isinstance(positions, list) or len(positions) != count or not set(map(type, positions)) <= {int}:
            raise DataError(f"{KEY}.positions must have an index of a token for each of the {count:,} entries of ids.")
        return np.array(positions, dtype=np.int64)
    if "offsets" in fields:
        if spans is None:
            raise DataError(
                f"{KEY}.offsets needs a row with the key text.  Give the distributions of a chat with "
                "data.teacher.files, and those of a row of ids without offsets."
            )
        return _by_offsets(fields["offsets"], count, spans)
    if count != len(tokens):
        raise DataError(
            f"{KEY}.ids has {count:,} entries, but the row has {len(tokens):,} tokens.  Give an entry for each token, "
            "or positions."
        )
    return np.arange(count)


def _by_offsets(offsets: Any, count: int, spans: Spans) -> np.ndarray:
    """The tokens with these characters.  Tokens with equal characters, such as bytes of one character, go in order."""
    if not isinstance(offsets, list) or len(offsets) != count:
        raise DataError(f"{KEY}.offsets must have [start, end] for each of the {count:,} entries of ids.")
    ours, positions, at = ([*zip(*(bound.tolist() for bound in spans), strict=True)], [], 0)
    for number, offset in enumerate(offsets, start=1):
        wanted = tuple(offset) if isinstance(offset, list) else offset
        index = next((i for i in range(at, len(ours)) if ours[i] == wanted), None)
        if index is None:
            near = next((span for span in ours[at:] if isinstance(wanted, tuple) and span[1] > wanted[0]), None)
            raise DataError(
                f"{KEY}.offsets has {offset} as entry {number:,}, but no further token of this text covers these "
                f"characters; the token there covers {list(near) if near else 'none'}.  The teacher split the text "
                "into other tokens."
            )
        positions.append(index)
        at = index + 1
    return np.array(positions, dtype=np.int64)
