"""Replaces the generated tables of docs/numbers/performance.md, which stand between two marks."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs/numbers/performance.md"


def replaced(text: str, begin: str, end: str, tables: str) -> str:
    """The text of a page, with `tables` between the marks `begin` and `end`."""
    before, begin_mark, rest = text.partition(begin)
    _, end_mark, after = rest.partition(end)
    assert begin_mark and end_mark, f"the page lacks the marks {begin!r} and {end!r}"
    return f"{before}{begin}\n{tables}\n{end}{after}"


def command(
    description: str | None, tables: Callable[[], str], page: Callable[[str], str], argv: Sequence[str] | None
) -> int:
    """Print the tables, or with --write put them into the page.  Returns the exit code."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/numbers/performance.md")
    if parser.parse_args(argv).write:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(tables(), end="")
    return 0
