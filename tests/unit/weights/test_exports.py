"""checkpoint.export_hf: the checkpoints that are exported, the folders that stay, and the effects of a failure or a
kill.

A shell script replaces `sft export`: it waits while its source has a file `wait`, and fails if there is a file `fails`.
"""

import io
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sft.checkpoint import folders, manifest
from sft.checkpoint.manifest import Manifest
from sft.checkpoint.train_state import TrainState
from sft.config import CheckpointConfig
from sft.console import Console
from sft.errors import StorageError
from sft.weights.background_exports import Exports

SCRIPT = """#!/bin/sh
source=$6 target=$7
mkdir "$target.tmp-1"
while [ -e "$source/wait" ]; do sleep 0.02; done
[ -e "$source/fails" ] && { echo "ConfigError: it fails."; exit 2; }
[ "$8 $9" = "--format bf16" ] || { echo "another format: $8 $9"; exit 2; }
digest=$(sha256sum "$source/manifest.json" | cut -d " " -f 1)
echo '{"format": "sft checkpoint 1", "checkpoint_sha256": "'$digest'", "files": {}}' > "$target.tmp-1/manifest.json"
mv "$target.tmp-1" "$target"
"""
DEADLINE_S = 240.0


class Run:
    """The folder of a run, with checkpoints that contain only a manifest."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, io.StringIO()

    def exports(self, mode: str) -> Exports:
        best = {"keep_best": "eval/lm loss"} if mode == "best" else {}
        return Exports(CheckpointConfig(export_hf=mode, **best), self.folder, Console(0, self.said))

    def save(self, step: int, *files: str, history: int = 0) -> Path:
        path = self.folder / "checkpoints" / folders.name_of(step)
        path.mkdir(parents=True, exist_ok=True)
        manifest.write(path, Manifest(files={}, facts={"history": history}))
        for name in files:
            (path / name).touch()
        return path

    def exported(self) -> list[str]:
        folder = self.folder / "hf_exports"
        return sorted(path.name for path in folder.iterdir() if path.is_dir())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    script = tmp_path / "python"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    monkeypatch.setattr("sft.weights.background_exports.sys", SimpleNamespace(executable=str(script)))
    return Run(tmp_path / "run")


def finish(exports: Exports) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while exports.is_busy(wait_s=1.0):
        assert time.monotonic() < deadline


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


SAVES = [(1, True, False), (2, False, False), (3, True, False), (4, False, True)]  # step, is_best, is_last


def test_an_export_gets_the_format_of_the_recipe(run: Run) -> None:
    exports = Exports(CheckpointConfig(export_hf="every", export_format="nvfp4"), run.folder, Console(0, run.said))
    run.save(1)
    exports.published(1, is_best=False, is_last=False)
    assert not exports.is_busy(wait_s=DEADLINE_S)
    assert "another format: --format nvfp4" in run.said.getvalue()


@pytest.mark.parametrize(
    "mode, names",
    [
        ("every", ["iter_0000001", "iter_0000002", "iter_0000003", "iter_0000004"]),
        ("best", ["best_0000003"]),
        ("last", ["last_0000004"]),
    ],
)
def test_which_checkpoints_are_exported(run: Run, mode: str, names: list[str]) -> None:
    exports = run.exports(mode)
    for step, is_best, is_last in SAVES:
        run.save(step)
        exports.published(step, is_best=is_best, is_last=is_last)
        finish(exports)
    assert run.exported() == names
    exports.refuse_failures()
    assert not exports.in_use()


def test_none_exports_nothing(run: Run) -> None:
    exports = run.exports("none")
    run.save(1)
    exports.resumed(TrainState(step=1), is_last=True)
    exports.published(1, is_best=True, is_last=True)
    assert not exports.is_busy(wait_s=0.0) and not (run.folder / "hf_exports").exists()


def test_a_checkpoint_is_in_use_until_its_export_is_complete(run: Run) -> None:
    exports = run.exports("every")
    slow = run.save(1, "wait")
    exports.published(1, is_best=False, is_last=False)
    run.save(2)
    exports.published(2, is_best=False, is_last=False)
    assert set(exports.in_use()) == {1, 2} and exports.is_busy(wait_s=0.0)
    (slow / "wait").unlink()
    finish(exports)
    assert not exports.in_use()


def test_a_better_checkpoint_takes_the_place_of_those_that_wait(run: Run) -> None:
    exports = run.exports("best")
    slow = run.save(1, "wait")
    for step in (1, 2, 3):
        run.save(step, *(["wait"] if step == 1 else []))
        exports.published(step, is_best=True, is_last=False)
    assert set(exports.in_use()) == {1, 3}
    (slow / "wait").unlink()
    finish(exports)
    assert run.exported() == ["best_0000003"]


def test_a_failure_is_reported_and_the_next_start_makes_the_export(run: Run) -> None:
    exports = run.exports("every")
    broken = run.save(1, "fails")
    run.save(2)
    for step in (1, 2):
        exports.published(step, is_best=False, is_last=step == 2)
    finish(exports)
    log = run.folder / "hf_exports" / "iter_0000001.log"
    reason = f"ConfigError: it fails.  ({log})"
    assert f"WARNING: the checkpoint of step 1 was not exported: {reason}" in run.said.getvalue()
    assert set(exports.in_use()) == {1}  # the export remains to be done at the next start
    with pytest.raises(StorageError, match="all steps are done and saved, but 1 of the exports") as error:
        exports.refuse_failures()
    assert f"step 1: {reason}" in str(error.value)
    (broken / "fails").unlink()
    exports = run.exports("every")
    exports.resumed(TrainState(step=2), is_last=True)
    finish(exports)
    exports.refuse_failures()
    assert run.exported() == ["iter_0000001", "iter_0000002"]


def test_a_killed_export_leaves_no_folder_and_is_made_by_the_next_start(run: Run) -> None:
    exports = run.exports("every")
    slow = run.save(1, "wait")
    exports.published(1, is_best=False, is_last=False)
    until(lambda: list(run.folder.glob("hf_exports/*.tmp-1")))
    exports.stop()
    finish(exports)
    exports.refuse_failures()  # the run was stopped, which does not count as a failure
    assert run.exported() == ["iter_0000001.tmp-1"]
    (run.folder / "hf_exports" / "iter_0000009.tmp-2").mkdir()  # its checkpoint belongs to an abandoned history
    (slow / "wait").unlink()
    exports = run.exports("every")
    exports.resumed(TrainState(step=1), is_last=False)
    finish(exports)
    assert run.exported() == ["iter_0000001"]


def test_a_checkpoint_of_another_history_is_exported_again(run: Run) -> None:
    """A run that resumes from an earlier step saves other weights under the same step number."""
    for history in (1, 1, 2):
        run.save(5, history=history)
        exports = run.exports("every")
        exports.published(5, is_best=False, is_last=False)
        finish(exports)
    assert run.said.getvalue().count("exported step 5") == 2


@pytest.mark.parametrize(
    "keys, problem",
    [
        ({"export_hf": "best"}, "= best needs keep_best, which says what is best"),
        ({"export_hf": "last", "save_last": False}, "= last needs save_last = true"),
    ],
)
def test_keys_that_exclude_each_other(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        CheckpointConfig(**keys)
