"""The table of deliberate faults: one YAML file a room, one entry a fault.

    - fault: a rank holds its first chunk twice          what is wrong, in the words of somebody who sees it
      file: sft/parallel/context_parallel.py
      line: 2 * cp_size - 1 - cp_rank                    a text that stands once in the file
      becomes: cp_rank
      tests: tests/unit/test_context_parallel.py         which tests must fail: arguments of pytest, separated by spaces

`line` may be a part of a line or several lines.  A fault is one change that a tired engineer could make.
"""

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

    def apply(self, repository: Path) -> str:
        """The text of the file with the fault.  Raises ValueError where the line is not there exactly once."""
        text = (repository / self.file).read_text()
        count = text.count(self.line)
        if count != 1:
            raise ValueError(f"{self.name}: {self.file} has {count} times {self.line!r}, and must have it once.")
        return text.replace(self.line, self.becomes)


def read_table(folder: Path = FOLDER) -> list[Fault]:
    """Every fault, by room in alphabetical order."""
    return [
        Fault(room=path.stem, **entry)
        for path in sorted(folder.glob("*.yaml"))
        for entry in yaml.safe_load(path.read_text())
    ]
