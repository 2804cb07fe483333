"""Files and folders of a run that its user may not read: one sentence, the exit code 2, and nothing is lost.

Root may read everything.  So the commands run in a process that has given up these two rights.
"""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.corpora import ROW, write
from tests.unit.files.test_disk_errors import RECIPE, ROOT

CHECKPOINT = "run/checkpoints/iter_0000001"
READ = "this user has no permission to read or write it (OSError: [Errno 13] Permission denied: '{}')"
ABOVE = "this user has no permission (OSError: [Errno 13] Permission denied: '{}')"


def unreadable(path: str, why: str = READ) -> str:
    return f"ConfigError: {path} cannot be read or written: {why.format(path)}.\n"


def cannot(be: str, path: str) -> str:
    return f"ConfigError: run.dir = run cannot be {be}: [Errno 13] Permission denied: '{path}'.\n"


SHARDS = [f"{CHECKPOINT}/{name}" for name in (".metadata", "__0_0.distcp", "common.pt", "manifest.json")]
# A start that is refused before it locks the folder changes no state.
KILLED, FAILED = "running", "failed-fatal"
# What may not be read; the answers of `sft check`, `sft train` and `sft status` ("" of the last: the state has it); the
# state of the run.
CASES: list[tuple[str, tuple[str, str, str], str]] = [
    ("run/run.lock", ("", cannot("locked", "run/run.lock"), unreadable("run/run.lock")), KILLED),
    ("run/checkpoints", (unreadable("run/checkpoints"),) * 3, KILLED),
    (CHECKPOINT, (*(unreadable(f"{CHECKPOINT}/manifest.json", ABOVE),) * 2, ""), FAILED),
    *((shard, (unreadable(shard), unreadable(shard), ""), FAILED) for shard in SHARDS),
    ("run/metrics.jsonl", ("", cannot("written", "run/metrics.jsonl"), ""), FAILED),
    ("run/seen.jsonl", ("", unreadable("run/seen.jsonl"), ""), FAILED),
]
PROGRAM = """
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
json.dump(answers, open("answers.json", "w"))
"""


def without_rights_of_root() -> None:
    """For a new process: capabilities 1 and 2 (DAC_OVERRIDE, DAC_READ_SEARCH) are out of reach for what it runs."""
    for capability in (1, 2):
        if ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) and os.geteuid() == 0:  # PR_CAPBSET_DROP
            raise PermissionError("root may not give up its rights in this container")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="capabilities are of Linux")
def test_what_may_not_be_read_is_one_sentence_and_nothing_is_lost(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ROW)
    (tmp_path / "r.yaml").write_text(RECIPE)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([path for path, _, _ in CASES])],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=without_rights_of_root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    answers = json.loads((tmp_path / "answers.json").read_text())
    for (path, sentences, state), (told, left, end) in zip(CASES, answers, strict=True):
        check, train, status = told
        assert (path, check) == (path, [2, sentences[0]] if sentences[0] else [0, ""])
        assert (path, train) == (path, [2, sentences[1]])
        assert (path, status) == (path, [2, sentences[2]])
        assert (path, left) == (path, state)
        assert (path, end) == (path, [[0, ""], "done"])
