"""Real ranks for tests: processes joined by gloo, which stay alive and run functions by name.

    pool = RankPool(4)
    results = pool.run(function, arg)          # [function(arg) on rank 0, ..., on rank 3]
    pool.close()                               # ends the processes

An import of megatron-core takes seconds, so the test session starts one pool of each size.  On a CPU, one process
imports megatron-core, and the ranks are forked from it.  A function runs on every rank at once; it may build and
destroy any layout.  If a rank fails, the call fails with the rank and its traceback, and the pool ends, because other
ranks may wait in a collective.
"""

import contextlib
import gc
import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT_S = 600  # time limit in seconds of one call; a hang fails the test


class RankFailure(AssertionError):
    """A rank raised, died or did not answer in time."""


class RankPool:
    """`world_size` processes in one gloo process group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        context = _context()
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world_size, self._folder.name), daemon=False)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Runs `function(*args)` on every rank.  Returns the results in rank order."""
        for pipe in self._pipes:
            pipe.send((function, args))
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        while len(results) < self.world_size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in results}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"ranks {sorted(waiting.values())} did not answer within {timeout_s} s")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    error, results[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    self._fail(f"rank {rank} died")
                if error:
                    self._fail(f"rank {rank} of {self.world_size}:\n{error}")
        return [results[rank] for rank in range(self.world_size)]

    @property
    def alive(self) -> bool:
        return bool(self._processes) and all(p.is_alive() for p in self._processes)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
            _kill(process)
        self._pipes, self._processes = [], []
        self._folder.cleanup()

    def _fail(self, message: str) -> None:
        for process in self._processes:
            _kill(process)
        self.close()
        raise RankFailure(message)


Ranks = Callable[[int], RankPool]  # type of the fixture `ranks`


def _context() -> Any:
    """A way to start processes without fork where there is a GPU: importing Transformer Engine may start CUDA, which
    does not work in a forked process."""
    import torch

    if torch.cuda.device_count():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.ranks.scenarios", "tests.ranks.peft_models"])
    return context


def _kill(process: Any) -> None:
    """Kills a rank and every process that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


class _World:
    """The address at which this process finds its peers; `join` may be called again after the process group was
    destroyed."""

    folder, rank, world_size, joined = "", 0, 1, 0

    @classmethod
    def join(cls) -> None:
        import torch.distributed as dist

        cls.joined += 1
        store = dist.FileStore(f"{cls.folder}/store-{cls.joined}", cls.world_size)
        dist.init_process_group("gloo", store=store, rank=cls.rank, world_size=cls.world_size)


join = _World.join


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """A process group of all ranks of the pool, for functions that need no engine."""
    import torch.distributed as dist

    join()
    try:
        yield
    finally:
        dist.destroy_process_group()


def _free() -> None:
    """Ends the groups that a call left: each holds threads that poll a hundred times a second."""
    from sft.mcore.engine import Engine, release

    gc.collect()  # groups are part of reference cycles
    # of `sft train`, which ends its process
    engines = [held for held in gc.get_objects() if isinstance(held, Engine) and "chunks" in vars(held)]
    for engine in engines:
        release(engine)
    if engines:
        engines.clear()
        gc.collect()


def _serve(pipe: Connection, rank: int, world_size: int, folder: str) -> None:
    os.setsid()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    import torch

    torch.set_num_threads(1)
    _World.folder, _World.rank, _World.world_size = folder, rank, world_size
    frozen = False
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, ConnectionResetError):
            break
        if not frozen:  # the function is imported now, and a collection of all imported modules takes 0.25 s
            gc.freeze()
            frozen = True
        try:
            answer = (None, function(*args))
        except BaseException:  # noqa: B036 - whatever went wrong there is reported here
            answer = (traceback.format_exc(), None)
        pipe.send(answer)
        _free()
