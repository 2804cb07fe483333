"""The checkpoint from which a run resumes, and the effect of a new checkpoint on the others."""

import os
from pathlib import Path

import pytest

from sft.checkpoint import folders
from sft.errors import CheckpointError
from tests.unit.fixtures.disk import watch_disk


def folder_of(root: Path, step: int) -> None:
    """Makes a folder with the file names of a whole checkpoint."""
    path = root / f"iter_{step:07d}"
    path.mkdir()
    (path / "metadata.json").write_text("")


def publish(root: Path, step: int, keep_last: int | None = None, keep_every: int | None = None, best: int = -1) -> None:
    written = folders.temporary_of(root, step)
    written.mkdir(parents=True)
    (written / "metadata.json").write_text("new")
    folders.publish(written, step)
    folders.remove_old(root, step, keep_last=keep_last, keep_every=keep_every, keep_steps=[best], report=print)


def steps(root: Path) -> list[int]:
    return [int(path.name[5:]) for path in folders.candidates(root)]


@pytest.mark.parametrize("pointer, best", [("200", [200, 100]), ("300\n", [200, 100]), ("50", [400, 200, 100])])
def test_best_is_the_one_pointed_at_then_the_older_ones(tmp_path: Path, pointer: str, best: list[int]) -> None:
    """Checkpoints with steps above the pointer's belong to an abandoned continuation, also if the pointer's checkpoint
    is gone."""
    assert steps(tmp_path) == steps(tmp_path / "nowhere") == []
    for step in (100, 200, 400):
        folder_of(tmp_path, step)
    (tmp_path / folders.POINTER).write_text(pointer)
    assert steps(tmp_path) == best


@pytest.mark.parametrize("pointer", [None, "", "-1", "../../etc", "1e3", "9" * 40, "٣", "release", "1 2", "100\x00"])
def test_without_a_usable_pointer_the_highest_whole_step_counts(tmp_path: Path, pointer: str | None) -> None:
    folder_of(tmp_path, 100)
    folder_of(tmp_path, 1_000_000)
    (tmp_path / "iter_0000300").mkdir()  # all its files were removed; verification reports that
    (tmp_path / "iter_4000000").write_text("")
    (tmp_path / "iter_2000000.tmp-12ab").mkdir()
    (tmp_path / "iter_3000000.corrupt-20260101-000000").mkdir()
    if pointer is not None:
        (tmp_path / folders.POINTER).write_text(pointer)
    assert steps(tmp_path) == [1_000_000, 300, 100]


@pytest.mark.parametrize(
    "every, best, kept", [(None, -1, [1000, 900]), (400, 300, [1000, 900, 800, 400, 300])], ids=["last", "multiples"]
)
def test_publishing_moves_the_pointer_and_keeps_the_last(
    tmp_path: Path, every: int | None, best: int, kept: list[int]
) -> None:
    """Multiples of keep_every and the best checkpoint are kept, too."""
    for step in range(100, 1001, 100):
        publish(tmp_path, step, keep_last=2, keep_every=every, best=best)
    assert steps(tmp_path) == kept and (tmp_path / folders.POINTER).read_text() == "1000"


def test_after_going_back_only_one_history_has_final_names(tmp_path: Path) -> None:
    """A run that had reached step 100 continued from step 50: now only checkpoints up to step 90 belong to its
    history."""
    for step in (40, 50, 87, 100):
        folder_of(tmp_path, step)
    moved = folders.rename_abandoned(tmp_path, after=50, keep=87)
    assert [path.name[:22] for path in moved] == ["iter_0000100.given-up-"]
    publish(tmp_path, 87, keep_last=3)
    publish(tmp_path, 90, keep_last=3)
    publish(tmp_path, 90, keep_last=3)  # the same step is published once more
    assert steps(tmp_path) == [90, 87, 50]
    assert (tmp_path / "iter_0000087" / "metadata.json").read_text() == "new"
    assert (moved[0] / "metadata.json").exists() and folders.remove_leftovers(tmp_path) == []


def test_one_that_cannot_be_removed_is_told_and_the_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (100, 200, 300):
        folder_of(tmp_path, step)
    rmtree = folders.shutil.rmtree

    def refuse(path: Path, **options: object) -> None:
        if path.name.startswith("iter_0000100"):
            raise PermissionError(1, "Operation not permitted", str(path))
        rmtree(path)

    monkeypatch.setattr(folders.shutil, "rmtree", refuse)
    publish(tmp_path, 400, keep_last=2)
    assert steps(tmp_path) == [400, 300]  # parts of it may be gone, so it does not count
    monkeypatch.undo()
    assert [path.name[:12] for path in folders.remove_leftovers(tmp_path)] == ["iter_0000100"]
    assert "WARNING: " in (told := capsys.readouterr().out) and "iter_0000100 cannot be removed" in told


def test_left_overs_go_and_nothing_else(tmp_path: Path) -> None:
    kept = ["iter_0000100", "iter_0000200.corrupt-20260101-000000", "iter_0000300.tmp", "mine.tmp-12ab", "notes"]
    for name in [*kept, "iter_0000300.tmp-12ab34cd", "iter_0000200.replaced-00ff00ff", "iter_0000001.retired-1"]:
        (tmp_path / name).mkdir()
    assert sorted(path.name for path in folders.remove_leftovers(tmp_path)) == [
        "iter_0000001.retired-1",
        "iter_0000200.replaced-00ff00ff",
        "iter_0000300.tmp-12ab34cd",
    ]
    assert sorted(os.listdir(tmp_path)) == sorted(kept)


def test_the_disk_has_a_checkpoint_before_the_pointer_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = folders.temporary_of(tmp_path, 100)
    written.mkdir()
    calls = watch_disk(monkeypatch)
    folders.publish(written, 100)
    pointer, root = folders.POINTER, f"fsync {tmp_path.name}"
    assert calls == [f"fsync {written.name}", f"rename {written.name} -> iter_0000100", root,
                     f"fsync {pointer}.tmp", f"rename {pointer}.tmp -> {pointer}", root]  # fmt: skip


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_with_the_name_of_a_checkpoint_is_refused(tmp_path: Path, is_there: bool) -> None:
    """No file behind the link is read, even if its step is the newest, and no older checkpoint is used instead."""
    outside, root = tmp_path / "outside", tmp_path / "checkpoints"
    root.mkdir(), outside.mkdir()
    folder_of(root, 1)
    if is_there:
        folder_of(outside, 2)
    (root / "iter_0000002").symlink_to(outside / "iter_0000002")
    for ask in (folders.published, folders.candidates, lambda path: folders.find([path], "checkpoint.resume")):
        with pytest.raises(CheckpointError) as refused:
            ask(root)
        assert str(refused.value) == (
            f"{root}/iter_0000002 is a link, but a run renames and removes the checkpoints in its folder.  Move the "
            "checkpoint to this name, or remove the link and name the checkpoint itself: a new run reads it by "
            "model.init_from or checkpoint.resume."
        )


@pytest.mark.parametrize("is_there", [True, False])
def test_what_a_link_leads_to_is_neither_replaced_nor_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_there: bool
) -> None:
    """Links made during a run, with the names of a new, an old and a partially removed checkpoint."""
    outside, root = tmp_path / "outside", tmp_path / "checkpoints"
    root.mkdir(), outside.mkdir()
    if is_there:
        for step in (1, 2, 3):
            folder_of(outside, step)
    for step, name in ((1, "iter_0000001.retired-ab"), (2, "iter_0000002"), (3, "iter_0000003")):
        (root / name).symlink_to(outside / f"iter_{step:07d}")
    publish(root, 3, keep_last=1)
    assert (root / "iter_0000003" / "metadata.json").read_text() == "new" and not (root / "iter_0000003").is_symlink()
    assert f"WARNING: no checkpoint is removed: {root}/iter_0000002 is a link" in capsys.readouterr().out
    folders.remove_leftovers(root)
    names = ["iter_0000002", "iter_0000003", "latest_checkpointed_iteration.txt"]
    assert sorted(path.name for path in root.iterdir()) == names
    left = sorted(str(path.relative_to(outside)) for path in outside.glob("*/*"))
    assert left == [f"iter_{step:07d}/metadata.json" for step in (1, 2, 3) if is_there]
    assert all((outside / name).read_text() == "" for name in left)


def test_a_link_does_not_stop_the_first_save_after_a_resume(tmp_path: Path) -> None:
    """The link was made after the start, which would have refused it.  The link keeps its name."""
    outside, root = tmp_path / "outside", tmp_path / "checkpoints"
    outside.mkdir(), root.mkdir()
    folder_of(outside, 4)
    for step in (1, 3):
        folder_of(root, step)
    (root / "iter_0000004").symlink_to(outside / "iter_0000004")
    (renamed,) = folders.rename_abandoned(root, after=1, keep=2)
    assert renamed.name.startswith("iter_0000003.given-up-")
    assert (root / "iter_0000004").is_symlink() and (outside / "iter_0000004" / "metadata.json").exists()
