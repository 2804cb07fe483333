"""Prints the results of commands on stdout and their progress on stderr, and writes their pictures."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from sft.console import Console, grouped
from sft.errors import ConfigError, printable
from sft.files.atomic_files import replacing, unusable


def show(text: str) -> None:
    """Print a result.  It may contain text of files, so control characters of a terminal are escaped."""
    print(printable(text), flush=True)


def print_group(name: str, lines: Sequence[str]) -> None:
    """Print lines of a result, as `grouped`; nothing if there are none."""
    if lines:
        show(grouped(name, lines))


def show_next(*commands: str) -> None:
    """Print, on rank 0, commands that a user may want next."""
    if os.environ.get("RANK", "0") == "0":
        print_group("next", [" or ".join(commands)])


def progress(*, is_quiet: bool = False) -> Console:
    """A console that prints progress on stderr, because stdout is for results.  is_quiet: only warnings"""
    return Console(0, sys.stderr, is_quiet=is_quiet)


@contextmanager
def picture_file(option: str, file: Path) -> Iterator[Path]:
    """A context with a temporary file for a picture, which becomes `file`, the value of `option`, at the end.

    Raises StorageError if another try may succeed, as after a full disk, and ConfigError if the file cannot be made.
    """
    try:
        with replacing(file) as temporary:
            yield temporary
    except OSError as error:
        plain = OSError(error.errno, error.strerror or str(error))  # without the name of the temporary file
        raise unusable(f"{option} {file} cannot be written", file.parent, plain) from error


def need_matplotlib(user: str) -> None:
    """Raise ConfigError if matplotlib is not installed.  user: the command or option that draws with it"""
    if find_spec("matplotlib") is None:
        raise ConfigError(f"{user} needs matplotlib, which is not installed: pip install matplotlib")
