"""Reads the table of deliberate faults: one YAML file per package, one entry per fault.

    - fault: a rank holds its first chunk twice          the wrong behaviour, in words
      file: sft/parallel/context_parallel.py
      line: 2 * cp_size - 1 - cp_rank                    a text that the file contains exactly once
      becomes: cp_rank
      tests: tests/unit/parallel/test_context_parallel.py    tests that must fail: arguments of pytest

`line` may be a part of a line or several lines.  A fault is a single change that an engineer could make by mistake.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent / "faults"
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Fault:
    room: str
    fault: str
    file: str
    line: str
    becomes: str
    tests: str

    @property
    def name(self) -> str:
        return f"{self.room}: {self.fault}"

    @property
    def is_slow(self) -> bool:
        """Whether its tests start ranks or runs, which takes up to a minute; other tests take seconds."""
        return any(not test.startswith("tests/unit/") for test in self.tests.split())

    def apply(self, repository: Path) -> str:
        """The text of the file with the fault.  Raises ValueError if the file does not contain `line` exactly once."""
        text = (repository / self.file).read_text()
        count = text.count(self.line)
        if count != 1:
            raise ValueError(f"{self.name}: {self.file} must contain {self.line!r} once; it contains it {count} times.")
        return text.replace(self.line, self.becomes)


def read_table(folder: Path = FOLDER) -> list[Fault]:
    """All faults; the files of the table are in alphabetical order."""
    return [
        Fault(room=path.stem, **entry)
        for path in sorted(folder.glob("*.yaml"))
        for entry in yaml.safe_load(path.read_text())
    ]


def sample(faults: Sequence[Fault], count: int, seed: str) -> list[Fault]:
    """`count` of the faults.  One in ten is slow, so that the sample of every seed takes a similar time.

    Every quick fault has the same chance to be drawn, and so has every slow one: 10 of 700 quick and
    200 slow faults -> 9 and 1.
    """
    generator = random.Random(seed)
    slow, quick = ([fault for fault in faults if fault.is_slow is is_slow] for is_slow in (True, False))
    num_quick = min(len(quick), count - min(len(slow), math.ceil(count / 10)))
    return generator.sample(quick, num_quick) + generator.sample(slow, min(len(slow), count - num_quick))
