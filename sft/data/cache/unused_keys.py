"""Counts the keys of rows that no part of the program reads.  The memory needed does not grow with the file.

Decides how many keys are counted and listed.  `rows/formats.py` decides which keys are read.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from sft.data.rows.messages import to_json

NAMES_LISTED = 100
_NAMES_COUNTED = 10_000  # a file whose keys are data, such as {"user 17": ...}, has as many names as rows


class KeyCounter:
    """Counts rows by the names of their keys.

    The first 10,000 names in the order of the file are counted separately, and all other names together.  So the counts
    do not depend on how rows were distributed among processes.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._others = 0

    def add(self, counts: Iterable[tuple[str, int]]) -> None:
        """Adds the counts of the next rows of the file."""
        for name, count in counts:
            if name in self._counts or len(self._counts) < _NAMES_COUNTED:
                self._counts[name] += count
            else:
                self._others += count

    @property
    def listed(self) -> tuple[tuple[str, int], ...]:
        """The 100 most frequent names with their numbers of rows; equally frequent names by alphabet."""
        return tuple(sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))[:NAMES_LISTED])

    @property
    def others(self) -> int:
        """The sum of the numbers of rows of all names that are not listed."""
        return self._others + self._counts.total() - sum(count for _, count in self.listed)


def describe_unused(listed: Sequence[tuple[str, int]], others: int) -> str:
    """A phrase such as "keys not used: id (500 rows), source (1 row), and other keys 7 times".

    Names with unprintable characters are quoted, with escapes.
    """
    names = _names(listed)
    return f"keys not used: {', '.join([*names, *([f'and other keys {others:,} times'] if others else [])])}"


def describe_spelled(spelled: Sequence[tuple[str, int]]) -> str:
    """A phrase such as "control tokens that stayed text: <|im_end|> in user texts (3 rows)"."""
    more = f" and {len(spelled) - 10:,} more" if len(spelled) > 10 else ""
    return f"control tokens that stayed text: {', '.join(_names(spelled[:10]))}{more}"


def _names(listed: Sequence[tuple[str, int]]) -> list[str]:
    return [
        f"{name if name.isprintable() else to_json(name)} ({count:,} {'row' if count == 1 else 'rows'})"
        for name, count in listed
    ]
