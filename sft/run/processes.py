"""Starts the ranks of a run on one machine: `sft train RECIPE --processes N`.

The ranks meet at a store that listens on the loopback interface only, so no other machine can connect to it.  The store
contains no pickles.  torch starts the processes and writes their logs, as under torchrun.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext

from sft.errors import ConfigError
from sft.parallel.rendezvous import LOOPBACK
from sft.run.outcome import STOPPED
from sft.run.signals import received

_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_TO_FOLLOW = 30  # time in which the other ranks may end after the first one has ended with an error
_SECONDS_OVER_GRACE = 60.0  # time after run.grace_s until ranks that have not ended are killed


def run_ranks(arguments: Sequence[str], num_ranks: int, *, grace_s: float, log_dir: Path | None) -> int:
    """Run `sft` with these arguments in `num_ranks` processes, and return the first failed rank's exit code, or 0.

    arguments  arguments of each process, such as ["train", "a.yaml"]
    grace_s    seconds from a forwarded signal until all ranks are expected to have ended themselves
    log_dir    a folder for the output of each rank; the terminal then shows rank 0 only.  None: it shows all ranks

    Each signal that stops a run is sent to all ranks.  If a rank fails, the others receive SIGTERM, and after 30 s
    SIGKILL.  If a signal ended the failed rank, the exit code is 128 + the number of the signal.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # `_report` prints the reason
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in received())
    with tempfile.TemporaryDirectory(prefix="sft-ranks-") as folder:
        store, port = _loopback_store()  # the ranks use it until the end of this block
        logs = DefaultLogsSpecs(log_dir=folder)
        if log_dir is not None:
            logs = DefaultLogsSpecs(log_dir=str(log_dir), tee=Std.ALL, local_ranks_filter={0})
        try:
            ranks = start_processes(
                name="sft",
                entrypoint=sys.executable,
                args={rank: ("-m", "sft", *arguments) for rank in range(num_ranks)},
                envs=_environments(num_ranks, port),
                logs_specs=logs,
            )
            assert isinstance(ranks, SubprocessContext)
            with _forwarding(ranks, grace_s) as is_overdue:
                first = _wait(ranks, is_overdue)
        except SignalException as error:  # a signal arrived while the ranks were started; torch has ended them
            return 128 + error.sigval
        return 0 if first is None else _report(ranks, first)


def refuse_nested() -> None:
    """Raise ConfigError if torchrun or another program has started this process as a rank."""
    if ranks := [f"{name}={os.environ[name]}" for name in ("WORLD_SIZE", "RANK") if name in os.environ]:
        raise ConfigError(
            f"--processes starts the ranks of a run, but this process is a rank already ({', '.join(ranks)}).  Use "
            "either torchrun or --processes.  If no torchrun started this process, unset these variables."
        )


def _loopback_store() -> tuple[dist.TCPStore, int]:
    """A store on a free port of the loopback interface, and the port.  TCPStore by itself listens on all interfaces."""
    listener = socket.create_server((LOOPBACK, 0))
    port: int = listener.getsockname()[1]
    store = dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


def _environments(num_ranks: int, port: int) -> dict[int, dict[str, str]]:
    """The environment variables that torchrun sets, for each rank of one node."""
    common = {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the ranks connect to the store of this process and start none
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    return {rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)}


@contextmanager
def _forwarding(ranks: SubprocessContext, grace_s: float) -> Iterator[Callable[[], bool]]:
    """A context in which each signal that stops a run is sent to all ranks, and at whose end all ranks are killed.

    Yields a function that returns whether the time in which the ranks should end after the first signal is over.
    grace_s: this time in seconds, to which `_SECONDS_OVER_GRACE` is added
    """
    ends_at: list[float] = []

    def forward(number: int, frame: FrameType | None) -> None:
        ends_at.append(time.monotonic() + grace_s + _SECONDS_OVER_GRACE)
        for process in _processes(ranks):
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in received()}
    try:
        yield lambda: bool(ends_at) and time.monotonic() > ends_at[0]
    finally:
        ranks.close(signal.SIGKILL)  # does nothing to ranks that have ended
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: SubprocessContext, is_overdue: Callable[[], bool]) -> int | None:
    """Wait until all ranks have ended.  Returns the rank that failed first; None if none failed."""
    processes, first, followed_until = _processes(ranks), None, 0.0
    while any([process.poll() is None for process in processes]):
        if first is None:
            first = _failed(processes)
            # After a stop signal, all ranks end by themselves at almost the same time, so they get time to do so.
            is_stop = first is not None and processes[first].returncode == STOPPED
            followed_until = time.monotonic() + (_SECONDS_TO_FOLLOW if is_stop else 0.0)
        if (first is not None and time.monotonic() >= followed_until) or is_overdue():
            ranks.close(signal.SIGTERM if first is not None else signal.SIGKILL, _SECONDS_TO_FOLLOW)
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return _failed(processes) if first is None else first


def _failed(processes: Sequence["subprocess.Popen[bytes]"]) -> int | None:
    """The rank that failed; None if no rank failed.  If several failed, a rank that a signal ended is preferred,
    because the other ranks then failed as a consequence."""
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    return min(failed, key=lambda rank: processes[rank].returncode > 0, default=None)


def _report(ranks: SubprocessContext, first: int) -> int:
    """Print why the run ended, and return the exit code.  first: the rank that failed first"""
    code = int(_processes(ranks)[first].returncode)
    if code < 0:
        print(f"rank {first} was ended by {signal.Signals(-code).name}", file=sys.stderr, flush=True)
        return 128 - code
    with suppress(OSError, ValueError, LookupError):  # without the file, the rank has printed its error itself
        message = json.loads(Path(ranks.error_files[first]).read_text())["message"]["message"]
        if code == 1:
            print(f"rank {first} failed first: {message.strip().splitlines()[-1]}", file=sys.stderr, flush=True)
    return code


def _processes(ranks: SubprocessContext) -> list["subprocess.Popen[bytes]"]:
    return [ranks.subprocess_handlers[rank].proc for rank in range(ranks.nprocs)]
