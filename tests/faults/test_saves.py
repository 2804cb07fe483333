"""Rows S of the fault matrix: at every instant of a save there is a whole checkpoint, and the run resumes from it."""

import subprocess
import sys

import pytest

from tests.faults.runs import STEP, Case, Fault, Hit, MakeCase, mounted

ASYNC = "checkpoint.async_save=true"
WRITE = "sft.checkpoint.saver:engine_state.write"
ITEM = "torch.distributed.checkpoint.filesystem:_write_item"
# Inside rmtree, after this file is removed: then the rest of the folder does not look like a checkpoint.
UNLINK = {"at": "os:unlink", "match": "metadata.json.*dir_fd", "when": "after"}

# (what happens, the fault, whether the run resumes from the new checkpoint); {name} is the folder of the save
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
    [pytest.param([], "kill", id="rank"), pytest.param([ASYNC], "kill-all", id="all", marks=pytest.mark.quick)],
)
def test_killed_at_every_point_of_a_save(case: MakeCase, hit: Hit, overrides: list[str], do: str) -> None:
    """Every second kill strikes the second save of a start, so that the run makes progress."""
    one = case("checkpoint.keep_last=2", *overrides)
    at = 0  # the step from which the run resumed
    for number, (what, fault, is_new) in enumerate(POINTS):
        saves = 2 if number % 2 == 0 and not is_new and "swept" not in what else 1
        name = f"iter_{at + saves:07d}"
        fault = {key: value.format(name=name) if key == "match" else value for key, value in fault.items()}
        if fault.pop("nth", False):
            fault["call"] = saves
        start = one.start({**fault, "do": do})
        assert -9 in start.wait() and len(start.fired()) == 1, (what, start.told())
        at += saves if is_new else saves - 1
        one.assert_whole(at)
        hit("S1"), hit("T1")
    one.finish_the_same()


@pytest.mark.row("S2", "S4")
@pytest.mark.parametrize("overrides", [[], [ASYNC]], ids=["waiting", "background"])
def test_a_save_that_fails_is_told_and_training_goes_on(case: MakeCase, hit: Hit, overrides: list[str]) -> None:
    """The disk is full where one rank writes, where rank 0 writes, and before anything is written; at most two saves in
    a row fail."""
    full = {"do": "full"}
    faults = [
        {"at": ITEM, "rank": 1, "match": "iter_0000002", "call": 3, **full},
        {"at": "sft.checkpoint.saver:manifest.write", "rank": 0, "call": 3, **full},
        {"at": "sft.files.atomic_files:flush", "rank": 0, "match": "iter_0000007.tmp.*json", **full},
        {"at": "shutil:disk_usage", "rank": 0, "call": 10, "do": "no-room"},
    ]
    one = case(*overrides)
    start = one.start(*faults).ends(0)
    start.says("step 2 was not saved: iter_0000002.tmp-", "step 10 was not saved: it needs")
    start.says("rank 1: the disk is full (OSError: [Errno 28] No space left")
    assert len(start.fired()) == start.out().count("WARNING: the checkpoint of step ") == 4, start.told()
    hit("S2", 4)
    hit("S4", 3 if overrides else 0)
    assert len(one.steps()) == 8 and 2 not in one.steps() and 10 not in one.steps()
    one.assert_same_end()


@pytest.mark.row("S4")
def test_a_bug_in_the_background_ends_the_run(case: MakeCase) -> None:
    one = case(ASYNC)
    one.start({"at": "sft.checkpoint.saver:manifest.entry_of", "rank": 0, "call": 7, "do": "error"}).ends(1)
    assert one.status()["status"] == "failed-retryable", one.status()
    one.finish_the_same()


@pytest.mark.quick
@pytest.mark.row("S4")
def test_a_run_that_is_done_waits_for_its_last_save(case: MakeCase) -> None:
    one = case(ASYNC, "checkpoint.save_every=11", "checkpoint.save_last=false")
    one.start({"at": ITEM, "rank": 1, "match": "iter_0000011", "do": "full"}).ends(1).says(
        "the checkpoint of step 11 was not saved"
    )
    assert one.status()["status"] == "failed-retryable"
    one.finish()
    assert one.steps() == [11] and one.status()["saved_step"] == 11


@pytest.mark.row("S2")
def test_a_disk_that_is_really_full(case: MakeCase, hit: Hit) -> None:
    """The disk has room for three checkpoints.  The run ends after three failed saves, and continues once there is room
    again."""
    one = case()
    # The free space is a guess, because other programs may also write to the disk.
    guess = {"at": "shutil:disk_usage", "rank": 0, "do": "much-room", "every": True}
    with mounted(one.checkpoints, "-t", "tmpfs", "-o", "size=3m", "tmpfs"):
        for faults, told in (([], "the disk has"), ([guess], "the disk is full (")):
            one.start(*faults).ends(1).says(told, "in a row: 3")
            one.assert_whole()
            assert not [path for path in one.checkpoints.iterdir() if ".tmp" in path.name]
            hit("S2", 3)
        subprocess.run(["mount", "-o", "remount,size=50m", str(one.checkpoints)], check=True)
        one.finish_the_same()


@pytest.mark.row("S2")
def test_a_full_shared_memory(case: MakeCase) -> None:
    """Neither the preparation of two files by two processes nor the ranks need space in /dev/shm."""
    fill = "mount -t tmpfs -o size=4k tmpfs /dev/shm && head -c 4096 /dev/zero > /dev/shm/full"
    private = ["unshare", "--mount", "sh", "-c", f'{fill} && exec "$@"', "sh"]  # the mount ends with the process
    if subprocess.run([*private, "true"], capture_output=True).returncode:
        pytest.skip("cannot mount")
    one = case("checkpoint.async_save=true")
    files = [str(one.recipe.with_name(name)) for name in ("chat.jsonl", "held_out.jsonl")]
    prepare = [
        *private,
        sys.executable,
        "-m",
        "sft",
        "data",
        "prepare",
        str(one.recipe),
        f"data.cache_dir={one.folder}",
    ]
    subprocess.run([*prepare, f"data.train=[{', '.join(files)}]", "data.num_workers=2"], check=True)
    one.launch([*private, sys.executable, "-m", "sft", "train"], more=["--processes", "2"]).ends(0)
    one.assert_same_end()


@pytest.mark.row("S3")
@pytest.mark.parametrize("which", ["run", "checkpoints"])
def test_a_read_only_folder_is_found_before_the_first_step(cut: MakeCase, which: str) -> None:
    one = cut()
    folder = one.run if which == "run" else one.checkpoints
    with mounted(folder, "--bind", str(folder)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        # Only rank 0 reads run.dir, before the ranks meet, so a launcher has to end the other rank.
        start = one.torchrun().ends(1) if which == "run" else one.start().ends(2)
        start.says("read-only file system" if which == "run" else "Read-only file system", str(folder))
        assert "\nstep " not in start.out()


@pytest.mark.row("S5", "G3")
def test_a_signal_during_a_background_save(case: MakeCase) -> None:
    one = case(ASYNC)
    slow = {"at": "sft.checkpoint.saver:folders.publish", "rank": 0, "call": 3, "do": "sleep", "s": 1.0}
    start = one.start({"at": ITEM, "rank": 1, "match": "iter_0000003", "do": "term"}, slow).ends(75)
    assert len(start.fired()) == 2 and one.status()["status"] == "preempted"
    one.assert_whole(one.status()["step"])
    one.finish_the_same()


@pytest.mark.row("S6")
def test_no_step_is_saved_twice(case: MakeCase, hit: Hit) -> None:
    """A save can be due by the step number, by the clock and by a signal."""
    one = case("checkpoint.save_every=2", "checkpoint.save_every_minutes=0.0001")
    start = one.start({"at": STEP, "step": 4, "when": "after", "rank": 1, "do": "usr1"}).ends(75)
    assert [start.out().count(f"iter_000000{step} (") for step in (1, 2, 3, 4, 5)] == [1, 1, 1, 1, 0]
    before = one.checkpoint(4).stat().st_mtime_ns
    one.start({"at": STEP, "step": 5, "rank": 1, "do": "term"}).ends(75)
    start = one.start({"at": "sft.trainer:DataPipeline", "rank": 0, "do": "term"}).ends(75)
    assert one.pointed() == 5 and one.checkpoint(4).stat().st_mtime_ns == before
    assert "saved " not in start.out()
    hit("S6", 3)
    one.finish_the_same()


@pytest.mark.row("S7")
def test_retention_never_takes_what_is_needed(case: MakeCase, hit: Hit) -> None:
    one = case("checkpoint.keep_last=2", "checkpoint.keep_every=5", "checkpoint.keep_best=eval/lm loss", ASYNC)
    start = one.start()
    looks = 0
    while None in start.codes():
        looks += _look(one)
    start.ends(0)
    assert looks > 20 and one.steps() == [5, 10, 11, 12]  # the last checkpoint is the best one, because the loss falls
    hit("S7", 12)
    one.assert_same_end()


def _look(one: Case) -> bool:
    """Checks the checkpoint that the pointer names; may run at any instant."""
    try:
        pointed = one.pointed()
    except FileNotFoundError:
        return False
    is_there = (one.checkpoint(pointed) / "manifest.json").exists()
    assert is_there or one.pointed() != pointed, f"{pointed} is pointed at and gone"
    return True


@pytest.mark.row("S8")
def test_a_checkpoint_that_cannot_be_removed(case: MakeCase) -> None:
    one = case("checkpoint.keep_last=2")
    one.start({"at": STEP, "step": 3, "do": "kill-all", "rank": 0}).ends(-9)
    held = one.checkpoint(1) / "common.pt"
    if subprocess.run(["chattr", "+i", str(held)], capture_output=True).returncode:
        pytest.skip("chattr +i is not possible here")
    try:
        start = one.start({"at": STEP, "step": 9, "do": "kill-all", "rank": 0}).ends(-9)
        start.says("WARNING: ", "iter_0000001 cannot be removed", "Operation not permitted")
        one.assert_whole(8)
    finally:
        for path in one.checkpoints.rglob("common.pt"):  # the folder may be renamed meanwhile
            subprocess.run(["chattr", "-i", str(path)], check=True)
    one.finish_the_same()
    assert one.steps() == [11, 12]


@pytest.mark.row("S9")
def test_a_save_slower_than_the_grace(case: MakeCase) -> None:
    one = case("run.grace_s=1")
    slow = {"at": WRITE, "do": "sleep", "s": 2.5, "every": True}
    start = one.start(slow, {"at": WRITE, "call": 2, "rank": 0, "do": "term"})
    codes = start.wait()
    assert codes[0] == 1 and codes[1] != 0, start.told()
    start.says("This is too short: the last steps would be lost")
    start.says("SIGTERM: the run has not ended within 1 s, exiting without a save")
    one.assert_whole(1)
    one.finish_the_same(more=["run.grace_s=30"])


POINTERS = [b"", b"garbage", b"../../x", b"-5", b"99999999", b"\xff\xfe\x00", b"/etc/passwd", b"release", None]


@pytest.mark.row("S10", "X2")
def test_a_pointer_that_is_none(cut: MakeCase, hit: Hit) -> None:
    one = cut()
    for content in POINTERS:
        one.pointer.unlink(missing_ok=True)
        if content is not None:
            one.pointer.write_bytes(content)
        start = one.start({"at": STEP, "rank": 0, "do": "kill-all"}).ends(-9)
        start.says(f"resumed step 6 from {one.checkpoint(6)}")
        hit("X2" if content and b"/" in content else "S10")
    one.finish_the_same()
