"""Keys of a teacher's distributions, which rows or files of `sft score` give."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from sft.config.section import Path, Positive, Section


class TeacherConfig(Section):
    k: Positive | None = None
    """Number of the teacher's most likely tokens that are stored for each supervised token; null: no teacher is
    read."""
    files: Annotated[list[Path], Field(min_length=1)] | None = None
    """Files of `sft score`, whose records belong to the samples with the same tokens (docs/how-to/score.md).  null: the
    rows have the key teacher."""
    label: bool = False
    """Also store the log-probability of the label, if it is not among the k most likely tokens."""
    logprob_dtype: Literal["fp32", "fp16"] = "fp32"
    """Stored log-probabilities.  fp16 takes 6 bytes in place of 8 for each token, and rounds down by at most 0.1%, so
    that no sum of probabilities grows above 1."""
    missing: Literal["error", "labels"] = "error"
    """If a row has no teacher: error, or learn the row from its labels only."""

    @property
    def width(self) -> int:
        """The number of stored tokens for each supervised token; 0: no teacher is read."""
        return 0 if self.k is None else self.k + self.label

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.k is None and self.changed:
            yield "k", f"is missing, but {self.changed[0]} is given; give the number of tokens, such as 64"
