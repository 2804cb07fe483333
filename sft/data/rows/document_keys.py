"""Checks keys of tokenised rows that say where padding and documents lie, such as attention_mask and position_ids.

A row of tokens is one document without padding.  Decides which values of these keys say the same; other values are
refused, because they would change what the model sees.
"""

from collections.abc import Callable
from typing import Any

from sft.data.rows.messages import shortened, type_name
from sft.errors import DataError

_PADDING = (
    "Other tokens are padding, which would be trained as text.  Remove them from {tokens} and its mask or labels."
)
_DOCUMENTS = "Other values mean several documents, which would see each other.  Give each document a row of its own."
_IMAGES = "Other values mark images or a second text, which are not supported.  Remove the row."

# For each key: the value of a row of one document of n tokens, given the row's value; its description; other values.
_Expected = Callable[[int, list[Any]], list[Any]]
_KEYS: dict[str, tuple[_Expected, str, str]] = {
    "attention_mask": (lambda n, _: [1] * n, "1 for each of the {n} tokens", _PADDING),
    "position_ids": (lambda n, _: list(range(n)), "0, 1, 2, ... for {n} tokens", _DOCUMENTS),
    "seq_start_id": (lambda n, _: [0], "[0]", _DOCUMENTS),
    "cu_seqlens": (lambda n, _: [0, n], "[0, {n}]", _DOCUMENTS),
    "seq_lengths": (lambda n, _: [n], "[{n}]", _DOCUMENTS),
    "seq_idx": (lambda n, values: values[:1] * n, "the same number for each of the {n} tokens", _DOCUMENTS),
    "segment_ids": (lambda n, values: values[:1] * n, "the same number for each of the {n} tokens", _DOCUMENTS),
    "document_ids": (lambda n, values: values[:1] * n, "the same number for each of the {n} tokens", _DOCUMENTS),
    "token_type_ids": (lambda n, _: [0] * n, "0 for each of the {n} tokens", _IMAGES),
}
DOCUMENT_KEYS = tuple(_KEYS)


def check_documents(row: dict[str, Any], name: str, num_tokens: int) -> None:
    """Raises DataError unless a row of tokens is one document without padding.  `name` is the key of the tokens.

    position_ids is 0, 1, 2, 0, 1; expected 0, 1, 2, ... for 5 tokens.  Other values mean several documents, ...
    """
    for key, (expected, description, others) in _KEYS.items():
        values = row.get(key)
        if values is None:
            continue
        if not isinstance(values, list):
            raise DataError(f"{key} must be a list of numbers; got {type_name(values)}.")
        if values != expected(num_tokens, values):
            raise DataError(
                f"{key} is {shortened(', '.join(map(str, values[:30])) or 'an empty list')}; expected "
                f"{description.format(n=num_tokens)}.  {others.format(tokens=name)}"
            )
