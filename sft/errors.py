"""Defines the errors that a user or a disk can cause.  Every other error is a bug in this code and keeps its traceback.

For each SftError, rank 0 prints one paragraph.  The exit code is 2, or 1 if another start may succeed (`MAY_SUCCEED`).
A message names the setting or file and its value, says why the value does not work, and which value would work.

Messages and lines of the console contain text of files, which strangers may have written.  So this module also makes
text safe to show: it escapes control characters, and cuts text after 4,000 characters.
"""

import re
from collections.abc import Iterable
from itertools import islice

MESSAGE_CHARACTERS = 4_000
_ITEMS = 5
# Control characters (without tab and line feed), line separators, overrides of text direction, unpaired surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""`text` with an escape for each control character: ESC becomes the four characters \x1b."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def in_one_line(text: str) -> str:
    """`text` with a question mark in place of each line break and of each other character that cannot be printed."""
    return "".join(c if c.isprintable() else "?" for c in text)


def capped(text: str) -> str:
    """`text`, cut to at most `MESSAGE_CHARACTERS` characters; a cut text ends with the number of further characters."""
    if len(text) <= MESSAGE_CHARACTERS:
        return text
    start = MESSAGE_CHARACTERS - 60  # room for the end
    return f"{text[:start]} ... and {len(text) - start:,} more characters"


def first_few(items: Iterable[str], count: int = _ITEMS) -> list[str]:
    """The first `count` items, and "... and 7 more" in place of 7 others.  A single other item is kept."""
    rest = iter(items)
    few = list(islice(rest, count + 1))
    others = sum(1 for _ in rest)
    return [*few[:count], f"... and {others + 1:,} more"] if others else few


class SftError(Exception):
    """Base of the errors that end a command with one paragraph instead of a traceback.

    The message has at most 4,000 characters and no control characters, so that it can be shown or quoted as it is.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(capped(printable(message)))


class ConfigError(SftError):
    """A recipe, an override, an option or a layout cannot be used."""


class DataError(SftError):
    """A data file, row, template or tokenizer cannot be used.  The message names file and line of a row."""


class CheckpointError(SftError):
    """A checkpoint is missing, damaged, of another model, or does not fit the recipe."""


class StorageError(SftError):
    """A disk is full, or a file system fails.  Another start may succeed."""


class PeerError(SftError):
    """A rank does not answer, because it ended or never started.  Another start may succeed."""


class TrainingError(SftError):
    """A loss or gradient is not finite in too many steps in a row, or a held-out loss is not finite."""


MAY_SUCCEED = (StorageError, PeerError)  # errors after which the same command may succeed
