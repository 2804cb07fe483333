"""run_state.json: its content after each event, and which process wins if several write it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sft.errors import ConfigError, DataError, PeerError, StorageError
from sft.run import status
from sft.run.status import Kind, Status, begin, describe, end, fail, progress, read, verdict

ROOT = Path(__file__).resolve().parents[3]
STATUS = Status(
    status="running", step=12, num_steps=100, started_at_step=10, saved_step=10, start_id="5f3a", starts=1, reason=None,
    traceback=None, step_s=2, save_s=None, time="2026-01-31T12:00:00+00:00", host="n1", job=None,
)  # fmt: skip


def known(folder: Path) -> Status:
    found = read(folder)
    assert found is not None
    return found


def told(folder: Path) -> tuple[str, int, int, int, str | None]:
    found = known(folder)
    return found.status, found.step, found.saved_step, found.starts, found.reason


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status.time, "gmtime", lambda: (2026, 1, 31, 12, 0, 0, 5, 31, 0))
    monkeypatch.setattr(status.socket, "gethostname", lambda: "n1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")


def test_a_run_from_start_to_end(tmp_path: Path, here: None) -> None:
    assert read(tmp_path) is None
    first = begin(tmp_path, step=0)
    told = replace(STATUS, step=0, num_steps=None, started_at_step=0, saved_step=0, step_s=None, job="7")
    assert first == replace(told, start_id=first.start_id) == read(tmp_path) and len(first.start_id) == 12
    progress(tmp_path, None, step=10, step_s=2.5, save_s=30.0)
    saved = replace(first, step=10, saved_step=10, step_s=2.5, save_s=30.0)
    assert read(tmp_path) == saved
    progress(tmp_path, None, step=20, step_s=2.5, save_s=31.0)
    end(tmp_path, None, "done", step=20, num_steps=20, reason=None)
    ended = replace(saved, status="done", step=20, num_steps=20, saved_step=20, save_s=31.0)
    assert read(tmp_path) == ended
    again = begin(tmp_path, step=20)
    assert (again.step_s, again.save_s) == (2.5, 31.0)
    assert [path.name for path in tmp_path.iterdir()] == ["run_state.json"]


def test_a_start_that_lost_its_folder_says_nothing_more(tmp_path: Path) -> None:
    """The start hung, another one began, and the first one wakes up."""
    old = begin(tmp_path, step=0).start_id
    new = begin(tmp_path, step=10)
    assert old != new.start_id
    progress(tmp_path, old, step=15, step_s=9.0, save_s=1.0)
    fail(tmp_path, old, RuntimeError("connection reset"), rank=3, step=15)
    end(tmp_path, old, "preempted", step=15, num_steps=30, reason="SIGTERM")
    assert read(tmp_path) == new
    end(tmp_path, new.start_id, "done", step=20, num_steps=30, reason=None)
    assert known(tmp_path).status == "done"


@pytest.mark.parametrize(
    "error, expected, reason",
    [
        (RuntimeError("CUDA error:\n  no memory"), "failed-retryable", "rank 3: RuntimeError: CUDA error: no memory"),
        (StorageError("no room"), "failed-retryable", "rank 3: StorageError: no room"),
        (PeerError("nobody"), "failed-retryable", "rank 3: PeerError: nobody"),
        (DataError("chat.jsonl:7: no."), "failed-fatal", "rank 3: DataError: chat.jsonl:7: no."),
        (KeyboardInterrupt(), "failed-retryable", "rank 3: KeyboardInterrupt:"),
    ],
)
def test_a_disk_that_fails_is_worth_another_start_and_a_mistake_is_not(
    tmp_path: Path, error: BaseException, expected: str, reason: str
) -> None:
    begin(tmp_path, step=10)
    try:
        raise error
    except BaseException as raised:
        fail(tmp_path, None, raised, rank=3, step=12)
    assert told(tmp_path) == (expected, 12, 10, 1, reason)
    trace = known(tmp_path).traceback
    assert trace is not None and "    raise error\n" in trace


def test_starts_in_a_row_are_counted(tmp_path: Path) -> None:
    counts = []
    for step in (0, 0, 10, 10, 10, 20):  # the run is killed at each of these steps
        counts.append(begin(tmp_path, step=step).starts)
    assert counts == [1, 2, 1, 2, 3, 1]
    end(tmp_path, None, "done", step=20, num_steps=30, reason=None)
    again = begin(tmp_path, step=20)
    assert (again.starts, again.num_steps) == (1, 30)
    end(tmp_path, None, "preempted", step=20, num_steps=30, reason="SIGTERM")
    assert begin(tmp_path, step=20).starts == 2


def test_the_first_failure_stays_until_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path, step=10)
    fail(tmp_path, None, DataError("the cause"), rank=3, step=12)
    first = read(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(status, "replace_text", lambda *_, **__: pytest.fail("it is hidden for a moment"))
        fail(tmp_path, None, ConnectionError("reset"), rank=0, step=12)
        progress(tmp_path, None, step=20, step_s=1.0, save_s=1.0)
        end(tmp_path, None, "preempted", step=20, num_steps=30, reason="SIGTERM")
    assert read(tmp_path) == first and told(tmp_path)[4] == "rank 3: DataError: the cause"
    begin(tmp_path, step=10)
    assert told(tmp_path) == ("running", 10, 10, 2, None)
    fail(tmp_path, None, ConnectionError("reset"), rank=0, step=12)
    assert told(tmp_path)[4] == "rank 0: ConnectionError: reset"


def test_a_failure_between_looking_and_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3 fails while rank 0, which reports a save, has read the file but not yet written it."""
    begin(tmp_path, step=10)
    really = status.replace_text

    def late(path: Path, content: str, *, sync: bool = False) -> None:
        fail(tmp_path, None, DataError("the cause"), rank=3, step=12)
        really(path, content, sync=sync)

    monkeypatch.setattr(status, "replace_text", late)
    progress(tmp_path, None, step=20, step_s=1.0, save_s=1.0)
    assert told(tmp_path)[4] == "rank 3: DataError: the cause"


@pytest.mark.parametrize("kind", ["done", "preempted"])
def test_what_fails_after_the_end_changes_nothing(tmp_path: Path, kind: Kind) -> None:
    begin(tmp_path, step=10)
    end(tmp_path, None, kind, step=30, num_steps=30, reason="SIGUSR1\n(rank 2)")
    fail(tmp_path, None, RuntimeError("while closing"), rank=1, step=30)
    assert told(tmp_path) == (kind, 30, 10, 1, "SIGUSR1 (rank 2)")


@pytest.mark.parametrize("content", [None, "{"])
def test_a_file_that_somebody_removed_or_broke_under_a_run(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "run_state.json").write_text(content)
    fail(tmp_path, None, RuntimeError("x"), rank=1, step=5)
    assert told(tmp_path) == ("failed-retryable", 5, 5, 1, "rank 1: RuntimeError: x")


FAIL = """
import sys
from pathlib import Path
from sft.run.status import fail
print("ready", flush=True)
sys.stdin.readline()
fail(Path(sys.argv[1]), None, RuntimeError("x" * 20000), rank=int(sys.argv[2]), step=3)
"""


def test_a_full_disk_still_takes_the_end_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is written into the existing blocks of run_state.json; the caller gets the error, and the traceback is
    omitted."""
    start = status.begin(tmp_path, step=3)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        status.fail(tmp_path, start.start_id, StorageError("the disk is full. " * 9), rank=0, step=5)
    state = status.read(tmp_path)
    assert state is not None
    assert (state.status, state.step, state.traceback) == ("failed-retryable", 5, None)
    assert os.listdir(tmp_path) == ["run_state.json"]


def test_four_failures_at_once(tmp_path: Path) -> None:
    """The file is whole at any time: it says "running", and from then on always the same failure."""
    begin(tmp_path, step=0)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", FAIL, str(tmp_path), str(rank)], stdin=-1, stdout=-1, text=True, cwd=ROOT
        )
        for rank in range(4)
    ]
    for each in ranks:
        assert each.stdout and each.stdout.readline() == "ready\n"
    for each in ranks:
        assert each.stdin
        each.stdin.write("\n")
        each.stdin.flush()
    seen = []
    while any(each.poll() is None for each in ranks):
        seen.append(known(tmp_path).reason)
    assert [each.wait() for each in ranks] == [0] * 4
    for each in ranks:
        each.communicate()
    seen.append(known(tmp_path).reason)
    failures = [reason for reason in seen if reason is not None]
    assert len(set(failures)) == 1 and seen[-len(failures) :] == failures
    assert failures[0].startswith("rank ") and failures[0].endswith("x" * 20000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run_state.failure.json", "run_state.json"]


def valid(**changed: object) -> str:
    return json.dumps(status.asdict(STATUS) | changed)


@pytest.mark.parametrize(
    "content, why",
    [
        (b"", "Expecting value"),
        (b"\xff\xfe\xff", "decode"),
        (b"[" * 100_000, "recursion"),
        (b'{"status": "done"}', "it must be an object with status, step, num_steps, "),
        (valid(more=1), "it must be an object with"),
        (valid(status="finished"), "status is 'finished', not one of running, done, preempted, failed-"),
        (valid(step=True), "step is True"),
        (valid(starts=-1), "starts is -1"),
        (valid(step=None), "step is None"),
        (valid(step_s=float("nan")), "step_s is nan"),
        (valid(reason=["x"]), r"reason is \['x'\]"),
    ],
)
def test_a_file_that_is_no_state(tmp_path: Path, content: bytes | str, why: str) -> None:
    (tmp_path / "run_state.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=f"run_state.json is not the state of a run: .*{why}"):
        read(tmp_path)
    with pytest.raises(ConfigError):
        begin(tmp_path, step=0)


@pytest.mark.parametrize(
    "kind, starts, saved_step, expected",
    [
        ("done", 9, 10, "done"),
        ("running", 3, 10, "stop"),
        ("running", 3, 11, "go on"),  # the third start got further
        ("preempted", 3, 10, "stop"),
        ("failed-retryable", 2, 10, "go on"),
        ("failed-retryable", 3, 10, "stop"),
        ("failed-fatal", 1, 10, "stop"),
    ],
)
def test_verdicts(kind: Kind, starts: int, saved_step: int, expected: str) -> None:
    assert verdict(replace(STATUS, status=kind, starts=starts, saved_step=saved_step)) == expected
    assert verdict(None) == "go on"


def test_words() -> None:
    assert describe(STATUS) == "running at step 12 of 100 (2026-01-31T12:00:00+00:00, host n1; started from step 10)"
    failed = replace(STATUS, status="failed-fatal", num_steps=None, starts=3, reason="rank 0: DataError: x", job="7")
    assert describe(failed).splitlines() == [
        "failed-fatal at step 12 (2026-01-31T12:00:00+00:00, host n1, job 7; start 3 in a row from step 10)",
        "rank 0: DataError: x",
    ]
