"""The result of a probe: details for the user, one verdict, and the same facts as JSON."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft.console import Console
from sft.errors import ConfigError
from sft.files.atomic_files import replace_text


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """The result of a probe, equal on all ranks.

    problems  the problems that the probe found; empty: the probe passed
    checked   what was checked, for the verdict of a probe that passed
    lines     details for the user
    facts     details for --json
    """

    probe: str
    problems: list[str]
    checked: str
    lines: list[str]
    facts: dict[str, Any]

    @property
    def verdict(self) -> str:
        """One line: "leak: PASS: what was checked", or "leak: FAIL: the first problem (and 2 more)"."""
        if not self.problems:
            return f"{self.probe}: PASS: {self.checked}"
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        return f"{self.probe}: FAIL: {self.problems[0]}{more}"


def check_path(path: Path | None) -> None:
    """Raise ConfigError if --json cannot be written.  Called before the work, which may take minutes."""
    if path is not None and _is_rank0() and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise ConfigError(f"--json {path} cannot be written.  Give a file in an existing folder that is writable.")


def publish(report: ProbeReport, path: Path | None) -> int:
    """On rank 0, print the report, with the verdict last, and write `path`.  Returns the exit code: 1 after FAIL."""
    if _is_rank0():
        Console(0, sys.stdout).say("\n".join([*report.lines, *(f"  {p}" for p in report.problems), report.verdict]))
        if path is not None:
            result = {"probe": report.probe, "passed": not report.problems, "verdict": report.verdict}
            content = {**result, "problems": report.problems, **report.facts}
            replace_text(path, json.dumps(content, indent=1) + "\n")
    return 1 if report.problems else 0


def _is_rank0() -> bool:
    return os.environ.get("RANK", "0") == "0"
