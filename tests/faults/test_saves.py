"""S: what can happen to a save.  At any instant there is a checkpoint that is whole, and it is the one gone on from."""

import subprocess
import time
from collections.abc import Callable

import pytest

from tests.faults.ends import End, assert_same_end, assert_whole
from tests.faults.runs import Case, Fault, mounted

WRITE = "sft.checkpoint.saver:engine_state.write"
ITEM = "torch.distributed.checkpoint.filesystem:_write_item"
STEP = "sft.mcore.engine:Engine.train_step"
# Inside rmtree.  Without this file, the rest does not look like a checkpoint.
UNLINK = {"at": "os:unlink", "match": "metadata.json.*dir_fd", "when": "after"}

# (what happens, the fault, is the new checkpoint the one gone on from); {name} is the folder of the save
POINTS: list[tuple[str, Fault, bool]] = [
    ("before anything is written", {"at": WRITE, "rank": 1, "nth": True}, False),
    ("the first file is open", {"at": ITEM, "rank": 0, "match": "{name}"}, False),
    ("inside a file", {"at": ITEM, "rank": 1, "match": "{name}", "call": 4}, False),
    ("all files are written", {"at": WRITE, "rank": 1, "nth": True, "when": "after"}, False),
    ("before the manifest", {"at": "sft.checkpoint.saver:manifest.write", "rank": 0, "nth": True}, False),
    ("inside the manifest", {"at": "os:replace", "rank": 0, "match": "{name}.*manifest"}, False),
    ("before the rename", {"at": "os:rename", "rank": 0, "match": r"{name}'\)"}, False),
    ("after the rename", {"at": "os:rename", "rank": 0, "match": r"{name}'\)", "when": "after"}, False),
    ("before the pointer", {"at": "sft.checkpoint.folders:write_pointer", "rank": 0, "nth": True}, False),
    ("inside the pointer", {"at": "os:replace", "rank": 0, "match": "latest_", "nth": True}, False),
    ("before an old one is removed", {"at": "sft.checkpoint.folders:remove_old", "rank": 0}, True),
    ("an old one is half removed", {**UNLINK, "rank": 0}, True),
    ("what that left is half swept", {"at": "shutil:rmtree", "rank": 0, "match": "retired", "when": "after"}, False),
]


@pytest.mark.row("S1", "T1")
@pytest.mark.parametrize(
    "overrides,do",
    [
        pytest.param([], "kill", id="rank"),
        pytest.param(["checkpoint.async_save=true"], "kill-all", id="all", marks=pytest.mark.quick),
    ],
)
def test_killed_at_every_point_of_a_save(
    case: Callable[..., Case], reference: End, hit: Callable[..., None], overrides: list[str], do: str
) -> None:
    """Every second time it is the second save of the start that is hit, so that the run moves on."""
    one = case("run", "checkpoint.keep_last=2", *overrides)
    at = 0  # the step gone on from
    for number, (what, fault, is_new) in enumerate(POINTS):
        saves = 2 if number % 2 == 0 and not is_new and "swept" not in what else 1
        name = f"iter_{at + saves:07d}"
        fault = {key: value.format(name=name) if key == "match" else value for key, value in fault.items()}
        if fault.pop("nth", False):
            fault["call"] = saves
        start = one.start({**fault, "do": do})
        codes = start.wait(20)
        assert -9 in codes and len(start.fired()) == 1, (what, start.told())
        at += saves if is_new else saves - 1
        assert_whole(one, at)
        hit("S1"), hit("T1")
    one.finish()
    assert_same_end(one, reference)


@pytest.mark.row("S2", "S4")
@pytest.mark.parametrize("overrides", [[], ["checkpoint.async_save=true"]], ids=["waiting", "background"])
def test_a_save_that_fails_is_told_and_training_goes_on(
    case: Callable[..., Case], reference: End, hit: Callable[..., None], overrides: list[str]
) -> None:
    """Full where one rank writes, where rank 0 does, and before anything is written; two in a row at most."""
    full = {"do": "full"}
    faults = [
        {"at": ITEM, "rank": 1, "match": "iter_0000002", "call": 3, **full},
        {"at": "sft.checkpoint.saver:manifest.write", "rank": 0, "call": 3, **full},
        {"at": "sft.atomic_files:flush", "rank": 0, "match": "iter_0000007.tmp.*json", **full},
        {"at": "shutil:disk_usage", "rank": 0, "call": 10, "do": "no-room"},
    ]
    one = case("run", *overrides)
    start = one.start(*faults)
    assert start.wait() == [0, 0], start.told()
    told = start.out()
    assert len(start.fired()) == 4, start.told()
    assert told.count("warning: the checkpoint of step ") == 4, told
    assert (
        "step 2 was not saved: iter_0000002.tmp-" in told
        and "rank 1: the disk is full (OSError: [Errno 28] No space left" in told
    )
    assert "step 10 was not saved: it needs" in told
    hit("S2", 4)
    if overrides:
        hit("S4", 3)
    assert len(one.steps()) == 8 and 2 not in one.steps() and 10 not in one.steps()
    assert_same_end(one, reference)


@pytest.mark.row("S4")
def test_a_bug_in_the_background_ends_the_run(
    case: Callable[..., Case], reference: End, hit: Callable[..., None]
) -> None:
    one = case("run", "checkpoint.async_save=true")
    start = one.start({"at": "sft.checkpoint.saver:manifest.entry_of", "rank": 1, "call": 3, "do": "error"})
    assert start.wait(40) == [1, 1], start.told()
    assert one.status()["status"] == "failed-retryable", one.status()
    hit("S4")
    one.finish()
    assert_same_end(one, reference)


@pytest.mark.row("S2")
def test_a_disk_that_is_really_full(case: Callable[..., Case], reference: End, hit: Callable[..., None]) -> None:
    """Three checkpoints fit.  The run ends after three saves that failed, and goes on where there is room again."""
    one = case("run")
    with mounted(one.checkpoints, "-t", "tmpfs", "-o", "size=3m", "tmpfs"):
        start = one.start()
        assert start.wait() == [1, 1], start.told()
        assert "3 in a row" in start.err() and "the disk has" in start.out(), start.told()
        assert_whole(one)
        hit("S2", 3)
        # What is free is a guess where others write to the disk, too.
        start = one.start({"at": "shutil:disk_usage", "rank": 0, "do": "much-room", "every": True})
        assert start.wait() == [1, 1], start.told()
        assert "the disk is full (" in start.out() and "3 in a row" in start.err(), start.told()
        assert_whole(one)
        assert not [path for path in one.checkpoints.iterdir() if ".tmp" in path.name]
        hit("S2", 3)
        subprocess.run(["mount", "-o", "remount,size=50m", str(one.checkpoints)], check=True)
        one.finish()
        assert_same_end(one, reference)


@pytest.mark.row("S3")
@pytest.mark.parametrize("which", ["run", "checkpoints"])
def test_a_read_only_folder_is_found_before_the_first_step(
    cut: Callable[..., Case], hit: Callable[..., None], which: str
) -> None:
    one = cut("run")
    folder = one.run if which == "run" else one.checkpoints
    with mounted(folder, "--bind", str(folder)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        start = one.start()
        assert start.wait() == [2, 2], start.told()
        assert "Read-only file system" in start.err() and str(folder) in start.err(), start.told()
        assert "\nstep " not in start.out()
        hit("S3")


@pytest.mark.row("S5", "G3")
def test_a_signal_during_a_background_save(case: Callable[..., Case], reference: End, hit: Callable[..., None]) -> None:
    one = case("run", "checkpoint.async_save=true")
    slow = {"at": "sft.checkpoint.saver:folders.publish", "rank": 0, "call": 3, "do": "sleep", "s": 1.0}
    start = one.start({"at": ITEM, "rank": 1, "match": "iter_0000003", "do": "term"}, slow)
    assert start.wait() == [75, 75], start.told()
    assert len(start.fired()) == 2 and one.status()["status"] == "preempted"
    assert_whole(one, one.status()["step"])
    hit("S5"), hit("G3")
    one.finish()
    assert_same_end(one, reference)


@pytest.mark.row("S6")
def test_no_step_is_saved_twice(case: Callable[..., Case], reference: End, hit: Callable[..., None]) -> None:
    """By its number, by the clock and by a signal."""
    one = case("run", "checkpoint.save_every=2", "checkpoint.save_every_minutes=0.0001")
    start = one.start({"at": STEP, "step": 4, "when": "after", "rank": 1, "do": "usr1"})
    assert start.wait() == [75, 75], start.told()
    assert [start.out().count(f"iter_000000{step} (") for step in (1, 2, 3, 4, 5)] == [1, 1, 1, 1, 0]
    before = (one.checkpoints / "iter_0000004").stat().st_mtime_ns
    start = one.start({"at": STEP, "step": 5, "rank": 1, "do": "term"})
    start.wait()
    at = one.pointed()
    start = one.start({"at": "sft.trainer:DataPipeline", "rank": 0, "do": "term"})
    assert start.wait() == [75, 75] and one.pointed() == at == 5, start.told()
    assert (one.checkpoints / "iter_0000004").stat().st_mtime_ns == before
    assert "saved " not in start.out()
    hit("S6", 3)
    one.finish()
    assert_same_end(one, reference)


@pytest.mark.row("S7")
def test_retention_never_takes_what_is_needed(
    case: Callable[..., Case], reference: End, hit: Callable[..., None]
) -> None:
    keep = ["checkpoint.keep_last=2", "checkpoint.keep_every=5", "checkpoint.keep_best=eval/lm loss"]
    one = case("run", *keep, "checkpoint.async_save=true")
    start = one.start()
    looks = 0
    while None in start.codes():
        looks += _look(one)
    assert start.wait() == [0, 0] and looks > 20, start.told()
    assert one.steps() == [5, 10, 11, 12]  # the best one is the last: the loss falls
    hit("S7", 12)
    assert_same_end(one, reference)


def _look(one: Case) -> bool:
    """At what the pointer names, at any instant."""
    try:
        pointed = one.pointed()
    except FileNotFoundError:
        return False
    is_there = (one.checkpoints / f"iter_{pointed:07d}" / "manifest.json").exists()
    assert is_there or one.pointed() != pointed, f"{pointed} is pointed at and gone"
    return True


@pytest.mark.row("S8")
def test_a_checkpoint_that_cannot_be_removed(
    case: Callable[..., Case], reference: End, hit: Callable[..., None]
) -> None:
    one = case("run", "checkpoint.keep_last=2")
    start = one.start({"at": STEP, "step": 3, "do": "kill-all", "rank": 0})
    start.wait()
    held = one.checkpoints / "iter_0000001" / "common.pt"
    if subprocess.run(["chattr", "+i", str(held)], capture_output=True).returncode:
        pytest.skip("chattr +i is not possible here")
    try:
        start = one.start({"at": STEP, "step": 9, "do": "kill-all", "rank": 0})
        start.wait()
        assert "warning: " in start.out() and "iter_0000001 cannot be removed" in start.out(), start.told()
        assert "Operation not permitted" in start.out()
        assert_whole(one, 8)
        hit("S8")
    finally:
        for path in one.checkpoints.rglob("common.pt"):  # wherever it is now
            subprocess.run(["chattr", "-i", str(path)], check=True)
    one.finish()
    assert one.steps() == [11, 12]
    assert_same_end(one, reference)


@pytest.mark.row("S9")
def test_a_save_slower_than_the_grace(case: Callable[..., Case], reference: End, hit: Callable[..., None]) -> None:
    one = case("run", "run.grace_s=1")
    slow = {"at": WRITE, "do": "sleep", "s": 2.5, "every": True}
    start = one.start(slow, {"at": WRITE, "call": 2, "rank": 0, "do": "term"})
    began = time.monotonic()
    codes = start.wait()
    assert time.monotonic() - began < 30 and codes[0] == 1 and codes[1] != 0, start.told()
    assert "too short, the last steps would be lost" in start.out(), start.told()
    assert "SIGTERM: not done within 1 s, leaving without a save" in start.out()
    assert_whole(one, 1)
    hit("S9")
    one.finish(more=["run.grace_s=30"])
    assert_same_end(one, reference)


POINTERS = [b"", b"garbage", b"../../x", b"-5", b"99999999", b"\xff\xfe\x00", b"/etc/passwd", b"release", None]


@pytest.mark.row("S10", "X2")
def test_a_pointer_that_is_none(cut: Callable[..., Case], reference: End, hit: Callable[..., None]) -> None:
    one = cut("run")
    path = one.checkpoints / "latest_checkpointed_iteration.txt"
    for content in POINTERS:
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        start = one.start({"at": STEP, "rank": 0, "do": "kill-all"})
        assert start.wait(20) == [-9, -9], start.told()
        assert f"resumed step 6 from {one.checkpoints}/iter_0000006" in start.out(), (content, start.told())
        if content is None:
            path.write_text("gone")
        hit("X2" if content and b"/" in content else "S10")
    one.finish()
    assert_same_end(one, reference)


@pytest.mark.row("S11")
def test_a_weight_that_is_no_number_is_never_saved(
    case: Callable[..., Case], reference: End, hit: Callable[..., None]
) -> None:
    one = case("run")
    start = one.start({"at": "sft.checkpoint.saver:engine_state.is_finite", "rank": 1, "call": 4, "do": "nan-weight"})
    assert start.wait() == [2, 2], start.told()
    assert "step 4 was not saved: a weight is not finite; such a state is never saved" in start.out(), start.told()
    assert one.steps() == [1, 2, 3] and one.status()["status"] == "failed-fatal"
    hit("S11")
    one.finish()
    assert_same_end(one, reference)
