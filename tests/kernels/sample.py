"""Chooses the configurations that a change compiles: a few of each kind that it touches, as long as there is time.

Another commit gets other configurations, so that a row of commits compiles them all.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import NamedTuple, TypeVar

from tests.kernels.changed import FFPA, FLASH4, LINEAR, LOSS, REFUSED

BUDGET_S = 100.0  # of all compilations; with the start of Python and the list of kernels, a change has two minutes
EACH = 4  # compilations of one kind
# Time of one compilation with --quick on one core of a server of 2.6 GHz, with imports; the order of kinds.
SECONDS: Mapping[str, float] = {LOSS: 8, REFUSED: 10, FLASH4: 15, FFPA: 18, LINEAR: 40}
Made = TypeVar("Made")


class Item(NamedTuple):
    """One compilation: the arguments of compile_one.py, and what they mean."""

    kind: str
    number: int
    architecture: str
    text: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kind, self.text, self.architecture

    @property
    def line(self) -> str:
        return f"{self.architecture}  {self.kind}  {self.text}"


def chosen(items: Iterable[Item], kinds: Collection[str], commit: str) -> list[Item]:
    """EACH items of each kind: the first ones of all kinds, then the second ones; each time the fastest comes first."""
    order = sorted(items, key=lambda item: sha256(f"{commit} {item.line}".encode()).digest())
    turns = [
        (turn, SECONDS[kind], item)
        for kind in kinds
        for turn, item in enumerate([item for item in order if item.kind == kind][:EACH])
    ]
    return [item for _, _, item in sorted(turns, key=lambda entry: entry[:2])]


def in_time(
    items: Iterable[Item],
    make: Callable[[Item, float], Made],
    jobs: int,
    seconds: float = BUDGET_S,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[Item, Made | None]]:
    """Calls `make` with each item and the seconds that are left.  None: too few were left to begin."""
    end = clock() + seconds

    def made(item: Item) -> Made | None:
        left = end - clock()
        return make(item, left) if left >= SECONDS[item.kind] else None

    items = list(items)
    with ThreadPoolExecutor(jobs) as pool:
        yield from zip(items, pool.map(made, items), strict=True)
