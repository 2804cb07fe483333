"""Errors that a user or a disk can cause.  Every other error is a bug in this code and keeps its traceback.

For each SftError, rank 0 prints one paragraph.  The exit code is 2, or 1 for a StorageError.  A message names the
setting or file and its value, says why the value does not work, and which value would work.
"""


class SftError(Exception):
    """Base of the errors that end a run with one paragraph instead of a traceback."""


class ConfigError(SftError):
    """A recipe, an override or a layout that cannot be used."""


class DataError(SftError):
    """A data file, row, template or tokenizer that cannot be used.  The message names file and line."""


class CheckpointError(SftError):
    """A checkpoint that is missing, incomplete, or of another model."""


class StorageError(SftError):
    """A disk that is full or a file system that fails while a run writes to it.  Another start may succeed."""


class TrainingError(SftError):
    """A loss or gradient that is not finite, in too many steps in a row or on a held-out set."""
