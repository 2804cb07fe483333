"""Cuts a row of tokens into documents, by the keys with which other programs mark documents and padding.

    attention_mask   0 for padding and 1 for text, which any tokenizer of transformers writes.  In packed rows, it holds
                     the number of each token's document, 1 1 1 2 2 0: axolotl (V2BatchSamplerDataCollatorForSeq2Seq),
                     LLaMA-Factory (PackedSupervisedDatasetProcessor with neat_packing)
    position_ids     restart at 0 in each document, 0 1 2 0 1: axolotl, LLaMA-Factory, TRL (padding_free), transformers
                     (DataCollatorWithFlattening).  Axolotl pads with 0.  torchtune's name is input_pos
    seq_start_id     the first token of each document, 0 3: packed files of NeMo and Megatron-Bridge
                     (fill_packing_strategy)
    cu_seqlens       the first token of each document, and the end of the last one, 0 3 5.  NeMo pads the list with -1
                     (GPTSFTPackedDataset.collate_fn), others repeat the end.  Tokens after the end are padding.
                     cu_seq_lens_q and cu_seq_lens_k are the names of transformers
    seq_lengths      the length of each document, 3 2: TRL (pack_dataset).  torchtune's name is seq_lens
    seq_idx, segment_ids, document_ids
                     the number of each token's document: transformers (return_seq_idx), Mamba-2, MaxText and masks of
                     FlexAttention.  Padding is -1 or, if the first document has another number, 0
    token_type_ids   0 for text.  Other numbers mark images or a second text, which are refused

Decides which values are accepted.  All keys of a row must describe the same documents and padding.  Padding must not
interrupt a document, and must not be supervised.  All other values are refused, because they would change what the
model sees.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from sft.data.rows.messages import type_name
from sft.errors import DataError

_MASK = "attention_mask"
_POSITIONS = ("position_ids", "input_pos")
_NUMBERS = ("seq_idx", "segment_ids", "document_ids")
_BOUNDS = ("cu_seqlens", "cu_seqlens_padded", "cu_seqlens_unpadded", "cu_seq_lens_q", "cu_seq_lens_k")
_LENGTHS = ("seq_lengths", "seq_lens")
_TYPES = "token_type_ids"
_EACH_TOKEN = (_MASK, *_POSITIONS, *_NUMBERS, _TYPES)  # keys with one number for each token
DOCUMENT_KEYS = (*_EACH_TOKEN, "seq_start_id", *_BOUNDS, *_LENGTHS)

_REMEDY = "Correct {}, or give each document a row of its own, without padding."


class CutDocuments(NamedTuple):
    """The documents of a row.

    positions  int64 [m], rising: positions of the tokens that are not padding
    starts     int64 [d], rising: for each document, the index of its first token in `positions`
    """

    positions: np.ndarray
    starts: np.ndarray


def find_documents(row: dict[str, Any], tokens: str, is_supervised: np.ndarray) -> CutDocuments:
    """The documents of a row whose tokens are under the key `tokens`.

    is_supervised  bool [n]: whether a token is supervised

    attention_mask 0 1 1 1 1, position_ids 0 0 1 0 1  ->  positions 1 2 3 4, starts 0 2
    Raises DataError if the keys are invalid or contradict each other.
    """
    num_tokens = len(is_supervised)
    keys = {key: _integers(key, row[key]) for key in DOCUMENT_KEYS if row.get(key) is not None}
    for key in keys:
        if key in _EACH_TOKEN and len(keys[key]) != num_tokens:
            raise DataError(f"{key} has {len(keys[key]):,} numbers, but {tokens} has {num_tokens:,}.")
    claims = {key: _CLAIMS[key](key, values, num_tokens) for key, values in keys.items() if key in _CLAIMS}
    is_padding = _padding(claims, keys, is_supervised)
    if (supervised := np.flatnonzero(is_padding & is_supervised)).size:
        at = int(supervised[0])
        raise DataError(
            f"token {at + 1:,} is padding by {_who(claims, at)}, but it is supervised.  Padding needs the weight 0 or "
            "the label -100.  Correct the mask or the labels."
        )
    positions = np.flatnonzero(~is_padding)
    if not positions.size:
        raise DataError(f"every token is padding by {_who(claims, 0)}, so the row has no document.  Remove the row.")
    if keys.get(_TYPES, is_padding)[positions].any():
        raise DataError(
            f"{_TYPES} has other numbers than 0, which mark images or a second text.  They are not supported.  Remove "
            "the row."
        )
    if _MASK in claims and claims[_MASK].max() == 1:  # 0 and 1 mark padding, not documents
        del claims[_MASK]
    starts = {key: _changes(numbers[positions]) for key, numbers in claims.items()}
    starts |= {key: _restarts(key, keys[key], positions) for key in _POSITIONS if key in keys}
    return CutDocuments(positions, np.flatnonzero(_common(starts, positions)))


def _integers(key: str, values: object) -> np.ndarray:
    """int64 [k]: the numbers of a key, which may also be written as true, false or 1.0."""
    if not isinstance(values, list) or not values:
        raise DataError(f"{key} must be a list of numbers; got {type_name(values)}.")
    if not set(map(type, values)) <= {int, bool, float}:
        at = next(i for i, value in enumerate(values) if type(value) not in (int, bool, float))
        masks = "  A mask of several dimensions cannot be used.  Give the documents by position_ids."
        raise DataError(
            f"{key} has {type_name(values[at])} at position {at + 1}; it holds a whole number for each token or "
            f"document.{masks if isinstance(values[at], list) else ''}"
        )
    numbers = np.asarray(values)
    if numbers.dtype.kind == "O" or not (np.abs(numbers.astype(np.float64)) < 2**53).all():
        raise DataError(f"{key} has a number beyond 2^53.  {_REMEDY.format(key)}")
    if (numbers != numbers.astype(np.int64)).any():
        raise DataError(f"{key} has a number that is not whole.  {_REMEDY.format(key)}")
    return numbers.astype(np.int64)


# Each of the following functions converts the values of a key to int64 [n]: the document number of each token, from 1;
# 0 for padding.


def _by_number(key: str, values: np.ndarray, num_tokens: int) -> np.ndarray:
    lowest = 0 if key == _MASK else -1
    if values.min() < lowest:
        raise DataError(f"{key} has {values.min()}; expected numbers from {lowest}.  {_REMEDY.format(key)}")
    known = values[values >= 0]
    zero_is_padding = key == _MASK or (known.size and known[0] > 0)
    is_padding = (values < 0) | (values == 0) if zero_is_padding else values < 0
    real = np.flatnonzero(~is_padding)
    begins = real[_changes(values[real])]
    firsts = np.unique(values[begins], return_index=True)[1]
    if len(firsts) < len(begins):
        at = int(np.delete(begins, firsts)[0])
        raise DataError(
            f"{key} has {values[at]} at token {at + 1:,} again, after another number: the tokens of a document must "
            f"follow one another.  {_REMEDY.format(key)}"
        )
    numbers = np.zeros(num_tokens, np.int64)
    numbers[real] = np.cumsum(_changes(values[real]))
    return numbers


def _by_bounds(key: str, values: np.ndarray, num_tokens: int, *, expected: str) -> np.ndarray:
    """The document number of each token.  values: first token of each document, then the end of the last one"""
    rises = (np.diff(values) > 0).all() and len(values) > 1
    if values[0] != 0 or not rises or values[-1] > num_tokens:
        shown = ", ".join(map(str, values[:20].tolist())) + (", ..." if len(values) > 20 else "")
        raise DataError(f"{key} gives {shown} for {num_tokens:,} tokens; expected {expected}.  {_REMEDY.format(key)}")
    numbers = np.searchsorted(values, np.arange(num_tokens), side="right")
    numbers[values[-1] :] = 0
    return numbers


def _by_starts(key: str, values: np.ndarray, num_tokens: int) -> np.ndarray:
    expected = "0 and then the first token of each further document, rising"
    return _by_bounds(key, np.append(values, num_tokens), num_tokens, expected=expected)


def _by_cu_seqlens(key: str, values: np.ndarray, num_tokens: int) -> np.ndarray:
    """The document number of each token.  Ignores padding of the list: trailing -1, or repetitions of its end."""
    bounds = values[: np.flatnonzero(values != -1)[-1] + 1] if (values != -1).any() else values
    bounds = bounds[: np.flatnonzero(_changes(bounds))[-1] + 1]
    expected = "0 and then the end of each document, rising, at most the number of tokens"
    return _by_bounds(key, bounds, num_tokens, expected=expected)


def _by_lengths(key: str, values: np.ndarray, num_tokens: int) -> np.ndarray:
    expected = "lengths from 1, together at most the number of tokens; these are the ends of the documents"
    return _by_bounds(key, np.cumsum(np.append(0, values)), num_tokens, expected=expected)


_CLAIMS: dict[str, Callable[[str, np.ndarray, int], np.ndarray]] = {
    **dict.fromkeys((_MASK, *_NUMBERS), _by_number),
    "seq_start_id": _by_starts,
    **dict.fromkeys(_BOUNDS, _by_cu_seqlens),
    **dict.fromkeys(_LENGTHS, _by_lengths),
}


def _padding(claims: dict[str, np.ndarray], keys: dict[str, np.ndarray], is_supervised: np.ndarray) -> np.ndarray:
    """bool [n]: whether each token is padding.

    attention_mask decides.  Without it, a token is padding if any other key of `claims` marks it.  If no key marks
    padding, zeros of position_ids at the ends of the row do.  Raises DataError if a key marks padding that
    attention_mask does not mark.
    claims: {key: document number of each token, 0 for padding}
    """
    is_padding = np.zeros(len(is_supervised), dtype=bool)
    for numbers in [claims[_MASK]] if _MASK in claims else claims.values():
        is_padding |= numbers == 0
    for key, numbers in claims.items():
        if (unlike := np.flatnonzero((numbers == 0) & ~is_padding)).size:
            raise DataError(
                f"token {int(unlike[0]) + 1:,} is padding by {key}, but not by {_MASK}.  "
                f"{_REMEDY.format('one of them')}"
            )
    positions = next((keys[key] for key in _POSITIONS if key in keys), None)
    if positions is None or is_padding.any() or _MASK in claims:
        return is_padding
    # Padding of axolotl: zeros at an end of the row, each of which would be a document of one token without loss.
    is_alone = (positions == 0) & (np.append(positions[1:], 0) == 0) & ~is_supervised
    if not is_alone.all():
        others = np.flatnonzero(~is_alone)
        is_padding[: others[0]] = is_padding[others[-1] + 1 :] = True
    return is_padding


def _restarts(key: str, values: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """bool [m]: whether a document begins at each token of `positions`, by the key `key` with position ids.

    Raises DataError if the ids do not count up from 0 in each document.
    """
    counted = values[positions]
    follows = (np.diff(counted) == 1) & (np.diff(positions) == 1)
    is_start = counted == 0
    if (wrong := np.flatnonzero(~is_start & ~np.append(False, follows))).size:
        at = int(wrong[0])
        before = f"after {counted[at - 1]}" if at else "at the start of a document"
        raise DataError(
            f"{key} has {counted[at]} at token {positions[at] + 1:,}, {before}; expected 0, 1, 2, ... within each "
            f"document.  {_REMEDY.format(key)}"
        )
    return is_start


def _common(starts: dict[str, np.ndarray], positions: np.ndarray) -> np.ndarray:
    """bool [m]: whether a document begins at each token of `positions`.

    starts: {key: the same array by this key}.  Raises DataError if keys differ, or if padding interrupts a document.
    """
    is_start = next(iter(starts.values()), _changes(np.zeros(len(positions))))
    first = next(iter(starts), "")
    for key, other in starts.items():
        if (unlike := np.flatnonzero(other != is_start)).size:
            at = int(unlike[0])
            yes, no = (first, key) if is_start[at] else (key, first)
            raise DataError(
                f"a document begins at token {positions[at] + 1:,} by {yes}, but not by {no}.  "
                f"{_REMEDY.format('one of them')}"
            )
    if (broken := np.flatnonzero((np.diff(positions) > 1) & ~is_start[1:])).size:
        at = int(positions[broken[0]]) + 2
        raise DataError(
            f"token {at:,} is padding in the middle of a document.  "
            f"{_REMEDY.format('the keys of padding and documents')}"
        )
    return is_start


def _changes(values: np.ndarray) -> np.ndarray:
    """bool [k]: whether a number differs from the one before it; true for the first number."""
    is_new = np.ones(len(values), dtype=bool)
    is_new[1:] = values[1:] != values[:-1]
    return is_new


def _who(claims: dict[str, np.ndarray], at: int) -> str:
    """The key that marks the token at index `at` as padding.  claims: {key: document numbers, 0 for padding}

    If no key of `claims` does, position_ids does: `_padding` then takes zeros at the ends of the row as padding.
    """
    return next((key for key, numbers in claims.items() if numbers[at] == 0), _POSITIONS[0])
