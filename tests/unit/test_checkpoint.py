"""Which checkpoint is the newest, and what publishing one more does to the others.  No process group, no shards."""

from pathlib import Path

import pytest

from sft.checkpoint import POINTER, Checkpoints, newest
from sft.config import CheckpointConfig
from sft.console import Console


def folder_of(root: Path, step: int, content: str = "") -> Path:
    """A whole checkpoint, as far as names go."""
    path = root / f"iter_{step:07d}"
    path.mkdir()
    (path / "metadata.json").write_text(content)
    return path


def publish(root: Path, step: int, keep_last: int | None = None) -> None:
    temporary = root / f"iter_{step:07d}.tmp"
    temporary.mkdir()
    (temporary / "metadata.json").write_text("new")
    checkpoints = Checkpoints(CheckpointConfig(keep_last=keep_last), root, {}, Console(0))
    checkpoints._publish(temporary, root / f"iter_{step:07d}", step)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_newest_is_the_one_pointed_at(tmp_path: Path) -> None:
    assert newest(tmp_path) is None and newest(tmp_path / "nowhere") is None
    for step in (100, 200, 300):
        folder_of(tmp_path, step)
    (tmp_path / POINTER).write_text("200")
    assert newest(tmp_path) == tmp_path / "iter_0000200"
    assert newest(tmp_path / "iter_0000100") == tmp_path / "iter_0000100"


@pytest.mark.parametrize("pointer", [None, "", "garbage", "999", "-1", "../../etc"])
def test_without_a_usable_pointer_the_highest_whole_step_counts(tmp_path: Path, pointer: str | None) -> None:
    folder_of(tmp_path, 100)
    folder_of(tmp_path, 1_000_000)
    (tmp_path / "iter_0000300").mkdir()  # not whole
    (tmp_path / "iter_2000000.tmp").mkdir()
    if pointer is not None:
        (tmp_path / POINTER).write_text(pointer)
    assert newest(tmp_path) == tmp_path / "iter_1000000"


def test_publishing_moves_the_pointer_and_keeps_the_last(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        publish(tmp_path, step, keep_last=2)
    assert names(tmp_path) == ["iter_0000200", "iter_0000300", POINTER]
    assert (tmp_path / POINTER).read_text() == "300"


def test_after_going_back_the_checkpoint_just_made_is_not_the_one_that_goes(tmp_path: Path) -> None:
    """Continued from step 100 of a run that had reached 400: 150 is lower than the rest, and the newest."""
    for step in (100, 200, 300, 400):
        folder_of(tmp_path, step)
    publish(tmp_path, 150, keep_last=3)
    assert names(tmp_path) == ["iter_0000150", "iter_0000300", "iter_0000400", POINTER]
    assert newest(tmp_path) == tmp_path / "iter_0000150"


def test_a_step_done_again_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    folder_of(tmp_path, 200, content="old")
    publish(tmp_path, 200)
    assert (tmp_path / "iter_0000200" / "metadata.json").read_text() == "new"
    assert names(tmp_path) == ["iter_0000200", POINTER]
