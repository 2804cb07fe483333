"""Reads rows that were tokenised elsewhere: their tokens, weights and documents.

Decides which masks and labels a row may have.  `document_keys.py` reads the keys of packed and padded rows.
"""

from typing import Any, NamedTuple

import numpy as np

from sft.data.rows.chat_keys import Row
from sft.data.rows.document_keys import find_documents
from sft.data.rows.messages import read_weight, shortened, type_name
from sft.errors import DataError

MASKS = ("loss_mask", "assistant_masks")
_LARGEST_ID = 2**31 - 1
_UNSUPERVISED = -100  # label of unsupervised tokens, by the convention of PyTorch


class Tokenized(NamedTuple):
    """A row that was tokenised elsewhere: tokens int32 [n], and weights float32 [n], above 0 for supervised tokens.

    starts       index of the first token of each document; a packed row has several documents
    num_padding  number of tokens that were padding, and are not among `tokens`
    """

    tokens: np.ndarray
    weights: np.ndarray
    starts: tuple[int, ...] = (0,)
    num_padding: int = 0


def read_tokens(row: Row, key: str) -> Tokenized:
    """The tokens of a row under `key`.  Raises DataError if tokens, masks, labels or keys of documents are invalid."""
    tokens = _numbers(row, key, (int,), "ids are integers")
    if min(tokens) < 0 or max(tokens) > _LARGEST_ID:
        at = next(i for i, token in enumerate(tokens) if not 0 <= token <= _LARGEST_ID)
        raise DataError(
            f"{key} has {shortened(str(tokens[at]))} at position {at + 1}; ids are integers from 0 to {_LARGEST_ID:,}."
        )
    masks = [name for name in (*MASKS, "labels") if name in row]
    if len(masks) != 1:
        raise DataError(
            f"{key} needs one of {', '.join(MASKS)} or labels, to say which tokens are supervised; got "
            f"{' and '.join(masks) or 'none'}."
        )
    weights = np.array(
        _from_labels(row, key, tokens) if masks == ["labels"] else _from_mask(row, masks[0]), dtype=np.float32
    )
    if len(weights) != len(tokens):
        raise DataError(f"{key} has {len(tokens):,} numbers, but {masks[0]} has {len(weights):,}.")
    documents = find_documents(row, key, weights > 0)
    weights, starts = weights[documents.positions], documents.starts
    if not np.delete(weights, starts).any():
        each = "" if len(starts) == 1 else " of a document"
        raise DataError(f"{masks[0]} supervises no token after the first token{each}, so the row has no loss.")
    num_padding = len(tokens) - len(weights)
    if num_padding or len(starts) > 1:
        weights[starts] = 0  # no token precedes and predicts the first token of a document
    ids = np.array(tokens, dtype=np.int32)[documents.positions]
    return Tokenized(ids, weights, tuple(starts.tolist()), num_padding)


def _from_mask(row: Row, name: str) -> list[float]:
    mask = _numbers(row, name, (int, float, bool), "it holds numbers")
    weights = {value: read_weight(value, name) for value in set(mask)}
    return [weights[value] for value in mask]


def _from_labels(row: Row, key: str, tokens: list[int]) -> list[float]:
    labels = _numbers(row, "labels", (int,), "labels are integers")
    for number, (token, label) in enumerate(zip(tokens, labels), start=1):
        if label not in (token, _UNSUPERVISED):
            raise DataError(
                f"label {number} is {shortened(str(label))}, but token {number} is {token}: a label must be the token "
                f"at the same position (not shifted), or {_UNSUPERVISED}."
            )
    return [float(label != _UNSUPERVISED) for label in labels]


def _numbers(row: Row, key: str, types: tuple[type, ...], expected: str) -> list[Any]:
    values = row[key]
    if not isinstance(values, list) or not values:
        raise DataError(f"{key} must be a list of at least one number; got {type_name(values)}.")
    if not set(map(type, values)) <= set(types):
        at = next(i for i, value in enumerate(values) if type(value) not in types)
        raise DataError(f"{key} has {type_name(values[at])} at position {at + 1}; {expected}.")
    return values
