"""Allows one run at a time to copy checkpoints to a place in an object store (checkpoint.remote).

The object run.lock names the run that is alive.  Every change of it is a conditional write: it succeeds only if the
object is still the one that was read, which its ETag shows.  So of two runs that take a stale lock, one gets it.  The
holder writes a heartbeat with each renewal.  Whether a run on another machine is alive follows from changes that this
process sees during a time by its own clock; the clocks of machines are not compared.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from sft.errors import ConfigError, SftError
from sft.files.object_store import ObjectStore
from sft.run.lock import LOCK, Holder, has_ended, parsed, this_process


class RemoteLock:
    """Locks a place in an object store while the context lasts.  Rank 0 holds the lock.

    report       gets a line when a stale lock is replaced
    heartbeat_s  seconds between two heartbeats; each is one request
    stale_s      a run on another machine counts as ended after this many seconds without a heartbeat
    Entering the context raises ConfigError if another run is alive, or if the store cannot be used, and StorageError if
    the store does not answer.
    """

    def __init__(
        self, url: str, *, report: Callable[[str], None], heartbeat_s: float = 30.0, stale_s: float = 120.0
    ) -> None:
        self._store, self._report = ObjectStore(url), report
        self._heartbeat_s, self._stale_s = heartbeat_s, stale_s
        self._me, self._count, self._etag = this_process(), 0, ""
        self._writes = threading.Lock()  # of heartbeats and of the removal
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="remote run.lock", daemon=True)

    def __enter__(self) -> "RemoteLock":
        while not self._take():
            pass
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if os.getpid() != self._me.pid:  # a forked child that ends with an exception
            return
        self._is_over.set()
        self._thread.join()
        with suppress(SftError):  # the next run then finds a stale lock
            # An empty lock is free.  A removal has no condition, so it could remove the lock of another run.
            self._store.replace(LOCK, b"", self._etag)

    def held(self) -> bool:
        """Whether this process still holds the lock.  Raises StorageError if the store does not answer."""
        if os.getpid() != self._me.pid:
            return False
        with self._writes:
            stored = self._store.read(LOCK)
            return stored is not None and stored[1] == self._etag

    @staticmethod
    def is_gone(url: str) -> bool:
        """Whether this machine knows that the run that last locked the place has ended, as `lock.is_gone`."""
        stored = ObjectStore(url).read(LOCK)
        if stored is None or not stored[0]:
            return True
        holder = parsed(stored[0])
        return holder is not None and has_ended(holder, this_process().machine)

    def _take(self) -> bool:
        """Take the lock.  False if another process changed it first.  Raises ConfigError if another run is alive."""
        stored = self._store.read(LOCK)
        if stored is not None and stored[0]:
            self._refuse_alive(*stored)
        etag = self._store.replace(LOCK, self._content(), None if stored is None else stored[1])
        self._etag = etag or ""
        return etag is not None

    def _refuse_alive(self, content: bytes, etag: str) -> None:
        """Raise ConfigError if the run that holds the lock is alive.  Waits up to `stale_s` for its heartbeat."""
        holder = parsed(content)
        why = "that process has ended" if holder and has_ended(holder, self._me.machine) else None
        if why is None:
            if holder and holder.machine == self._me.machine:
                self._refuse(holder)
            who = str(holder) if holder else "unreadable"
            self._report(f"{self._store.url}/{LOCK} ({who}): waiting {self._stale_s:g} s for a heartbeat of that run")
            end = time.monotonic() + self._stale_s
            while time.monotonic() < end:
                time.sleep(min(2.0, self._stale_s / 20))
                now = self._store.read(LOCK)
                if now is None or not now[0]:
                    return
                if now[1] != etag:
                    self._refuse(parsed(now[0]) or holder)
            why = f"no heartbeat for {self._stale_s:g} s"
        self._report(f"{self._store.url}/{LOCK}: taken over from {holder or 'an unreadable lock'}: {why}")

    def _renew(self) -> None:
        while not self._is_over.wait(self._heartbeat_s):
            with suppress(SftError), self._writes:  # the saver reports errors of the store
                self._count += 1
                etag = self._store.replace(LOCK, self._content(), self._etag)
                if etag is None:
                    return  # another run took the lock; `held` says so
                self._etag = etag

    def _content(self) -> bytes:
        return json.dumps({**asdict(self._me), "beat": self._count}).encode()

    def _refuse(self, holder: Holder | None) -> None:
        raise ConfigError(
            f"checkpoint.remote = {self._store.url} is in use by another run ({holder or 'unreadable'}), and two runs "
            "would overwrite each other's checkpoints.  Stop that run, or choose another checkpoint.remote.  If no "
            f"such run exists, remove {self._store.url}/{LOCK}."
        )
