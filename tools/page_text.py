"""Replaces the text between two marks of a generated page, and folds long lines."""

import textwrap


def replaced(text: str, begin: str, end: str, new: str) -> str:
    """The text of a page, with `new` between the marks `begin` and `end`."""
    before, begin_mark, rest = text.partition(begin)
    _, end_mark, after = rest.partition(end)
    assert begin_mark and end_mark, f"the page lacks the marks {begin!r} and {end!r}"
    return f"{before}{begin}{new}{end}{after}"


def folded(text: str) -> list[str]:
    """The text as lines of at most 118 columns.  In a list item, all lines except the first are indented."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.wrap(text, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
