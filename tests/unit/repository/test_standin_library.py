"""The C library that replaces CUDA: it compiles, and counts as tests/standin/__init__.py promises.

Every case is a process of its own, or two ranks, because the library counts per process.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from signal import SIGABRT
from typing import Any

import pytest

from tests.standin import build

TIMEOUT_S = 200  # ranks that wait for each other in vain report it after 90 s (nccl.c)
OUT_OF_MEMORY, INVALID_CONFIGURATION = 2, 9  # error codes of the runtime and of the driver
Ask = Callable[..., dict[str, Any]]
AskRanks = Callable[..., list[tuple[int, str, str]]]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, compiled once; warnings of gcc are errors."""
    if not shutil.which("gcc"):
        pytest.skip("the stand-in for CUDA is compiled, and gcc cannot be found: apt install gcc libc6-dev")
    path = tmp_path_factory.mktemp("standin") / build.NAME
    build.compile_sources(path, [build.DECLARATIONS], *build.STRICT)
    return path


def _start(library: Path, *words: object, **environment: object) -> "subprocess.Popen[str]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STANDIN_")}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.standin.calls", str(library), *map(str, words)], cwd=build.ROOT, text=True,
        env={**kept, **{name: str(value) for name, value in environment.items()}},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def _finish(processes: list["subprocess.Popen[str]"]) -> list[tuple[int, str, str]]:
    """The exit code, answers and messages of each process.  No process is left, also after an error."""
    try:
        said = [process.communicate(timeout=TIMEOUT_S) for process in processes]
        return [(process.returncode, *texts) for process, texts in zip(processes, said)]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture
def ask(library: Path) -> Ask:
    """The answers of a function of calls.py, in a process with this environment."""

    def run(name: str, *words: object, **environment: object) -> dict[str, Any]:
        ((code, answers, messages),) = _finish([_start(library, name, *words, **environment)])
        assert code == 0, messages
        return json.loads(answers)

    return run


@pytest.fixture
def ask_ranks(library: Path, tmp_path: Path) -> AskRanks:
    """The answers of two ranks, in order of rank; any exit code is allowed."""
    return lambda name, **also: _finish([_start(library, name, rank, tmp_path / "shared", **also) for rank in range(2)])


def test_memory_is_counted_and_refused_beyond_what_the_device_has(ask: Ask) -> None:
    assert ask("memory", STANDIN_BYTES=1000) == {
        "401 of 400": OUT_OF_MEMORY,
        "address of the refused block": None,
        "errors": [OUT_OF_MEMORY, OUT_OF_MEMORY, 0],  # after a look, after a read that clears the error, and afterwards
        "400 of 400": 0,
        "left": 0,
        "left after free": 600,
        "2**64 - 1": OUT_OF_MEMORY,
        "600 after the refusals": 0,
    }


def test_the_peak_of_page_locked_memory_stays_and_takes_nothing_of_the_device(ask: Ask) -> None:
    """Allocates 300, then 500, frees the 300, and allocates 100."""
    assert ask("pinned", STANDIN_BYTES=1000) == {"most": [300, 800, 800], "left": 1000}


def test_no_more_is_page_locked_than_may_be(ask: Ask) -> None:
    assert ask("locked", STANDIN_LOCKABLE=8192) == {"8192": 0, "1 more": OUT_OF_MEMORY, "left": 0, "after": 0}


def test_a_wait_counts_once_for_work_that_was_not_waited_for(ask: Ask) -> None:
    assert ask("waits") == {
        "kernels": 0,
        "wait for an event": 1,
        "second wait for the event": 1,
        "wait for its stream with a later kernel": 2,
        "second wait for the stream": 2,
        "wait for an idle stream": 2,
        "stream that follows a finished event": 2,
        "stream that follows an unfinished event": 3,
        "wait for the device": 4,
        "stream after the device": 4,
        "elapsed time is above 0": True,
    }


def test_kernels_products_and_attention_count_and_a_kernel_without_blocks_is_refused(ask: Ask) -> None:
    """The last of five kernels has a grid of 7 x 5 x 2 blocks; only blocks of grids with three axes count."""
    expected = {"refused": INVALID_CONFIGURATION, "then": 0, "four": 4, "three axes": 0, "blocks": 70}
    assert ask("kernels") == expected


def test_collectives_of_two_ranks_give_the_numbers(ask_ranks: AskRanks) -> None:
    """Sums of 2, 30 and 5, 4.  Half precision is not summed: each rank keeps its own values."""
    (code, first, messages), (other_code, second, other_messages) = ask_ranks("collectives")
    assert (code, other_code) == (0, 0), messages + other_messages
    same = {
        "sum": [7, 34],
        "product": [10, 120],
        "most": [5, 30],
        "least": [2, 4],
        "gathered": [2, 30, 5, 4],
        "of rank 1": [5, 4],
        "single precision": [2.0],
    }
    assert json.loads(first) == {**same, "scattered": [7], "at rank 1": [0, 0], "half precision": [7]}
    assert json.loads(second) == {**same, "scattered": [34], "at rank 1": [7, 34], "half precision": [8]}


def test_a_communicator_of_several_ranks_takes_memory(ask: Ask, ask_ranks: AskRanks, tmp_path: Path) -> None:
    memory = {"STANDIN_BYTES": 1000, "STANDIN_NCCL_BYTES": 300}
    for code, answers, messages in ask_ranks("buffers", **memory):
        assert code == 0, messages
        assert json.loads(answers) == {"left": [700, 200, 500], "refused": 1}
    assert ask("own_messages", 0, tmp_path / "own", STANDIN_BYTES=100, STANDIN_NCCL_BYTES=300)["groups in order"] == 3


def test_messages_of_a_group_keep_their_order_and_content(ask: Ask, ask_ranks: AskRanks, tmp_path: Path) -> None:
    assert ask("own_messages", 0, tmp_path / "own") == {"groups in order": 3}
    for code, answers, messages in ask_ranks("messages"):
        assert code == 0, messages
        assert json.loads(answers) == {"groups in order": 3}


def test_ranks_whose_calls_differ_both_end(ask_ranks: AskRanks) -> None:
    (code, _, messages), (other_code, _, other_messages) = ask_ranks("sizes_differ")
    assert (code, other_code) == (-SIGABRT, -SIGABRT) and "stand-in: rank 1" in other_messages
    assert "rank 0 is at all_reduce of 8 bytes, rank 1 at all_reduce of 12" in messages
