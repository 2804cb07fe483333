"""run.lock between real processes.  A process with another hostname simulates another host."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sft.errors import ConfigError
from sft.run import lock
from sft.run.lock import RunLock, is_gone
from tests.unit.fixtures.disk import watch_disk

ROOT = Path(__file__).resolve().parents[3]
END_OF_TEST = 240.0  # seconds; unless something is broken, no wait takes that long, even on a busy machine

# Takes the lock in argv[1] as host argv[2], prints its messages and the result, and lives until its stdin closes.
PROGRAM = """
import sys
from pathlib import Path
from sft.errors import ConfigError
from sft.run import lock
folder, host, stale_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
if host:
    lock.socket.gethostname = lambda: host
print("ready", flush=True)
sys.stdin.readline()
try:
    tell = lambda line: print("told", line, flush=True)
    with lock.RunLock(folder, report=tell, heartbeat_s=0.05, stale_s=stale_s) as held:
        print("taken", flush=True)
        for line in sys.stdin:
            print(held.held(), flush=True)
    print("left", flush=True)
except ConfigError as error:
    print("refused", error, flush=True)
"""


class Run:
    def __init__(self, folder: Path, host: str, stale_s: float, job: tuple[str, str] | None) -> None:
        slurm = {"SLURM_JOB_ID": job[0], "SLURM_RESTART_COUNT": job[1]} if job else {}
        env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")} | slurm
        command = [sys.executable, "-c", PROGRAM, str(folder), host, str(stale_s)]
        self.process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, cwd=ROOT, env=env)
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().rstrip("\n")

    def say(self, text: str = "") -> None:
        assert self.process.stdin
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def ask(self, text: str = "") -> str:
        self.say(text)
        return self.line()

    def close(self) -> str:
        """Leaves the context.  Returns the printed text."""
        out, _ = self.process.communicate(timeout=END_OF_TEST)
        return out.strip()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(host: str = "", stale_s: float = 0.5, job: tuple[str, str] | None = None) -> Run:
        runs.append(Run(tmp_path, host, stale_s, job))
        return runs[-1]

    yield start
    for each in runs:
        each.process.kill()
        each.process.communicate()


def stale_lock(folder: Path) -> None:
    """Writes the lock of a process of this machine that has ended."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    values = lock.asdict(lock.this_process()) | {"pid": dead.pid, "id": "of the dead", "host": "gone-host", "beat": 7}
    (folder / "run.lock").write_text(json.dumps(values))


def test_a_lock_is_there_while_it_is_held_and_says_who(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    told: list[str] = []
    with RunLock(tmp_path, report=told.append) as held:
        content = json.loads((tmp_path / "run.lock").read_text())
        assert (content["pid"], content["job"], content["restart"], content["beat"]) == (os.getpid(), "4711", 2, 0)
        assert held.held() and os.listdir(tmp_path) == ["run.lock"]
    assert os.listdir(tmp_path) == [] and told == []


def test_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file stays readable and keeps its length; each beat is flushed to disk, where other hosts look."""
    calls = watch_disk(monkeypatch)
    with RunLock(tmp_path, report=print, heartbeat_s=0.001):
        length, until = (tmp_path / "run.lock").stat().st_size, time.monotonic() + END_OF_TEST
        while (beat := json.loads((tmp_path / "run.lock").read_text())["beat"]) < 30:
            assert time.monotonic() < until
        assert beat >= 30 and (tmp_path / "run.lock").stat().st_size == length
    assert len(calls) >= 30 and all(call.startswith("fsync run.lock") for call in calls)


def test_a_live_run_is_not_disturbed(tmp_path: Path, run: Callable[..., Run]) -> None:
    first = run(job=("12", "0"))
    assert first.ask() == "taken"
    with pytest.raises(ConfigError) as refused, RunLock(tmp_path, report=print):
        pass
    for part in ("in use by another run (host ", f"pid {first.process.pid}, job 12, since 2", "choose another run.dir"):
        assert part in str(refused.value)
    assert first.ask() == "True" and first.close() == "left" and os.listdir(tmp_path) == []


def test_a_killed_run_of_this_machine(tmp_path: Path, run: Callable[..., Run]) -> None:
    first = run(job=("12", "0"))
    assert first.ask() == "taken"
    first.process.kill()  # the test does not wait for the process: a zombie also counts as ended
    until, told = time.monotonic() + END_OF_TEST, list[str]()
    while lock._start_time(first.process.pid) is not None:
        assert time.monotonic() < until
    with RunLock(tmp_path, report=told.append, stale_s=1000):
        assert len(told) == 1 and told[0].endswith(": that process has ended")
        assert told[0].startswith("run.lock: taken over from host ") and f"pid {first.process.pid}" in told[0]


def test_a_process_that_got_the_number_of_a_dead_one(tmp_path: Path, run: Callable[..., Run]) -> None:
    first = run()
    assert first.ask() == "taken"
    values = json.loads((tmp_path / "run.lock").read_text())
    (tmp_path / "run.lock").write_text(json.dumps(values | {"started": values["started"] - 5}))
    told: list[str] = []
    with RunLock(tmp_path, report=told.append, stale_s=1000):
        assert told[0].endswith("that process has ended")


@pytest.mark.parametrize("job, end", [(("12", "1"), "taken"), (("13", "1"), "refused"), (("12", "0"), "refused")])
def test_a_requeued_job_takes_its_own_lock(run: Callable[..., Run], job: tuple[str, str], end: str) -> None:
    first, second = run(host="a", job=("12", "0")), run(host="b", job=job)
    assert first.ask() == "taken"
    told = [second.ask(), second.line()]
    assert told[1].startswith(end)
    if end == "taken":
        assert told[0].endswith("job 12, since " + told[0].partition("since ")[2]) and "the job was requeued" in told[0]
        assert first.ask() == "False"


def test_a_live_run_of_another_host_is_seen_to_beat(run: Callable[..., Run]) -> None:
    first, second = run(host="a"), run(host="b", stale_s=1000)
    assert first.ask() == "taken"
    assert second.ask().startswith("told run.lock (host a, pid ")
    assert second.line().startswith("refused run.dir = ")
    assert first.ask() == "True"


def test_a_stopped_run_of_another_host_loses_its_lock(tmp_path: Path, run: Callable[..., Run]) -> None:
    """The stopped run notices this when it wakes, and does no harm to the run that took the lock."""
    first, second = run(host="a"), run(host="b", stale_s=0.3)
    assert first.ask() == "taken"
    first.process.send_signal(signal.SIGSTOP)
    assert "waiting 0.3 s" in second.ask()
    assert second.line().endswith(": no heartbeat for 0.3 s") and second.line() == "taken"
    first.process.send_signal(signal.SIGCONT)
    assert first.ask() == "False" and second.ask() == "True"
    assert first.close() == "left"  # it has beaten since, and does not remove a lock of another run
    assert second.ask() == "True" and json.loads((tmp_path / "run.lock").read_text())["host"] == "b"
    assert second.close() == "left" and os.listdir(tmp_path) == []


@pytest.mark.parametrize("garbage", [b"", b"\xff\x00", b'{"pid": 1}'])
def test_garbage_that_stays_is_taken(tmp_path: Path, garbage: bytes) -> None:
    (tmp_path / "run.lock").write_bytes(garbage)
    told: list[str] = []
    with RunLock(tmp_path, report=told.append, stale_s=0.05) as held:
        assert held.held()
    assert told[1] == "run.lock: taken over from an unreadable lock: no heartbeat for 0.05 s"
    assert os.listdir(tmp_path) == []


def test_garbage_that_somebody_touches_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.lock").write_bytes(b"garbage")
    monkeypatch.setattr(lock.time, "sleep", lambda s: os.utime(tmp_path / "run.lock", ns=(0, 0)))
    with pytest.raises(ConfigError, match=r"another run \(unreadable\)"), RunLock(tmp_path, report=print, stale_s=1000):
        pass
    assert (tmp_path / "run.lock").read_bytes() == b"garbage"


def test_one_of_four_takes_a_stale_lock(tmp_path: Path, run: Callable[..., Run]) -> None:
    stale_lock(tmp_path)
    runs = [run() for _ in range(4)]
    for each in runs:
        each.say()
    ends = []
    for each in runs:
        while (line := each.line()).startswith("told"):
            pass
        ends.append(line.split()[0])
    assert sorted(ends) == ["refused"] * 3 + ["taken"]
    assert runs[ends.index("taken")].ask() == "True" and os.listdir(tmp_path) == ["run.lock"]


def test_a_slow_taker_sees_that_another_was_faster(tmp_path: Path, run: Callable[..., Run]) -> None:
    """It judged the old lock, then slept; when it wakes, the claim is free again."""
    stale_lock(tmp_path)
    other, slow = run(), RunLock(tmp_path, report=print)
    found = slow._stale_content(tmp_path / "run.lock")
    assert found is not None
    while other.ask() != "taken":
        pass
    mine = tmp_path / "mine"
    mine.write_bytes(slow._identity)
    slow._replace(mine, tmp_path / "run.lock", found)
    assert other.ask() == "True" and sorted(os.listdir(tmp_path)) == ["mine", "run.lock"]


def test_a_taker_that_was_killed_while_it_took(tmp_path: Path) -> None:
    """Its claim stays like a lock, and is taken over like one."""
    stale_lock(tmp_path)
    left = (tmp_path / "run.lock").read_bytes()
    claim = lock._claim(tmp_path / "run.lock", left)
    claim.write_bytes(left.replace(b"of the dead", b"of another "))
    with RunLock(tmp_path, report=print, stale_s=1000) as held:
        assert held.held() and os.listdir(tmp_path) == ["run.lock"]
    assert os.listdir(tmp_path) == []


def test_what_a_killed_taker_left_goes_with_the_next_start(tmp_path: Path) -> None:
    stale_lock(tmp_path)
    for name in ("run.lock.0f5e", "run.lock.after-0f5e"):
        (tmp_path / name).write_bytes((tmp_path / "run.lock").read_bytes())
    (tmp_path / "run.lock").unlink()
    of_the_living = json.dumps({**lock.asdict(lock.this_process()), "beat": 0})
    (tmp_path / "run.lock.77aa").write_text(of_the_living)
    with RunLock(tmp_path, report=print):
        assert sorted(os.listdir(tmp_path)) == ["run.lock", "run.lock.77aa"]


def test_a_fork_neither_beats_nor_removes(tmp_path: Path) -> None:
    with RunLock(tmp_path, report=print, heartbeat_s=0.01) as held:
        child = os.fork()
        if child == 0:
            is_held = held.held()
            held.__exit__(None, None, None)
            os._exit(1 if is_held else 0)
        assert os.waitpid(child, 0)[1] == 0
        assert held.held() and os.listdir(tmp_path) == ["run.lock"]


@pytest.mark.parametrize(("kind", "name"), [("link", "a link"), ("folder", "a folder"), ("pipe", "no plain file")])
def test_a_lock_that_is_no_file_is_refused_at_once(tmp_path: Path, kind: str, name: str) -> None:
    lock = tmp_path / "run.lock"
    {"link": lambda: lock.symlink_to("gone"), "folder": lock.mkdir, "pipe": lambda: os.mkfifo(lock)}[kind]()
    with pytest.raises(ConfigError) as error, RunLock(tmp_path, report=print):
        pass
    assert str(error.value) == f"{lock} is {name}, so it is not the lock of a run.  Remove it, and start the run again."
    assert os.listdir(tmp_path) == ["run.lock"]


def test_whether_the_last_run_has_ended(tmp_path: Path) -> None:
    """This holds for this machine only: a run that is alive on another machine may hold the lock."""
    assert is_gone(tmp_path)
    with RunLock(tmp_path, report=print):
        assert not is_gone(tmp_path)
        lock = json.loads((tmp_path / "run.lock").read_text())
    for changed, expected in (({}, False), ({"started": 0.5}, True), ({"started": 0.5, "machine": "other"}, False)):
        (tmp_path / "run.lock").write_text(json.dumps({**lock, **changed}))
        assert is_gone(tmp_path) is expected
    (tmp_path / "run.lock").write_text("garbage")
    assert not is_gone(tmp_path)


def test_a_lock_removed_by_hand_is_not_held(tmp_path: Path) -> None:
    with RunLock(tmp_path, report=print) as held:
        (tmp_path / "run.lock").unlink()
        assert not held.held()
    with pytest.raises(ConfigError, match="cannot be locked: .*No such file"), RunLock(tmp_path / "no", report=print):
        pass
