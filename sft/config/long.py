"""Keys of the long-context evaluation."""

from collections.abc import Iterator
from typing import Annotated, Literal, get_args

from pydantic import Field

from sft.config.section import NonNegative, Positive, Section

LongTask = Literal[
    "needle", "needles", "keys", "values", "association", "tracing", "counting", "documents", "code", "records"
]  # fmt: skip


class LongConfig(Section):
    in_run: bool | Literal["auto"] = "auto"
    """Also ask before the first step and at the end of a run.  auto: as far as both together take at most 2% of the
    predicted time of the run, and no more memory than a step (`sft check`)."""
    tasks: Annotated[list[LongTask], Field(min_length=1)] = list(get_args(LongTask))
    """Kinds of questions (docs/how-to/eval.md)."""
    lengths: Annotated[list[Annotated[float, Field(gt=0.0)]], Field(min_length=1)] = [0.25, 0.5, 1.0, 2.0, 4.0]
    """Lengths of questions, as multiples of seq_length.  Lengths beyond the positions of the model are left out."""
    depths: Positive = 5
    """Number of depths of the evidence, evenly spaced from the beginning of the text to its end; 1: the middle."""
    questions: Positive = 4
    """Questions for each task, length and depth."""
    seed: NonNegative = 0
    """Seed of the questions.  Two results can be compared only if their questions are the same."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        for name in ("tasks", "lengths"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                yield name, f"names {max(values, key=values.count)} twice; name it once"
