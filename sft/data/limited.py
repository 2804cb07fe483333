"""Runs work with untrusted files (chat templates, tokenizers) in child processes with limits.

A chat template or a tokenizer runs C code that no check in the same process can interrupt.  So such work runs in a
child process.  The kernel limits its processor time and memory; the parent limits the size of its result.

    processor time  RLIMIT_CPU.  It is raised before each row, by an amount that grows with the row's bytes and texts.
                    Time in which the process waits does not count.
    memory          RLIMIT_DATA.  It is raised before each row, by 128 bytes for each byte of the row.  It counts
                    private writable memory; RLIMIT_AS would also count mapped files, and memory that allocators and
                    threads only reserve.
    result          its pickled size, at most 64 MiB

This module decides how a child that reached a limit is distinguished from one that was killed, and the error message.
`LimitReached` is no DataError, so it ends a preparation even if data.on_bad_row = skip.

`fork_server.py` starts the children, which never run the user's program.
"""

import pickle
import resource
import signal
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from multiprocessing import connection
from typing import Any, NamedTuple, TypeVar

from sft.data import fork_server
from sft.errors import DataError

ROW_SECONDS = 60  # processor time that every row gets; tokenising 700,000 tokens takes 2 s
BYTES_PER_SECOND = 500_000  # a row gets a further second for each 500,000 bytes; tokenising takes a third of this time
MOST_TEXTS = 1_000  # a row with more texts gets the time of a row with 1,000 texts
MEMORY = 8 << 30  # bytes that a child may use beyond those that it used when its part began
MEMORY_PER_BYTE = 128  # further bytes of memory for each byte of the rows; a tokenizer uses about 40
LARGEST_RESULT = 64 << 20  # bytes
_OF_ALLOCATORS = ("memory allocation of", "bad_alloc")  # error messages of the allocators of Rust and C++
_T = TypeVar("_T")
_children = [False]  # [whether this process is such a child]


class LimitReached(Exception):
    """Says why a child process ended or reached a limit while it worked on task number `task`.

    why  a predicate for the error message, e.g. "took more than 60 s of processor time"
    """

    def __init__(self, why: str, task: int = 0) -> None:
        super().__init__(why, task)
        self.why, self.task = why, task

    @property
    def is_memory(self) -> bool:
        """Whether the limit of memory was reached, or memory ran out."""
        return "memory" in self.why

    @property
    def advice(self) -> str:
        """Advice for the error message; empty if the child was ended by SIGKILL and memory did not run out."""
        return "" if "SIGKILL" in self.why and not self.is_memory else f"  {ADVICE}"


class _Outcome(NamedTuple):
    """The answer of a child process: a result, an error, or the limit that it reached (a predicate)."""

    result: Any = None
    error: BaseException | None = None
    limit: str | None = None


def call(subject: str, function: Callable[..., _T], *arguments: Any, advice: str | None = None) -> _T:
    """Returns function(*arguments), computed in a child process with limits.  In such a child, calls it directly.

    subject  begins the error message about a limit: "chat template of org/model"
    advice   ends this message, unless another process killed the child; None: `ADVICE`, which is about chat templates
    Raises DataError if the child reaches a limit or dies.  Errors of the function are raised unchanged.
    """
    if is_child():
        return function(*arguments)
    try:
        [result] = run(_limited_call, [(function, arguments)], 1)
        return result
    except LimitReached as reached:
        way_out = f"  {advice}" if advice and reached.advice else reached.advice
        raise DataError(f"{subject} cannot be used: the process that tried it {reached.why}.{way_out}") from None


ADVICE = (
    "Look for an operation on a huge number or text in the chat template, or give another template with "
    "data.chat_template."
)


def _limited_call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return next(function(*arguments) for _ in rows([(0, b"")]))


def is_child() -> bool:
    """Whether this process is a child with limits, so that it may use templates and tokenizers itself."""
    return _children[0]


def rows(
    numbered: Iterable[tuple[int, _T]], num_texts: Callable[[_T], int] = lambda content: 1
) -> Iterator[tuple[int, _T]]:
    """Yields numbered rows.  In a child, limits hold while the caller works on a row; elsewhere there are no limits.

    num_texts: estimates the number of texts of a row, which have on average half of the row's tokens
    """
    if not is_child():
        yield from numbered
        return
    memory, num_bytes = _data_bytes() + MEMORY, 0
    for number, content in numbered:
        size = _size(content)
        num_bytes += size
        _set(resource.RLIMIT_DATA, memory + MEMORY_PER_BYTE * num_bytes)
        work = size * (1 + min(num_texts(content), MOST_TEXTS)) // 2
        _set(resource.RLIMIT_CPU, int(time.process_time()) + 1 + ROW_SECONDS + work // BYTES_PER_SECOND)
        try:
            yield number, content
        finally:
            _set(resource.RLIMIT_CPU, resource.RLIM_INFINITY)
            _set(resource.RLIMIT_DATA, resource.RLIM_INFINITY)


def _size(content: object) -> int:
    """Estimates the number of bytes of a row."""
    total, left = 0, [content]
    while left:
        item = left.pop()
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, dict):
            left += item.values()
        elif isinstance(item, list):
            total += 8 * len(item)
            left += () if item and isinstance(item[0], int | float) else item  # a row of token ids may be long
    return total


def _set(limit: int, value: int) -> None:
    """Sets a soft limit of this process, at most to the hard limit."""
    hard = resource.getrlimit(limit)[1]
    infinite = resource.RLIM_INFINITY
    resource.setrlimit(limit, (hard if value == infinite or infinite != hard < value else value, hard))


def _data_bytes() -> int:
    """Bytes of this process that RLIMIT_DATA counts."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:  # not on Linux
        return 0


def run(
    function: Callable[..., _T], tasks: Iterable[tuple[Any, ...]], num_children: int, start: tuple[Any, ...] = ()
) -> Generator[_T, None, None]:
    """Yields function(*task) for each task, in order.  Up to `num_children` children compute the results.

    start  a function and its arguments, which each child calls before its first task
    Raises LimitReached with the number of the task at which a child ended or reached a limit.  Raises errors of the
    function unchanged.
    """
    tasks = list(tasks)
    children = [_Child(function, start) for _ in range(min(num_children, len(tasks)))]
    outcomes: dict[int, _Outcome] = {}
    try:
        num_given = len(children)
        for child, task in zip(children, range(num_given)):
            child.give(task, tasks[task])
        for number in range(len(tasks)):
            while number not in outcomes:
                for child in _that_are_ready(children):
                    outcomes[child.task] = child.outcome()
                    child.task = -1
                    if num_given < len(tasks) and not child.pipe.closed:  # closed: the child is dead
                        child.give(num_given, tasks[num_given])
                        num_given += 1
            outcome = outcomes.pop(number)
            if outcome.limit is not None:
                raise LimitReached(outcome.limit, number)
            if outcome.error is not None:
                raise outcome.error
            yield outcome.result
    finally:
        for child in children:
            if not child.pipe.closed:
                child.end(kill=True)


class _Child(fork_server.Child):
    """A child, and the number of the task on which it works; -1: no task."""

    def __init__(self, function: Callable[..., Any], start: tuple[Any, ...]) -> None:
        super().__init__(_serve, (function, start))
        self.task = -1

    def give(self, number: int, task: tuple[Any, ...]) -> None:
        self.task = number
        with suppress(OSError):  # the child is dead; `outcome` says so
            self.pipe.send(task)

    def outcome(self) -> _Outcome:
        """Waits for the outcome of the child's task.  If the child has died, the outcome says why."""
        try:
            outcome: _Outcome = pickle.loads(self.pipe.recv_bytes(LARGEST_RESULT))
        except (EOFError, OSError):
            return _Outcome(limit=_why(self.end(kill=False)))
        self.forget_stderr()
        return outcome


def _that_are_ready(children: list[_Child]) -> list[_Child]:
    busy = {child.pipe: child for child in children if child.task >= 0}
    return [busy[pipe] for pipe in connection.wait(list(busy)) if isinstance(pipe, connection.Connection)]


def _why(end: fork_server.End) -> str:
    """The reason why a child ended, such as "took more than 60 s of processor time".

    Names memory only if the kernel or the child's stderr says that it ran out.
    """
    if end.code == -signal.SIGXCPU:
        return f"took more than {ROW_SECONDS:,} s of processor time"
    if end.code == -signal.SIGABRT and any(words in end.stderr for words in _OF_ALLOCATORS):
        return f"needed more than {MEMORY >> 30:,} GiB of memory ({end.stderr})"
    return end.describe()


def _serve(pipe: connection.Connection, function: Callable[..., Any], start: tuple[Any, ...]) -> None:
    """Runs in a child: calls `start`, then receives tasks and sends their outcomes until the parent ends the child.

    If `start` fails, its outcome is sent instead for every task.
    """
    _children[0] = True
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    _set(resource.RLIMIT_CORE, 0)
    failed = _outcome(start[0], start[1:]) if start else _Outcome()
    while True:
        task = pipe.recv()
        outcome = _outcome(function, task) if failed == _Outcome() else failed
        content = _pickled(outcome)
        if len(content) > LARGEST_RESULT:
            content = _pickled(_Outcome(limit=f"gave a result of more than {LARGEST_RESULT >> 20:,} MiB"))
        pipe.send_bytes(content)


def _outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> _Outcome:
    try:
        return _Outcome(result=function(*arguments))
    except MemoryError:
        return _Outcome(limit=f"needed more than {MEMORY >> 30:,} GiB of memory")
    except BaseException as error:  # also a panic of Rust; the parent raises it
        if not isinstance(error, DataError):
            error.add_note(f"In a child process:\n{traceback.format_exc()}")
        return _Outcome(error=error)


def _pickled(outcome: _Outcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception:  # a panic of Rust has no pickle
        return pickle.dumps(_Outcome(error=RuntimeError(f"{outcome.error or type(outcome.result)!r}")))
