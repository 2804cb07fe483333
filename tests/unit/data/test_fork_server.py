"""Workers never run the user's program, and a worker that dies is reported with its reason."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from sft.data import fork_server, limited
from sft.data.fork_server import Child, End
from tests.builders import RECIPE
from tests.unit.corpora import ROW, write

ROOT = Path(__file__).resolve().parents[3]
# A program that writes a line whenever it runs, and prepares two files in two processes.  If workers ran it, it would
# not end.
STARTS = """
with open("started", "a+") as started:
    started.write(__name__ + "\\n")
    started.seek(0)
    if started.read().count("\\n") > 4:
        raise SystemExit("the program ran again and again")
"""
DEFINES = """
import sft
from sft.data import fork_server
def prepared(_=None):
    recipe = sft.load("a.yaml", {"data.train": ["a.jsonl", "b.jsonl"], "data.num_workers": 2})
    return sft.prepare(recipe).train.num_samples, fork_server._server is not None

"""
PLAIN = STARTS + DEFINES + "print(*prepared())\n"
# A kernel of a notebook runs cells in a __main__ that is the kernel's program, with a file that others must not run
# again.
NOTEBOOK = f"""
import sys
if __name__ == "__main__":
    exec(compile({PLAIN!r}, "<cell>", "exec"), sys.modules["__main__"].__dict__)
else:
    open("started", "a").write("the kernel\\n")
"""
BELOW_A_POOL = """
import multiprocessing
with multiprocessing.get_context("fork").Pool(1) as pool:
    print(*pool.map(prepared, [0])[0])
"""
WAYS = {
    "script": (["program.py"], PLAIN),
    "notebook": (["program.py"], NOTEBOOK),
    "REPL": (["-i", "-q"], PLAIN),
    "-c": (["-c", PLAIN], ""),
    "below a pool": (["program.py"], STARTS + DEFINES + BELOW_A_POOL),
}


@pytest.mark.parametrize(("command", "program"), WAYS.values(), ids=WAYS)
def test_the_program_runs_once(tmp_path: Path, command: list[str], program: str) -> None:
    write(tmp_path / "a.jsonl", *[ROW] * 3)
    write(tmp_path / "b.jsonl", *[ROW] * 4)
    (tmp_path / "a.yaml").write_text(RECIPE)
    (tmp_path / "program.py").write_text(program)
    ended = subprocess.run(
        [sys.executable, *command],
        input=program if "-i" in command else "",
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "7 True" in ended.stdout.splitlines(), ended.stdout + ended.stderr
    assert (tmp_path / "started").read_text() == "__main__\n"


def _dies(pipe: Connection, number: int, last_words: str) -> None:
    print(f"one\n\ntwo\nthree\n{last_words}", file=sys.stderr, flush=True)
    pipe.recv()
    os.kill(os.getpid(), number) if number else os._exit(3)


@pytest.mark.parametrize(
    ("number", "code", "described"),
    [
        (signal.SIGKILL, -9, "was ended by SIGKILL; its last lines: two | three | a b"),
        (signal.SIGSEGV, -11, "was ended by SIGSEGV; its last lines: two | three | a b"),
        (0, 3, "ended with exit code 3; its last lines: two | three | a b"),
    ],
)
def test_how_a_child_ended(number: int, code: int, described: str) -> None:
    """The printed reason has no control characters, and does not blame memory."""
    child = Child(_dies, (number, "a\x1bb"))
    child.pipe.send(None)
    with pytest.raises(EOFError):
        child.pipe.recv()
    end = child.end(kill=False)
    assert end.code == code
    assert end.describe() == described


def test_memory_is_blamed_only_by_the_kernel_or_the_last_words() -> None:
    assert End(-9, "", True).describe() == (
        "was ended by SIGKILL, because memory ran out (oom_kill of the cgroup has risen)"
    )
    assert End(-9, "", False).describe() == "was ended by SIGKILL"
    assert End(-9, "", None).describe() == "was ended by SIGKILL"
    assert End(-6, "", True).describe() == "was ended by SIGABRT"
    assert limited._why(End(-6, "memory allocation of 9 bytes failed", False)) == (
        "needed more than 8 GiB of memory (memory allocation of 9 bytes failed)"
    )
    assert limited._why(End(-6, "thread panicked", False)) == "was ended by SIGABRT; its last lines: thread panicked"


def _ends_itself(number: int) -> int:
    if number == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    return number


def test_a_child_that_dies_among_others() -> None:
    """Tasks before it have results; the dead child gets no other task."""
    results = limited.run(_ends_itself, [(i,) for i in range(8)], 2)
    assert next(results) == 0
    with pytest.raises(limited.LimitReached, match="was ended by SIGSEGV") as reached:
        next(results)
    assert reached.value.task == 1


def _ignored(pipe: Connection) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    pipe.send((os.getcwd(), sys.path))


def test_a_child_is_like_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child has the folder and the sys.path of its start.  Only the parent handles stop signals."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    child = Child(_ignored, ())
    folder, path = child.pipe.recv()
    assert child.end(kill=False).code == 0
    assert (folder, path[0]) == (str(tmp_path), str(tmp_path / "modules"))


def test_a_server_that_was_killed_is_replaced() -> None:
    child = Child(_ignored, ())
    server = fork_server._server
    assert server is not None
    server._process.kill()
    server._process.wait()
    assert child.end(kill=True).describe() == "was ended, and so was the server that started it"
    other = Child(_ignored, ())
    other.pipe.recv()
    assert other.end(kill=False).code == 0


def _waits(pipe: Connection) -> None:
    pipe.send(os.getpid())
    signal.pause()


def test_children_end_with_a_parent_that_is_killed() -> None:
    program = (
        "import os, signal\nfrom sft.data.fork_server import Child\n"
        "from tests.unit.data.test_fork_server import _waits\n"
        "print(Child(_waits, ()).pipe.recv(), flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert parent.wait() == -9
    while psutil.pid_exists(pid):
        time.sleep(0.01)
