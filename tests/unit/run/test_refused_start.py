"""A start that is refused before it locks the run folder: run_state.json records it, so scripts do not repeat it."""

import json
from pathlib import Path
from typing import Any

import pytest

from sft.cli import main
from sft.errors import CheckpointError, ConfigError, DataError, PeerError, SftError, StorageError
from sft.run import lifecycle, status
from sft.run.lock import RunLock
from sft.run.refused_start import recorded
from tests.builders import RECIPE


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe whose data file does not exist.  Returns the folder of the run."""
    (tmp_path / "a.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    return Path("runs/a")


def killed(folder: Path) -> status.Status:
    """The state of a run that saved step 10 and was killed."""
    folder.mkdir(parents=True)
    status.begin(folder, step=0)
    status.progress(folder, None, step=10, step_s=2.0, save_s=3.0)
    state = status.read(folder)
    assert state is not None
    return state


def refuse(folder: Path, error: SftError) -> None:
    with pytest.raises(type(error)), recorded(folder):
        raise error


def facts(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "run_state.json").read_text())
    return {key: state[key] for key in ("status", "step", "saved_step", "starts", "reason")}


def test_a_killed_run_whose_next_start_is_refused_is_not_started_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = killed(folder)
    assert main(["status", "a.yaml"]) == 75
    assert main(["train", "a.yaml"]) == 2
    state = status.read(folder)
    assert state is not None and state.start_id != before.start_id and state.traceback is None
    reason = "refused before it began: ConfigError: data.train = a.jsonl (a.yaml, line 9) does not exist in "
    assert state.reason is not None and state.reason.startswith(reason)
    assert facts(folder) | {"reason": ""} == {
        "status": "failed-fatal", "step": 10, "saved_step": 10, "starts": 1, "reason": "",
    }  # fmt: skip
    capsys.readouterr()
    assert main(["status", "a.yaml"]) == 2
    assert "find the cause before you start the run again" in capsys.readouterr().out
    assert [path.name for path in folder.iterdir()] == ["run_state.json"]


def test_the_first_start_is_refused_and_the_next_one_counts_as_the_first(folder: Path) -> None:
    assert main(["train", "a.yaml", "parallel.cp=2"]) == 2
    assert facts(folder)["status"] == "failed-fatal" and facts(folder)["starts"] == 0
    assert main(["status", "a.yaml"]) == 2
    assert status.begin(folder, step=0).starts == 1


def test_the_parent_of_the_ranks_is_refused(folder: Path) -> None:
    assert main(["train", "a.yaml", "parallel.cp=2", "--processes", "3"]) == 2
    assert facts(folder)["status"] == "failed-fatal"


def test_what_a_machine_refuses_is_not_recorded(folder: Path) -> None:
    """Another machine may have a GPU, so launch/slurm.sbatch tries three times."""
    assert main(["train", "a.yaml", "--processes", "auto", "run.device=cpu"]) == 2
    assert not folder.exists()


def test_the_failure_of_the_start_before_is_gone(folder: Path) -> None:
    before = killed(folder)
    status.fail(folder, before.start_id, RuntimeError("a lost rank"), rank=3, step=12)
    refuse(folder, CheckpointError("no such checkpoint"))
    assert facts(folder)["reason"] == "refused before it began: CheckpointError: no such checkpoint"
    assert [path.name for path in folder.iterdir()] == ["run_state.json"]


def test_the_state_of_a_run_that_may_be_alive_is_not_touched(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The refused start neither waits for the lock nor prints anything about it."""
    before = killed(folder)
    with RunLock(folder, report=lambda line: None) as lock:
        refuse(folder, ConfigError("a mistake"))
        assert lock.held()
    assert status.read(folder) == before and capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [StorageError("the disk is full"), PeerError("nobody answers")])
def test_what_may_succeed_the_next_time_is_not_recorded(folder: Path, error: SftError) -> None:
    before = killed(folder)
    refuse(folder, error)
    assert status.read(folder) == before


def test_only_rank_0_records(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    refuse(folder, ConfigError("a mistake"))
    assert not folder.exists()


def test_a_folder_that_is_itself_the_mistake(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.parent.mkdir()
    folder.touch()
    assert main(["train", "a.yaml", "data.train=a.yaml"]) == 2
    told = capsys.readouterr().err
    assert "run.dir = runs/a (a.yaml, line 1) is not a folder" in told and "WARNING" not in told


def test_a_state_that_cannot_be_written_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.mkdir(parents=True)
    (folder / "run_state.json").write_text("{")
    refuse(folder, ConfigError("a mistake"))
    line = "WARNING: runs/a/run_state.json does not say so: runs/a/run_state.json is not the state of a run: "
    assert capsys.readouterr().err.startswith(line)


def test_a_checkpoint_that_allows_no_start_is_recorded_under_the_lock(folder: Path) -> None:
    """The process that holds the lock reads the step from which the run would continue."""
    killed(folder)

    def next_step() -> int:
        raise CheckpointError("all checkpoints are damaged")

    with pytest.raises(CheckpointError), RunLock(folder, report=lambda line: None):
        lifecycle._begin(folder, next_step)
    reason = "refused before it began: CheckpointError: all checkpoints are damaged"
    assert facts(folder) == {
        "status": "failed-fatal", "step": 10, "saved_step": 10, "starts": 1, "reason": reason,
    }  # fmt: skip


def test_a_run_that_is_done_stays_done(folder: Path) -> None:
    """Neither a start that is refused before it begins, nor one that fails before it has loaded its state, undoes a
    run."""
    start = killed(folder)
    status.end(folder, start.start_id, "done", step=10, num_steps=10, reason=None)
    done = facts(folder)
    assert main(["train", "a.yaml"]) == 2 and facts(folder) == done
    begun, before = lifecycle._begin(folder, lambda: 10)
    assert facts(folder)["status"] == "running" and before is not None
    error = DataError("a.jsonl is not prepared")
    status.fail(folder, begun.start_id, error, rank=0, step=10, finished=before)
    status.fail(folder, begun.start_id, PeerError("rank 0 is gone"), rank=1, step=10)
    assert facts(folder) == done and main(["status", "a.yaml"]) == 0
