"""Keeps blocks of a page equal to what code prints.  A block follows the line `<!-- printed: NAME -->`.

python -m TOOL            print every part
python -m TOOL --write    write the parts into the page
python -m TOOL --check    exit status 1 if the page shows anything else
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
_PRINTED = re.compile(r"<!-- printed: (\w+) -->\n```text\n.*?```", re.DOTALL)


@dataclass(frozen=True)
class PrintedPage:
    """A page with printed blocks.

    tool     the module that prints them
    printed  computes the text of each block, by name
    """

    path: Path
    tool: str
    printed: Callable[[], Mapping[str, str]]

    def shown(self, text: str, parts: Mapping[str, str]) -> str:
        """The text of the page with these parts.

        Raises KeyError if it has a block for an unknown part, and ValueError if it lacks a block for a part.
        """
        if missing := parts.keys() - set(_PRINTED.findall(text)):
            raise ValueError(f"{self.path} shows no block for {', '.join(sorted(missing))}")
        return _PRINTED.sub(lambda match: f"<!-- printed: {match[1]} -->\n```text\n{parts[match[1]]}\n```", text)

    def main(self, argv: Sequence[str] | None = None) -> int:
        parser = argparse.ArgumentParser(prog=f"python -m {self.tool}")
        parser.add_argument("--write", action="store_true", help="write the parts into the page")
        parser.add_argument("--check", action="store_true", help="exit status 1 if the page shows other parts")
        arguments, parts = parser.parse_args(argv), self.printed()
        if not arguments.write and not arguments.check:
            print("\n\n".join(f"== {name}\n{text}" for name, text in parts.items()))
            return 0
        before = self.path.read_text(encoding="utf-8")
        after = self.shown(before, parts)
        if arguments.write:
            self.path.write_text(after, encoding="utf-8")
        elif after != before:
            print(f"{self.path.name} is out of date; run: python -m {self.tool} --write", file=sys.stderr)
        return int(arguments.check and after != before)
