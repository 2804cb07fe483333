"""The errors a user can cause.  Every other error is a bug of ours and keeps its traceback.

The command line turns each of these into one paragraph on rank 0 and exit code 2.  A message says what,
what was got, why it cannot be, and what would work.
"""


class SftError(Exception):
    """Base of the errors that end a run with one paragraph instead of a traceback."""


class ConfigError(SftError):
    """A recipe, an override or a layout that is impossible."""


class DataError(SftError):
    """A data file, row, template or tokenizer that cannot be used; names file and line."""


class CheckpointError(SftError):
    """A checkpoint that is missing, incomplete, or of another model."""


class StorageError(SftError):
    """A disk that is full or a file system that fails while a run writes to it.  Another start may succeed."""


class TrainingError(SftError):
    """Steps whose loss or gradient stays non-finite; names the step and the samples."""
