"""The base class of all groups of keys, their types and marks, and the error for conflicting values."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, model_validator

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Path = Annotated[str, StringConstraints(min_length=1)]
Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]

# Marks a field, or a group, that changes no number of a run: a resumed run does not report that it changed.
#     timeout_s: Positive = Field(1800, json_schema_extra=UNREPORTED)
UNREPORTED: dict[str, JsonValue] = {"unreported": True}


class Conflict(ValueError):
    """Values that exclude each other, one (field, reason) per problem.  `sft.recipe` adds file and line."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        self.problems = problems
        super().__init__("; ".join(f"{field}: {reason}" for field, reason in problems))


class Section(BaseModel):
    """A frozen, strict group of keys: unknown keys, wrong types, infinities and NaN are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """(field, reason) of each value that conflicts with other values."""
        yield from ()

    @model_validator(mode="after")
    def _has_no_conflicts(self) -> Self:
        if problems := tuple(self.conflicts()):
            raise Conflict(problems)
        return self


def divisors(number: int, limit: int = 4096) -> list[int]:
    """divisors(12) -> [1, 2, 3, 4, 6, 12]; none above `limit`, which no parallel size reaches."""
    return [size for size in range(1, min(number, limit) + 1) if number % size == 0]


def listed(problems: Sequence[str]) -> str:
    """One message for all problems: a single problem as it is, several as a numbered list."""
    if len(problems) == 1:
        return problems[0]
    return "\n  ".join(f"{i} of {len(problems)}: {problem}" for i, problem in enumerate(problems, 1))
