"""run.lock in an object store: one run at a time, stale locks, and lost answers."""

import json
import time
from dataclasses import replace

import pytest

from sft.errors import ConfigError
from sft.run import remote_lock
from sft.run.lock import this_process
from sft.run.remote_lock import RemoteLock
from tests.object_store import Server

URL = "s3://bucket/runs/a"
ME = this_process()
FAST = dict(heartbeat_s=0.05, stale_s=1.0)


def content(s3: Server) -> dict[str, object]:
    return json.loads(s3.content("runs/a/")["run.lock"])


def test_a_lock_is_taken_held_renewed_and_left(s3: Server) -> None:
    with RemoteLock(URL, report=pytest.fail, **FAST) as lock:
        assert lock.held() and content(s3)["pid"] == ME.pid
        deadline = time.monotonic() + 60
        while content(s3)["beat"] < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert lock.held()
    assert s3.content("runs/a/") == {"run.lock": b""}
    with RemoteLock(URL, report=pytest.fail, **FAST) as again:
        assert again.held()


def test_a_living_run_is_refused(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with RemoteLock(URL, report=pytest.fail, **FAST) as lock:
        with pytest.raises(ConfigError, match="is in use by another run .*pid .*choose another checkpoint.remote"):
            RemoteLock(URL, report=pytest.fail, **FAST).__enter__()
        monkeypatch.setattr(remote_lock, "this_process", lambda: replace(ME, machine="other", host="other", id="2"))
        with pytest.raises(ConfigError, match="is in use by another run"):
            RemoteLock(URL, report=said.append, heartbeat_s=0.05, stale_s=60.0).__enter__()
        assert lock.held() and "waiting 60 s for a heartbeat of that run" in said[0]


def test_the_lock_of_a_run_that_ended_is_taken_over(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    dead = RemoteLock(URL, report=pytest.fail, heartbeat_s=600)
    dead._me = replace(ME, started=1.0, id="dead")  # another process had this pid
    with dead:
        with RemoteLock(URL, report=said.append, **FAST) as lock:
            assert lock.held() and not dead.held()
        assert len(said) == 1 and "that process has ended" in said[0]
    assert s3.content("runs/a/") == {"run.lock": b""}


def test_a_silent_run_of_another_machine_is_taken_over_and_knows_it(s3: Server) -> None:
    said: list[str] = []
    silent = RemoteLock(URL, report=pytest.fail, heartbeat_s=600)
    silent._me = replace(ME, machine="other", id="silent")
    with silent:
        with RemoteLock(URL, report=said.append, **FAST) as lock:
            assert lock.held() and not silent.held()
        assert "no heartbeat for 1 s" in said[-1]


def test_of_two_runs_that_take_a_stale_lock_one_gets_it(s3: Server) -> None:
    """Between the look of the first and its write, the second takes the lock."""
    first, second = (RemoteLock(URL, report=lambda line: None, **FAST) for _ in range(2))
    second._me = replace(ME, id="second")
    dead = RemoteLock(URL, report=pytest.fail, heartbeat_s=600)
    dead._me = replace(ME, started=1.0, id="dead")
    assert dead._take()

    def meanwhile(number: int, method: str, path: str) -> None:
        if method == "PUT":
            s3.before = lambda number, method, path: None
            assert second._take()

    s3.before = meanwhile
    assert first._take() is False and second.held() and not first.held()
    with pytest.raises(ConfigError, match="is in use by another run"):
        first._take()


def test_an_unreadable_lock_is_watched(s3: Server) -> None:
    from sft.files.object_store import ObjectStore

    said: list[str] = []
    ObjectStore(URL).write("run.lock", b"not a lock")
    with RemoteLock(URL, report=said.append, **FAST) as lock:
        assert lock.held()
    assert "taken over from an unreadable lock" in said[-1]
