"""Defines the base class of all groups of keys, types and marks of keys, and the error for conflicting values."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, model_validator

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Path = Annotated[str, StringConstraints(min_length=1)]
Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]

# Marks a key or group that does not affect training.  A resumed run does not report changes of marked keys.
#     timeout_s: Positive = Field(1800, json_schema_extra=UNREPORTED)
UNREPORTED: dict[str, JsonValue] = {"unreported": True}


_LISTED = 50  # problems in one message


class Conflict(ValueError):
    """The error for values that exclude each other.  `sft.recipe` adds file and line.

    problems: (key, reason) of each problem; the key is relative to the group
    """

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        self.problems = problems
        super().__init__("; ".join(f"{field}: {reason}" for field, reason in problems))


class Section(BaseModel):
    """A frozen, strict group of keys: unknown keys, wrong types, infinities and NaN are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @property
    def changed(self) -> list[str]:
        """The keys whose values are not their defaults."""
        return [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yields (key, reason) of each value that conflicts with other values of the group."""
        yield from ()

    @model_validator(mode="after")
    def _has_no_conflicts(self) -> Self:
        if problems := tuple(self.conflicts()):
            raise Conflict(problems)
        return self


def divisors(number: int, limit: int = 4096) -> list[int]:
    """The divisors of `number` up to `limit`: 12 -> [1, 2, 3, 4, 6, 12]."""
    return [size for size in range(1, min(number, limit) + 1) if number % size == 0]


def listed(problems: Sequence[str]) -> str:
    """One message for all problems: a numbered list of the first 50 if there are several."""
    if len(problems) == 1:
        return problems[0]
    lines = [f"{i} of {len(problems)}: {problem}" for i, problem in enumerate(problems[:_LISTED], 1)]
    more = [f"... and {len(problems) - _LISTED:,} more"] if len(problems) > _LISTED else []
    return "\n  ".join([*lines, *more])
