"""Runs all checks of this folder on the files that git tracks."""

import argparse
import subprocess
import sys
from pathlib import Path

from tools.lint import limits, references, words
from tools.lint.source import Fault, Source

EXEMPT = ("CHANGELOG.md", "tools/lint/words.py", "tests/unit/repository/test_lint_house.py")  # contain retired words


def sources(root: Path) -> list[Source]:
    """All Python and Markdown files that git does not ignore, including files that are not committed yet."""
    listing = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.md"]
    names = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split()
    return [Source.read(root, name) for name in sorted(set(names)) if (root / name).exists()]


def check(root: Path, files: list[Source]) -> list[Fault]:
    """All faults, sorted by file and line."""
    checked = [file for file in files if file.path not in EXEMPT]
    faults = [*words.check(checked), *limits.check(checked), *references.check(root, checked, files)]
    return sorted(faults, key=lambda fault: (fault.path, fault.line, fault.text))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.lint", description=__doc__)
    parser.add_argument("paths", nargs="*", help="show only faults of files whose path starts with one of these")
    options = parser.parse_args()
    root = Path(__file__).parents[2]
    faults = check(root, sources(root))
    if options.paths:
        faults = [fault for fault in faults if fault.path.startswith(tuple(options.paths))]
    print("\n".join(map(str, faults)))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
