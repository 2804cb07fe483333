"""How commands print their results (on stdout) and their progress (on stderr)."""

import sys
from collections.abc import Sequence

from sft.console import Console


def print_group(name: str, lines: Sequence[str]) -> None:
    for label, line in zip([name, *[""] * len(lines)], lines, strict=False):
        print(f"{label:7} {line}", flush=True)


def progress() -> Console:
    """A console on stderr for progress: stdout is for results."""
    return Console(0, sys.stderr)
