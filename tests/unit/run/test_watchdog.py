"""Processes that really hang, and the files that they leave."""

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from sft.errors import ConfigError
from sft.run import watchdog
from sft.run.watchdog import Watchdog
from tests.unit.fixtures.held import held, threads

ROOT = Path(__file__).resolve().parents[3]
END_OF_TEST = 240.0  # seconds; unless something is broken, no wait takes that long, even on a busy machine
FIRST = r"rank 3: 'step 12: forward and backward' has not ended after \d+ s, 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC"

# `hang` waits for ever in C code, with the interpreter released for other threads (CDLL), or not (PyDLL).
HEAD = """
import ctypes, os, signal, sys, time
from pathlib import Path
from sft.run import watchdog
from sft.run.watchdog import Watchdog
mutex = ctypes.create_string_buffer(64)
def hang_in_collective(library=ctypes.CDLL(None)):
    while True:
        library.pthread_mutex_lock(mutex)
def on_hang(text):
    print("on_hang", text.splitlines()[0], flush=True)
folder = Path(sys.argv[1])
watchdog.SECONDS_MORE_FOR_FAULTHANDLER = 1000.0
"""
HANG = """
with Watchdog(0.2, folder, 3, on_hang=on_hang, linger_s=0.1) as dog:
    dog.phase("save")
    dog.idle()
    dog.phase("step 12: forward and backward")
    hang_in_collective()
"""


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HEAD + program, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=END_OF_TEST)


def stacks(folder: Path) -> str:
    return (folder / "stacks" / "rank_00003.txt").read_text()


def test_a_hang_leaves_the_stacks_of_all_threads(tmp_path: Path) -> None:
    done = run(HANG, tmp_path)
    assert done.returncode == 1
    assert re.fullmatch(f"on_hang {FIRST}\n", done.stdout)
    text = stacks(tmp_path)
    assert re.fullmatch(FIRST, text.splitlines()[0])
    assert "hang_in_collective" in text and "in _check" in text and text.count("hread 0x") == 2
    assert done.stderr == text


def test_a_phase_whose_parts_end_in_time_is_no_hang(tmp_path: Path) -> None:
    """The phase lasts longer than the timeout; the report names the part that hangs."""
    program = """
with Watchdog(0.5, folder, 3, on_hang=on_hang, linger_s=0.1) as dog:
    dog.phase("step 12")
    for microbatch in range(1, 9):
        dog.progress(f"forward of microbatch {microbatch} of 8")
        time.sleep(0.08)
    print("in time", flush=True)
    hang_in_collective()
"""
    done = run(program, tmp_path)
    assert done.returncode == 1
    told = r"rank 3: 'step 12: forward of microbatch 8 of 8' has not ended after \d+ s, .* UTC\n"
    assert re.fullmatch(f"in time\non_hang {told}", done.stdout), done.stdout


def test_a_second_hang_does_not_wipe_the_first(tmp_path: Path) -> None:
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "rank_00003.txt").write_text("the first\n")
    run(HANG, tmp_path)
    assert re.match(f"the first\n{FIRST}", stacks(tmp_path))


def test_a_main_thread_that_holds_the_interpreter(tmp_path: Path) -> None:
    """No Python code can run any more; the C thread of faulthandler ends the process."""
    program = "watchdog.SECONDS_MORE_FOR_FAULTHANDLER = 0.2\n" + HANG.replace(
        "collective()", "collective(ctypes.PyDLL(None))"
    )
    done = run(program, tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert stacks(tmp_path).startswith("Timeout (0:00:00") and "hang_in_collective" in stacks(tmp_path)


def test_it_leaves_although_on_hang_fails(tmp_path: Path) -> None:
    """The report of the failure cannot be printed either."""
    done = run(HANG.replace("on_hang=on_hang", "on_hang=lambda text: sys.stderr.close() or 1 / 0"), tmp_path)
    assert done.returncode == 1 and re.match(FIRST, stacks(tmp_path))


def test_it_leaves_although_on_hang_hangs(tmp_path: Path) -> None:
    program = HANG.replace("on_hang=on_hang", "on_hang=lambda text: time.sleep(1000)")
    done = run("watchdog.SECONDS_MORE_FOR_FAULTHANDLER = 0.2\n" + program, tmp_path)
    assert done.returncode == 1 and "Timeout (" in stacks(tmp_path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # `leave` ends its own thread
def test_others_have_time_to_write_theirs(tmp_path: Path) -> None:
    order: list[object] = []
    has_left = threading.Event()

    def leave(code: int) -> NoReturn:
        order.append(code)
        has_left.set()
        sys.exit()  # ends the thread

    def on_hang(text: str) -> None:
        order.append("told")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog.time, "sleep", order.append)
        with Watchdog(0.01, tmp_path, 3, on_hang=on_hang, leave=leave, linger_s=5.0) as dog:
            dog.phase("step 12: forward and backward")
            assert has_left.wait(END_OF_TEST)
    assert order == ["told", 5.0, 1]


def test_phases_that_end_in_time_and_idle_time_are_no_hang(tmp_path: Path) -> None:
    """The phases together last longer than the timeout; neither of the two watchdogs ends the process."""
    done = run(
        """
watchdog.SECONDS_MORE_FOR_FAULTHANDLER = 0.0
with Watchdog(0.5, folder, 3, on_hang=on_hang, linger_s=0.0) as dog:
    for step in range(8):
        dog.phase(f"step {step}")
        time.sleep(0.08)
    dog.idle()
    time.sleep(0.6)
    dog.phase("the last")
time.sleep(0.6)
print("through")
""",
        tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "through\n", "")
    assert list(tmp_path.iterdir()) == []  # nothing is reported, and no file is written


def test_a_thread_watches_within_the_context_unless_there_is_no_timeout(tmp_path: Path) -> None:
    had = held()
    for timeout_s, num_threads in ((None, 0), (1000.0, 1)):
        with Watchdog(timeout_s, tmp_path, 3, on_hang=print) as dog:
            dog.phase("step 12")
            dog.idle()
            dog.phase("step 13")
            assert len(threads() - had) == num_threads
        assert held() <= had and list(tmp_path.iterdir()) == []


def test_a_fork_is_not_watched_and_ends_as_usual(tmp_path: Path) -> None:
    """A fork that exits with Python's clean-up ends also while a phase is watched; the parent stays watched."""
    done = run(
        """
watchdog.SECONDS_MORE_FOR_FAULTHANDLER = 0.0
with Watchdog(0.5, folder, 3, on_hang=on_hang, linger_s=0.0) as dog:
    dog.phase("step 12: forward and backward")
    child = os.fork()
    if child == 0:
        dog.phase("of the child")
        dog.idle()
        time.sleep(0.6)
        sys.exit(7)
    dog.idle()
    print(os.waitpid(child, 0)[1] >> 8, flush=True)
    dog.phase("step 12: forward and backward")
    if os.fork() == 0:
        os._exit(0)
    hang_in_collective(ctypes.PyDLL(None))
""",
        tmp_path,
    )
    assert done.returncode == 1 and done.stdout == "7\n"
    assert "Timeout (" in stacks(tmp_path) and "hang_in_collective" in stacks(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "stacks").write_text("")
    with pytest.raises(ConfigError, match="rank_00003.txt cannot be written: "):
        with Watchdog(1.0, tmp_path, 3, on_hang=print):
            pass
