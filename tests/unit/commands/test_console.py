"""The visible output: bars on a terminal, lines elsewhere, nothing from other ranks.  No test waits for the clock."""

import io
import os
import re
import threading
from pathlib import Path

import pytest

from sft import console
from sft.console import Console

END_OF_TEST = 240.0  # seconds; unless something is broken, no wait takes that long, even on a busy machine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """The lines that are visible at the end: text after a carriage return overwrites the line."""
        lines, row, column = [""], 0, 0
        for part in re.split(r"(\r|\n|\x1b\[A)", self.getvalue()):
            if part == "\r":
                column = 0
            elif part == "\n":
                row, column = row + 1, 0
                lines += [""] * (row == len(lines))
            elif part == "\x1b[A":
                row -= 1
            else:
                lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
                column += len(part)
        return [line.rstrip() for line in lines]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "SECONDS_BETWEEN_MEASURES", 0.001)


def piped(clock: Clock) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(0, stream, clock=clock), stream


# Without a terminal


def test_a_line_every_five_seconds(clock: Clock) -> None:
    said, stream = piped(clock)
    with said.track("tokenising chat.jsonl", 80_000, "rows") as progress:
        for second in range(1, 13):
            clock.now = 100.0 + second
            progress.advance(1200, f"{second},000 tokens" if second > 6 else "")
    assert stream.getvalue().splitlines() == [
        "tokenising chat.jsonl: 6,000 of 80,000 rows (7%), 1,200 rows/s, left 0:01:02",
        "tokenising chat.jsonl: 12,000 of 80,000 rows (15%), 10,000 tokens, 1,200 rows/s, left 0:00:57",
    ]


@pytest.mark.parametrize(
    "total, unit, start, amount, line",
    [
        (None, "rows", 0, 12_000, "12,000 rows, 1,200 rows/s"),
        (11_999, "rows", 0, 12_000, "12,000 rows, 1,200 rows/s"),  # the total was an estimate
        (12_000, "rows", 0, 12_000, "12,000 of 12,000 rows (100%), 1,200 rows/s, left 0:00:00"),
        (100, "rows", 0, 0, "0 of 100 rows (0%), 0 rows/s"),
        (361_758_720, "bytes", 0, 15_728_640, "15 MiB of 345 MiB (4%), 1.5 MiB/s, left 0:03:40"),
        (None, "bytes", 0, 15_728_640, "15 MiB, 1.5 MiB/s"),
        # earlier steps do not count for the speed
        (200, "steps", 100, 50, "150 of 200 steps (75%), 5 steps/s, left 0:00:10"),
    ],
)
def test_what_a_line_says(clock: Clock, total: int | None, unit: str, start: int, amount: int, line: str) -> None:
    """The line after ten seconds."""
    said, stream = piped(clock)
    with said.track("work", total, unit, start=start) as progress:
        clock.now += 10
        progress.advance(amount)
    assert stream.getvalue() == f"work: {line}\n"


@pytest.mark.parametrize("seconds, lines", [(4.9, True), (100.0, False)])
def test_quick_work_and_work_without_lines_are_not_told(clock: Clock, seconds: float, lines: bool) -> None:
    said, stream = piped(clock)
    with said.track("work", 10, "rows", lines=lines) as progress:
        clock.now += seconds
        progress.advance(10)
    assert stream.getvalue() == ""


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_other_ranks_are_quiet(clock: Clock, stream: io.StringIO) -> None:
    said = Console(1, stream, clock=clock)
    asked: list[int] = []
    with said.track("work", 10, "rows") as progress:
        clock.now += 100
        progress.advance(5)
    with said.watch("saving", 10, "bytes", lambda: asked.append(1) or 1):
        said.say("a line")
    assert stream.getvalue() == "" and asked == []


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_a_quiet_console_prints_warnings_and_results(clock: Clock, stream: io.StringIO) -> None:
    said = Console(0, stream, is_quiet=True, clock=clock)
    with said.track("work", 10, "rows") as progress:
        clock.now += 100
        progress.advance(5)
    said.say("step 1/4")
    said.say("WARNING: no room")
    said.result("done")
    assert stream.getvalue().splitlines() == ["WARNING: no room", "done"]


# On a terminal


def test_a_bar_and_whole_lines_above_it() -> None:
    terminal = Terminal()
    said = Console(0, terminal)
    with said.track("training", 40, "steps", lines=False, start=10) as progress:
        said.say("step 11/40")
        progress.advance(10, "note")
        said.say("step 20/40\nsaved")
        *lines, bar = terminal.screen()
    assert lines == ["step 11/40", "step 20/40", "saved"]
    assert re.fullmatch(r"training:  50%\|[█#5 ]+\| 20/40 \[00:0\d<.*steps.*, note\]", bar)
    assert terminal.screen() == ["step 11/40", "step 20/40", "saved", ""]  # the bar is gone at the end


def test_a_bar_in_bytes_below_another() -> None:
    terminal = Terminal()
    said = Console(0, terminal)
    with said.track("training", 40, "steps"), said.track("saving", 3 << 20, "bytes") as progress:
        progress.advance(1 << 20)
        said.say("a line")
        line, training, saving = terminal.screen()
    assert line == "a line" and training.startswith("training:   0%|")
    assert re.match(r"saving:  33%\|.*\| 1\.00M/3\.00M \[00:0\d<.*iB/s\]", saving)
    assert [line for line in terminal.screen() if line] == ["a line"]


def test_the_bar_goes_when_the_work_fails() -> None:
    terminal = Terminal()
    with pytest.raises(ZeroDivisionError), Console(0, terminal).track("work", 10, "rows"):
        raise ZeroDivisionError
    assert "work:   0%|" in terminal.getvalue() and terminal.screen() == [""]


def test_a_terminal_without_width_gets_lines(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    terminal = Terminal()
    terminal.fileno = lambda: 7  # type: ignore[method-assign]
    monkeypatch.setattr(os, "get_terminal_size", lambda number: os.terminal_size((0, 0)))
    with Console(0, terminal, clock=clock).track("work", 10, "rows") as progress:
        clock.now += 10
        progress.advance(10)
    assert terminal.getvalue() == "work: 10 of 10 rows (100%), 1 rows/s, left 0:00:00\n"


# Work that does not report its progress


class Measure:
    """Returns these numbers one after the other (raises those that are errors), then repeats the last one."""

    def __init__(self, clock: Clock, *answers: int | OSError) -> None:
        self.answers, self.clock, self.num_asked = answers, clock, 0
        self.is_through = threading.Event()

    def __call__(self) -> int:
        answer = self.answers[min(self.num_asked, len(self.answers) - 1)]
        self.num_asked += 1
        if self.num_asked <= len(self.answers):
            self.clock.now += 5
        else:  # the previous value is on the screen
            self.is_through.set()
        if isinstance(answer, OSError):
            raise answer
        return answer


def test_watched_work(clock: Clock) -> None:
    """A folder that does not exist yet, grows, and whose files are then moved away."""
    said, stream = piped(clock)
    measure = Measure(clock, OSError("not there"), 1 << 20, 3 << 20, 0, OSError("gone"))
    with said.watch("saving", 4 << 20, "bytes", measure):
        assert measure.is_through.wait(END_OF_TEST)
    assert stream.getvalue().splitlines() == [
        "saving: 0 B of 4.0 MiB (0%), 0 B/s",
        "saving: 1.0 MiB of 4.0 MiB (25%), 102 KiB/s, left 0:00:30",
        "saving: 3.0 MiB of 4.0 MiB (75%), 205 KiB/s, left 0:00:05",
        "saving: 3.0 MiB of 4.0 MiB (75%), 154 KiB/s, left 0:00:07",
        "saving: 3.0 MiB of 4.0 MiB (75%), 123 KiB/s, left 0:00:09",
    ]


@pytest.mark.parametrize("answer", [1, OSError("no such folder")])
def test_an_error_of_watched_work_passes_and_the_thread_ends(clock: Clock, answer: int | OSError) -> None:
    said, _ = piped(clock)
    measure = Measure(clock, answer)
    with pytest.raises(ZeroDivisionError), said.watch("saving", None, "bytes", measure):
        assert measure.is_through.wait(END_OF_TEST)
        raise ZeroDivisionError
    assert not [thread for thread in threading.enumerate() if "_look" in thread.name]


def test_no_process_is_forked_while_the_thread_draws(clock: Clock) -> None:
    """A child process would inherit a locked stdout."""
    said, _ = piped(clock)
    is_drawing, may_end, has_drawn = threading.Event(), threading.Event(), threading.Event()

    def measure() -> int:
        if not is_drawing.is_set():
            is_drawing.set()
            may_end.wait(END_OF_TEST)
            has_drawn.set()
        return 0

    with said.watch("saving", None, "bytes", measure):
        assert is_drawing.wait(END_OF_TEST)
        threading.Timer(0.05, may_end.set).start()
        child = os.fork()
        if child == 0:
            os._exit(0 if has_drawn.is_set() else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_line_that_cannot_be_printed_is_lost_and_the_run_is_not(tmp_path: Path) -> None:
    """A log on a full disk gets later lines once there is room; a closed pipe gets no more lines."""

    class Full(io.StringIO):
        error: OSError | None = OSError(28, "No space left on device")

        def write(self, text: str) -> int:
            if self.error:
                raise self.error
            return super().write(text)

    stream = Full()
    said = Console(0, stream)
    said.say("lost")
    stream.error = None
    said.say("kept")
    assert stream.getvalue() == "kept\n"
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        said = Console(0, gone)
        said.say("lost")
        said.say("lost, too")
