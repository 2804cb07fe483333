"""Prints the lines of a run and the progress of long work, on rank 0 only.

Progress is a bar at the bottom of a terminal, and elsewhere a plain line every few seconds.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Protocol, TextIO

from tqdm import tqdm

from sft.errors import capped, printable

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_MEASURES = 0.5  # in `Console.watch`

# The thread of `Console.watch` holds this lock while it draws, so that no library forks a process at that moment.  A
# child that is forked then would inherit a locked stdout, and hang when it flushes stdout before it exits.
_drawing = threading.Lock()
os.register_at_fork(before=_drawing.acquire, after_in_parent=_drawing.release, after_in_child=_drawing.release)


class Progress(Protocol):
    """The object that `Console.track` returns.  The tracked work calls `advance`."""

    def advance(self, amount: int, note: str = "") -> None:
        """Report that `amount` more units are done; `note` is shown next to the number of units."""


class Console:
    """Prints all lines of a run.  Rank 0 prints; the other ranks print nothing.

    is_quiet  print only warnings and results
    """

    def __init__(
        self,
        rank: int,
        stream: TextIO = sys.stdout,
        *,
        is_quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prints, self._stream, self._clock = rank == 0, stream, clock
        self._is_quiet = is_quiet
        self._has_bars = self._prints and not is_quiet and _shows_bars(stream)

    def say(self, text: str) -> None:
        """Print one or more lines above any progress bar, and flush the stream.  A quiet console prints only warnings.

        A line is cut after 4,000 characters, and control characters are escaped.
        """
        if not self._is_quiet or text.startswith("WARNING"):
            self.result(text)

    def result(self, text: str) -> None:
        """Print lines as `say`, also on a quiet console."""
        if self._prints:
            text = "\n".join(map(capped, printable(text).split("\n")))
            try:
                with tqdm.external_write_mode(file=self._stream) if self._has_bars else nullcontext():
                    print(text, file=self._stream, flush=True)
            except BrokenPipeError:  # the reader of the pipe, for instance `tee`, has ended: the run goes on
                self._prints = False
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())  # discards the rest of the buffer
            except OSError:  # the log is on a full disk: the line is lost, and the run goes on
                pass

    @contextmanager
    def track(
        self, title: str, total: int | None, unit: str, lines: bool = True, *, start: int = 0
    ) -> Iterator[Progress]:
        """A context that shows a progress bar.  The caller advances the bar with the `Progress` that it yields.

        total  number of units, None if unknown
        start  number of units that are already done

            with console.track("tokenising chat.jsonl", 80_000, "rows") as progress:
                progress.advance(64)

        tokenising chat.jsonl: 12,000 of 80,000 rows (15%), 1,200 rows/s, left 0:00:57

        The unit "bytes" is shown as KiB, MiB, ...  If `lines` is False, nothing is printed on a stream that is no
        terminal.
        """
        title = printable(title)
        if self._has_bars:
            is_bytes = unit == "bytes"
            with tqdm(
                desc=title,
                total=total,
                initial=start,
                unit="iB" if is_bytes else f" {unit}",
                unit_scale=is_bytes,
                unit_divisor=1024,
                file=self._stream,
                leave=False,
                dynamic_ncols=True,
                miniters=0,  # every call of `advance` may redraw the bar, at most ten times a second
            ) as bar:
                yield _Bar(bar)
        else:
            yield _Lines(self if lines else QUIET, self._clock, title, total, unit, start)

    @contextmanager
    def watch(self, title: str, total: int | None, unit: str, measure: Callable[[], int]) -> Iterator[None]:
        """A context manager that shows the progress of work that does not report it.

        A thread calls `measure` twice a second.  measure: returns the number of units that are done so far

        with console.watch("saving step 200", 361_758_720, "bytes", lambda: bytes_in(folder)):
            save(folder)
        """
        if not self._prints:
            yield
            return
        with self.track(title, total, unit) as progress:
            is_over = threading.Event()
            thread = threading.Thread(target=_measure_progress, args=(progress, measure, is_over), daemon=True)
            thread.start()
            try:
                yield
            finally:
                is_over.set()
                thread.join()


class _Bar:
    def __init__(self, bar: tqdm) -> None:
        self._bar = bar

    def advance(self, amount: int, note: str = "") -> None:
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(amount)


class _Lines:
    """Prints a line every few seconds.  Work that ends earlier gets no line."""

    def __init__(
        self, console: Console, clock: Callable[[], float], title: str, total: int | None, unit: str, start: int
    ) -> None:
        self._console, self._clock = console, clock
        self._title, self._total, self._unit = title, total, unit
        self._start = self._done = start
        self._began = self._printed = clock()

    def advance(self, amount: int, note: str = "") -> None:
        self._done += amount
        now = self._clock()
        if now - self._printed >= SECONDS_BETWEEN_LINES:
            self._printed = now
            self._console.say(self._line(now - self._began, note))

    def _line(self, seconds: float, note: str) -> str:
        units, total, rate = self._done, self._total, (self._done - self._start) / seconds
        parts = [_amount(units, self._unit), *([note] if note else []), f"{_amount(rate, self._unit)}/s"]
        if total is not None and units <= total:  # otherwise the total was a wrong estimate
            number = size(units) if self._unit == "bytes" else f"{units:,}"
            parts[0] = f"{number} of {_amount(total, self._unit)} ({100 * units // total}%)"
            parts += [f"left {duration((total - units) / rate)}"] if rate else []
        return f"{self._title}: {', '.join(parts)}"


def _shows_bars(stream: TextIO) -> bool:
    """Whether `stream` is a terminal with a width above 0.  In some containers, the log is a terminal of width 0."""
    if not stream.isatty():
        return False
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:
        return True


def _measure_progress(progress: Progress, measure: Callable[[], int], is_over: threading.Event) -> None:
    shown = 0
    while not is_over.wait(SECONDS_BETWEEN_MEASURES):
        with _drawing:
            try:
                units = max(shown, measure())
            except OSError:  # files may vanish while `measure` reads their sizes
                units = shown
            progress.advance(units - shown)  # also by 0, because the shown rate changes with time
            shown = units


def grouped(name: str, lines: Sequence[str]) -> str:
    """Lines with the name of their group before the first one.  The others are indented: `data    25 packs\n    ...`"""
    return "\n".join(f"{label:7} {line}" for label, line in zip([name, *[""] * len(lines)], lines, strict=False))


def duration(seconds: float) -> str:
    """A time in seconds as hours, minutes and seconds, rounded up: 3725 -> 1:02:05"""
    whole = int(math.ceil(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def short_count(number: int) -> str:
    """A number in units of 2^20 (M) or 2^10 (K) if it is a multiple: 4096 -> 4K, 1048576 -> 1M, 40000 -> 40000"""
    for unit, factor in (("M", 1 << 20), ("K", 1 << 10)):
        if number and number % factor == 0:
            return f"{number // factor}{unit}"
    return str(number)


def size(num_bytes: float) -> str:
    """A number of bytes in a unit of its size: 12 -> 12 B, 1536 -> 1.5 KiB, 361758720 -> 345 MiB"""
    exponent = max(0, min(4, (int(num_bytes).bit_length() - 1) // 10))
    number = num_bytes / 1024**exponent
    return f"{number:.{int(exponent > 0 and number < 10)}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[exponent]}"


def _amount(number: float, unit: str) -> str:
    """A number with its unit: 1200.0, "rows" -> 1,200 rows        0.4, "rows" -> 0.4 rows        1536, "bytes" -> 1.5
    KiB"""
    if unit == "bytes":
        return size(number)
    return f"{number:,.{int(0 < number < 10 and number % 1 > 0)}f} {unit}"


QUIET = Console(rank=1)  # prints nothing
