"""A full or failing disk, and files without permission to read: the message is one sentence, and the run can be started
again.

Root may read all files.  So commands on unreadable files run in a process that has given up this right.
"""

import ctypes
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sft.data.cache import store
from sft.data.cache.folders import work_folder
from sft.errors import ConfigError, DataError, StorageError
from sft.files.atomic_files import append, explained, unusable
from tests.unit.corpora import LONG, ROW, corpus_of, write

ROOT = Path(__file__).resolve().parents[3]
FULL, FAILS = "the disk is full (OSError: [Errno 28]", "the disk reports an I/O error (OSError: [Errno 5]"
# File, error, and status of the run.  The exit code is 1, and `sft status` advises another start; or the run is done.
WRITERS = [
    ("run.lock", "StorageError: run.dir = runs/{n} cannot be locked: {fault}", None),
    ("rank_00000.txt", "", "done"),  # stacks of a run that does not hang
    ("run_state.json.tmp", "StorageError: a file cannot be read or written: {fault}", "failed-retryable"),
    ("recipe.yaml", "StorageError: run.dir = runs/{n} cannot be written: {fault}", "failed-retryable"),
    ("data.json", "StorageError: run.dir = runs/{n} cannot be written: {fault}", "failed-retryable"),
    ("seen.jsonl", "StorageError: the samples of step 1 cannot be written to runs/{n}/seen.jsonl: {fault}",
     "failed-retryable"),
    ("metrics.jsonl", "StorageError: the numbers of step 0 cannot be written: {fault}", "failed-retryable"),
    ("events.out", "", "done"),  # TensorBoard gets no more records
    ("run_state.failure", "StorageError: the numbers of step 0 cannot be written: {fault}", "failed-retryable"),
]  # fmt: skip
PROGRAM = """
import builtins, contextlib, io, json, os, sys
from sft.cli import main

failing, number = "", 0
real = io.open

class Failing:
    def __init__(self, file):
        self.file = file
    def write(self, content):
        raise OSError(number, os.strerror(number))
    def __getattr__(self, name):
        return getattr(self.file, name)
    def __iter__(self):
        return iter(self.file)
    def __enter__(self):
        return self
    def __exit__(self, *error):
        self.file.close()

def fake(file, mode="r", *arguments, **options):
    opened = real(file, mode, *arguments, **options)
    name = os.path.basename(os.fspath(file)) if isinstance(file, (str, os.PathLike)) else ""
    of_failure = failing == "run_state.failure" and name == "metrics.jsonl"  # something must fail first
    matches = name == failing if failing.endswith("jsonl") else failing and name.startswith(failing)
    return Failing(opened) if (matches or of_failure) and mode[0] in "wax" else opened

io.open = builtins.open = fake
run = ["r.yaml", "data.cache_dir=cache"]
main(["data", "prepare", *run])
told = []
for n, (failing, number) in enumerate(json.loads(sys.argv[1])):
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(["train", *run, f"run.dir=runs/{n}"])
    state = f"runs/{n}/run_state.json"
    failing, status = "", json.loads(real(state).read())["status"] if os.path.exists(state) else None
    with contextlib.redirect_stdout(io.StringIO()):
        advice = main(["status", *run, f"run.dir=runs/{n}"])
    told.append([code, err.getvalue(), status, advice])
real("told.json", "w").write(json.dumps(told))
"""
RECIPE = """
run: {device: cpu, precision: fp32, dir: unset}
model: {num_layers: 1, hidden_size: 16, ffn_hidden_size: 16, num_attention_heads: 2, init_from: random}
data: {train: a.jsonl, seq_length: 128}
train: {num_steps: 1, global_batch_size: 1}
optim: {lr: 1e-3}
checkpoint: {async_save: false, save_last: false}
log: {tensorboard: true}
"""


def told(folder: Path, program: str, cases: list[Any], **options: Any) -> Any:
    """Runs the program on the cases, in a folder with a recipe and its data.  Returns the JSON that the program writes
    to told.json."""
    write(folder / "a.jsonl", ROW)
    (folder / "r.yaml").write_text(RECIPE)
    command, environment = [sys.executable, "-c", program, json.dumps(cases)], {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, **options)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads((folder / "told.json").read_text())


def test_each_writer_of_a_run(tmp_path: Path) -> None:
    cases = [(writer, number) for writer in WRITERS for number in (errno.ENOSPC, errno.EIO)]
    reported = told(tmp_path, PROGRAM, [(name, number) for (name, _, _), number in cases])
    for n, (((name, line, status), number), (code, err, its_status, advice)) in enumerate(
        zip(cases, reported, strict=True)
    ):
        fault = FULL if number == errno.ENOSPC else FAILS
        assert err.startswith(line.format(n=n, fault=fault)) and "Traceback" not in err, (name, err)
        assert (code, its_status, advice) == ((0, "done", 0) if status == "done" else (1, status, 75)), (name, err)


def test_standard_streams_that_are_closed(tmp_path: Path) -> None:
    """No file gets the descriptor of a closed stream, and printed text is lost."""
    write(tmp_path / "a.jsonl", ROW)
    (tmp_path / "r.yaml").write_text(RECIPE)
    command = f"{sys.executable} -m sft data prepare r.yaml data.cache_dir=cache <&- >&- 2>&-"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, shell=True, cwd=tmp_path, env=environment, check=False).returncode == 0
    [ledger] = (tmp_path / "cache").glob("*/ledger.json")
    assert json.loads(ledger.read_text())["rows"]["rows"] == 1


def test_an_append_is_whole_or_is_an_error(tmp_path: Path) -> None:
    """A file system may accept only a part of the data; another call writes the rest."""

    class Slow:
        def __init__(self) -> None:
            self.content, self.calls = b"", 0

        def write(self, content: bytes) -> int:
            self.calls += 1
            self.content += bytes(content[:3])
            return min(3, len(content))

    file = Slow()
    append(file, b"12345678")  # type: ignore[arg-type]
    assert (file.content, file.calls) == (b"12345678", 3)
    with open("/dev/full", "ab", buffering=0) as full, pytest.raises(OSError, match="No space left"):
        append(full, b"1")


def test_what_another_start_may_mend() -> None:
    for number in (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EDQUOT):
        assert isinstance(unusable("x", Path("/"), OSError(number, os.strerror(number)), DataError), StorageError)
    assert isinstance(
        unusable("x", Path("/"), PermissionError(errno.EACCES, "Permission denied"), DataError), DataError
    )
    with (
        pytest.raises(StorageError, match="^a cannot be read or written: this process has as many open files"),
        explained(),
    ):
        raise OSError(errno.EMFILE, "Too many open files", "a")
    with pytest.raises(ConfigError, match="^a cannot be read or written: this user has no permission"), explained():
        raise OSError(errno.EACCES, "Permission denied", "a")
    for error in (FileNotFoundError(errno.ENOENT, "x"), ConnectionResetError(errno.ECONNRESET, "x"), OSError("x")):
        with pytest.raises(type(error)), explained():
            raise error


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (os.R_OK, "this user has no permission to read it ("),
        (os.W_OK, "this user has no permission to write it ("),
        (os.R_OK | os.W_OK, "this user has no permission to read or write it ("),
        (0, "this user has no permission ("),  # to read a folder above it
    ],
)
def test_the_missing_permission_is_named(monkeypatch: pytest.MonkeyPatch, missing: int, words: str) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & missing)
    with pytest.raises(ConfigError) as error, explained():
        raise PermissionError(errno.EACCES, "Permission denied", "/data/a")
    assert str(error.value).startswith(f"/data/a cannot be read or written: {words}")


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EACCES])
def test_a_store_that_cannot_be_read_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path, log = write(tmp_path / "a.jsonl", ROW, LONG), []
    digest = corpus_of(path).digest
    [ledger] = (tmp_path / "cache").glob("*/ledger.json")
    before = ledger.stat()

    def fails(file: Path) -> None:
        raise OSError(number, os.strerror(number), str(file))

    with monkeypatch.context() as patched:
        patched.setattr(store, "_map", fails)
        with pytest.raises(DataError if number == errno.EACCES else StorageError) as error:
            corpus_of(path, log=log)
    about = "the data cannot be tokenised: " if number == errno.EMFILE else "tokenised data cannot be "
    assert str(error.value).startswith(about) and os.strerror(number) in str(error.value), error.value
    assert (log, ledger.stat(), work_folder(ledger.parent).exists()) == ([], before, False)
    assert corpus_of(path, log=log).digest == digest
    assert "cached" in log[0]


# --- files without permission to read ---------------------------------------------------------------------------------

CHECKPOINT = "run/checkpoints/iter_0000001"
READ = "this user has no permission to read or write it (OSError: [Errno 13] Permission denied: '{}')"
ABOVE = "this user has no permission (OSError: [Errno 13] Permission denied: '{}')"


def unreadable(path: str, why: str = READ) -> str:
    return f"ConfigError: {path} cannot be read or written: {why.format(path)}.\n"


def cannot(be: str, path: str) -> str:
    return f"ConfigError: run.dir = run cannot be {be}: [Errno 13] Permission denied: '{path}'.\n"


SHARDS = [f"{CHECKPOINT}/{name}" for name in (".metadata", "__0_0.distcp", "common.pt", "manifest.json")]
# A start that is refused before it locks the folder does not change the run's state.
KILLED, FAILED = "running", "failed-fatal"
# The unreadable file; the answers of `sft check`, `sft train` and `sft status` ("" for the last: the answer is in the
# state); the state of the run.
UNREADABLE: list[tuple[str, tuple[str, str, str], str]] = [
    ("run/run.lock", ("", cannot("locked", "run/run.lock"), unreadable("run/run.lock")), KILLED),
    ("run/checkpoints", (unreadable("run/checkpoints"),) * 3, KILLED),
    (CHECKPOINT, (*(unreadable(f"{CHECKPOINT}/manifest.json", ABOVE),) * 2, ""), FAILED),
    *((shard, (unreadable(shard), unreadable(shard), ""), FAILED) for shard in SHARDS),
    ("run/metrics.jsonl", ("", cannot("written", "run/metrics.jsonl"), ""), FAILED),
    ("run/seen.jsonl", ("", unreadable("run/seen.jsonl"), ""), FAILED),
]
UNREADABLE_PROGRAM = """
import contextlib, io, json, os, shutil, sys
from sft.cli import main

def answer(*words, more=()):
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        code = main([*words, "r.yaml", "run.dir=run", "data.cache_dir=cache", "checkpoint.save_last=true", *more])
    return code, err.getvalue()[max(0, err.getvalue().find("ConfigError: ")):] if code else ""

assert answer("data", "prepare") == answer("train") == (0, "")
shutil.move("run", "first")
state = json.load(open("first/run_state.json"))
json.dump({**state, "status": "running"}, open("first/run_state.json", "w"))  # as after SIGKILL
answers = []
for path in json.loads(sys.argv[1]):
    shutil.copytree("first", "run")
    if not os.path.exists(path):
        open(path, "w").close()
    mode = os.stat(path).st_mode
    os.chmod(path, 0)
    told = [answer(command, more=["train.num_steps=2"]) for command in ("check", "train", "status")]
    left = json.load(open("run/run_state.json"))["status"]
    os.chmod(path, mode)
    if path.endswith("run.lock"):
        os.unlink(path)
    end = answer("train", more=["train.num_steps=2"]), json.load(open("run/run_state.json"))["status"]
    answers.append((told, left, end))
    shutil.rmtree("run")
json.dump(answers, open("told.json", "w"))
"""


def without_rights_of_root() -> None:
    """Removes capabilities 1 and 2 (DAC_OVERRIDE, DAC_READ_SEARCH) from a new process and its child processes."""
    for capability in (1, 2):
        if ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) and os.geteuid() == 0:  # PR_CAPBSET_DROP
            raise PermissionError("root may not give up its rights in this container")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="capabilities are of Linux")
def test_what_may_not_be_read_is_one_sentence_and_nothing_is_lost(tmp_path: Path) -> None:
    paths = [path for path, _, _ in UNREADABLE]
    answers = told(tmp_path, UNREADABLE_PROGRAM, paths, preexec_fn=without_rights_of_root)
    for (path, sentences, state), ((check, train, status), left, end) in zip(UNREADABLE, answers, strict=True):
        assert (path, check) == (path, [2, sentences[0]] if sentences[0] else [0, ""])
        assert (path, train) == (path, [2, sentences[1]])
        assert (path, status) == (path, [2, sentences[2]])
        assert (path, left) == (path, state)
        assert (path, end) == (path, [[0, ""], "done"])
