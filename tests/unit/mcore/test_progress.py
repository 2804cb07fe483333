"""When the host waits for a GPU between passes, and its reports meanwhile.  The events are replacements."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from sft.mcore.progress import Event, PassProgress


@dataclass
class Fake:
    """A GPU event: its pass begins only when the host waits for it, or (is_done) at once."""

    number: int
    is_done: bool
    log: list[str]

    def record(self) -> None:
        self.log.append(f"record {self.number}")

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.log.append(f"wait {self.number}")

    def elapsed_time(self, end: "Fake", /) -> float:
        return 250.0 * (end.number - self.number)  # ms


def events(log: list[str], *, are_done: bool) -> Callable[[], Event]:
    def new() -> Event:
        return Fake(sum(line.startswith("record") for line in log) + 1, are_done, log)

    return new


def step(passes: PassProgress, log: list[str]) -> list[str]:
    for name in ("forward 1", "backward 1", "forward 2", "backward 2"):
        passes.begin(name)
    passes.finish()
    return log


def test_the_host_is_at_most_two_passes_ahead() -> None:
    """A pass is queued once the pass two before it has begun; while the host waits, it reports the pass that runs on
    the GPU."""
    log: list[str] = []
    expected = [
        "record 1", "forward 1",
        "record 2", "backward 1",
        "wait 1", "record 3", "forward 2",
        "forward 1, on the GPU", "wait 2", "record 4", "backward 2",
        "backward 1, on the GPU", "wait 3", "forward 2, on the GPU", "wait 4", "backward 2",
    ]  # fmt: skip
    passes = PassProgress(log.append, events(log, are_done=False))
    assert step(passes, log) == expected
    log.clear()
    assert step(passes, log) == expected  # the next step starts with a new count


def test_the_host_does_not_wait_for_a_pass_that_has_begun() -> None:
    log: list[str] = []
    assert step(PassProgress(log.append, events(log, are_done=True)), log) == [
        "record 1", "forward 1", "record 2", "backward 1", "record 3", "forward 2", "record 4", "backward 2",
        "backward 2",
    ]  # fmt: skip


def test_a_cpu_has_no_events() -> None:
    log: list[str] = []
    assert step(PassProgress(log.append, None), log) == ["forward 1", "backward 1", "forward 2", "backward 2"]


def test_the_time_from_the_first_to_the_last_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four passes begin at 0, 250, 500 and 750 ms on the GPU; on a CPU at 2, 3, 5 and 9 s."""
    log: list[str] = []
    passes = PassProgress(log.append, events(log, are_done=False))
    step(passes, log)
    assert passes.seconds == 0.75
    step(passes, log)  # begins anew
    assert passes.seconds == 0.75
    times = iter((2.0, 3.0, 5.0, 9.0))
    monkeypatch.setattr("sft.mcore.progress.time.perf_counter", lambda: next(times))
    on_cpu = PassProgress(log.append, None)
    step(on_cpu, log)
    assert on_cpu.seconds == 7.0
