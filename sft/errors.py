"""The errors that a user can cause.  Every other error is a bug of ours and keeps its traceback.

For each of these errors the command line prints one paragraph on rank 0; the exit code is 2, or 1 for a StorageError.
A message names the setting or file, its value, why that cannot work, and what would work.
"""


class SftError(Exception):
    """Base of the errors that end a run with one paragraph instead of a traceback."""


class ConfigError(SftError):
    """A recipe, an override or a layout that is impossible."""


class DataError(SftError):
    """A data file, row, template or tokenizer that cannot be used.  The message names file and line."""


class CheckpointError(SftError):
    """A checkpoint that is missing, incomplete, or of another model."""


class StorageError(SftError):
    """A disk that is full or a file system that fails while a run writes to it.  Another start may succeed."""


class TrainingError(SftError):
    """Steps whose loss or gradient stays non-finite.  The message names the step and the samples."""
