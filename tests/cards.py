"""Notes in the results of tests which family of models a test is about, and what it measured.

`@pytest.mark.card("gradients")` says which line of a family's card a test fills.  The family is in the parameters of
the test.  `make cards` writes the cards from the results (tools/cards.py).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from sft.hf.families import FAMILIES
from tests.ranks.hf_cases import CASES

Measured = Callable[[float, float], None]
_NAMES = ("name", "family", "case")  # parameters of tests; `name` is that of a case of tests/ranks/hf_cases.py


def note(item: pytest.Item) -> None:
    """Adds to a marked test's results the card's line, the entry of the table of families, and the layout."""
    mark = item.get_closest_marker("card")
    if mark is not None:
        params: Mapping[str, Any] = item.callspec.params  # type: ignore[attr-defined]
        parameter = next(name for name in _NAMES if name in params)
        case = params[parameter]
        item.user_properties += [
            ("card", mark.args[0]),
            ("family", family_of(CASES[case].model["family"] if parameter == "name" else case)),
            ("layout", _layout(params.get("layout") or params.get("overrides") or [])),
        ]


def not_needed(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests that fill no card, and those of full grids whose line of the card another test fills."""
    filled = {line for item in items if (line := _line(item)) and not item.get_closest_marker("grid")}
    left_out = []
    for item in items:
        line, is_grid = _line(item), item.get_closest_marker("grid") is not None
        if line is None or (is_grid and line in filled):
            left_out.append(item)
        elif is_grid:
            filled.add(line)
    return left_out


def _line(item: pytest.Item) -> tuple[str, str] | None:
    """The family and the line that a test fills."""
    noted = dict(item.user_properties)
    return (str(noted["family"]), str(noted["card"])) if "card" in noted else None


def family_of(case: Any) -> str:
    """The entry of the table of families: "olmo3 windows" -> "olmo3"""
    name = str(case["family"] if isinstance(case, dict) else case).partition(" ")[0]
    name = {"moonlight": "deepseek_v3", "mistral3": "mistral3/mistral"}.get(name, name)
    assert name in FAMILIES, f"{case!r} names no entry of the table of families"
    return name


def _layout(given: Any) -> str:
    return given if isinstance(given, str) else " ".join(word.removeprefix("parallel.") for word in given)


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Measured:
    """`measured(worst, bar)` notes the largest difference that a test found, and the largest that it accepts."""

    def record(worst: float, bar: float) -> None:
        record_property("worst", f"{worst:.3g}")
        record_property("bar", f"{bar:.3g}")

    return record
