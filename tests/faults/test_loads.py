"""L, X: what can be wrong with the checkpoints that a run is to go on from."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.ends import End, assert_same_end
from tests.faults.runs import Case

STEP = "sft.mcore.engine:Engine.train_step"
AT_ONCE = {"at": STEP, "rank": 0, "do": "kill-all"}
KINDS = ["__1_0.distcp", ".metadata", "common.pt", "metadata.json", "manifest.json"]  # of the checkpoints 6, 5, 4, 3, 2
CORRUPT = r"iter_\d{7}\.corrupt-\d{8}-\d{6}"


def cut_short(path: Path) -> None:
    """By a byte; the last one of a manifest is a newline."""
    os.truncate(path, path.stat().st_size - (2 if path.name == "manifest.json" else 1))


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    """One bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@pytest.mark.row("L1", "L2", "L3")
@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(cut_short, id="cut"),
        pytest.param(empty, id="empty"),
        pytest.param(Path.unlink, id="gone"),
        pytest.param(flip, id="flipped", marks=pytest.mark.quick),
    ],
)
def test_damaged_checkpoints_are_put_aside_and_an_older_one_taken(
    cut: Callable[..., Case], reference: End, hit: Callable[..., None], harm: Callable[[Path], None]
) -> None:
    """Each of the newest five in another file: all are named, and step 1 is what is left."""
    one = cut("run")
    for step, kind in zip((6, 5, 4, 3, 2), KINDS, strict=True):
        harm(one.checkpoints / f"iter_{step:07d}" / kind)
    start = one.finish()
    told = start.out()
    assert f"resumed step 1 from {one.checkpoints}/iter_0000001" in told, told
    aside = {path.name[:12] for path in one.checkpoints.glob("*.corrupt-*")}
    assert aside == {f"iter_{step:07d}" for step in (6, 5, 4, 3, 2)}, told
    for step, kind in zip((6, 5, 4, 3, 2), KINDS, strict=True):
        assert f"{one.checkpoints}/iter_{step:07d}/{kind}" in told, (kind, told)
        assert f"It is {one.checkpoints}/iter_{step:07d}.corrupt-" in told
        hit("L3" if kind == "manifest.json" else "L2" if harm is flip else "L1")
    assert_same_end(one, reference, beside=CORRUPT)


@pytest.mark.row("L3", "X2")
def test_a_manifest_that_tells_something_else(
    cut: Callable[..., Case], reference: End, hit: Callable[..., None]
) -> None:
    one = cut("run")
    canary = one.folder / "canary"
    canary.write_text("{}")

    def edit(step: int, change: Callable[[dict], None]) -> None:
        path = one.checkpoints / f"iter_{step:07d}" / "manifest.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    edit(6, lambda told: told["files"].update({"../../../canary": {"bytes": 2, "sha256": "0" * 64}}))
    edit(5, lambda told: told["files"].update({str(canary): {"bytes": 2, "sha256": "0" * 64}}))
    edit(4, lambda told: told["files"]["common.pt"].update(sha256="0" * 64))
    shard = one.checkpoints / "iter_0000003" / "__0_0.distcp"
    shard.rename(one.folder / "elsewhere")
    shard.symlink_to(one.folder / "elsewhere")
    (one.checkpoints / "iter_0000002" / "extra.bin").write_text("not of this checkpoint")
    start = one.finish()
    told = start.out()
    assert "iter_0000006/manifest.json names '../../../canary', which does not lie in this folder" in told, told
    assert f"iter_0000005/manifest.json names '{canary}', which does not lie in this folder" in told
    assert "iter_0000004/common.pt is not what was written" in told
    assert "iter_0000003/__0_0.distcp is not a plain file" in told
    assert f"resumed step 2 from {one.checkpoints}/iter_0000002" in told  # a file more does no harm
    assert canary.read_text() == "{}"
    hit("X2", 3), hit("L3", 2)
    shutil.rmtree(one.checkpoints / "iter_0000002")
    assert_same_end(one, reference, beside=CORRUPT)


@pytest.mark.row("L2")
def test_without_digests_only_sizes_are_compared(cut: Callable[..., Case], hit: Callable[..., None]) -> None:
    """checkpoint.verify=size: a flipped bit goes unseen, as it says; a cut file does not."""
    one = cut("run", "checkpoint.verify=size")
    flip(one.checkpoints / "iter_0000006" / "__0_0.distcp")
    cut_short(one.checkpoints / "iter_0000005" / "__0_0.distcp")
    start = one.start(AT_ONCE)
    start.wait()
    assert "resumed step 6" in start.out() and "sizes verified" in start.out(), start.told()
    cut_short(one.checkpoints / "iter_0000006" / "__0_0.distcp")
    start = one.start(AT_ONCE)
    start.wait()
    assert "resumed step 4" in start.out(), start.told()
    hit("L2", 2)


@pytest.mark.row("L4")
@pytest.mark.parametrize("kind", ["__1_0.distcp", "metadata.json"])
def test_nothing_whole_is_an_error_and_no_new_run(
    cut: Callable[..., Case], hit: Callable[..., None], kind: str
) -> None:
    """Nor is the start after that one a new run: what was put aside is still a run that was to go on."""
    one = cut("run")
    for step in one.steps():
        (one.checkpoints / f"iter_{step:07d}" / kind).unlink()
    before = (one.run / "metrics.jsonl").read_bytes()
    start = one.start()
    assert start.wait() == [2, 2], start.told()
    assert "holds no checkpoint that is whole, and a run is not started over by itself" in start.err()
    for step in (1, 2, 3, 4, 5, 6):
        assert f"iter_{step:07d}/{kind}" in start.err(), start.told()
    assert "started from random weights" not in start.out() and (one.run / "metrics.jsonl").read_bytes() == before
    assert one.status()["status"] == "failed-fatal"
    hit("L4")
    start = one.start()
    assert start.wait() == [2, 2], start.told()
    assert "started from random weights" not in start.out() and (one.run / "metrics.jsonl").read_bytes() == before
    hit("L4")


@pytest.mark.row("L5")
def test_what_is_insisted_on_has_to_be_there(case: Callable[..., Case], hit: Callable[..., None]) -> None:
    one = case("run")
    for override, text in (
        ("checkpoint.resume=must", "CheckpointError: checkpoint.resume = must: "),
        (
            f"checkpoint.resume={one.folder}/typo",
            f"CheckpointError: checkpoint.resume = {one.folder}/typo: no checkpoint",
        ),
        (f"model.init_from={one.folder}/typo", f"CheckpointError: model.init_from = {one.folder}/typo: no checkpoint"),
    ):
        start = one.start(more=[override])
        assert start.wait(40) == [2, 2], start.told()
        assert start.err().startswith(text) and "\nstep " not in start.out(), start.told()
        assert not one.checkpoints.exists() or not one.steps()
        hit("L5")


@pytest.mark.row("L6")
def test_ranks_that_see_other_names_follow_rank_0(
    cut: Callable[..., Case], reference: End, hit: Callable[..., None]
) -> None:
    """As on a network file system: this rank does not see what is there, and, the next time, sees it late."""
    one = cut("run")
    blind = {"rank": 1, "do": "nothing-there", "every": True}
    start = one.start(
        {"at": "sft.checkpoint.folders:candidates", **blind},
        {"at": "sft.checkpoint.folders:published", **blind},
        AT_ONCE,
    )
    start.wait()
    assert "resumed step 6" in start.out(), start.told()
    hit("L6")
    late = {"at": "os:lstat", "rank": 1, "match": "iter_0000006/.*distcp", "do": "missing"}
    start = one.start(late, AT_ONCE)
    start.wait()
    assert len(start.fired()) == 2 and "resumed step 6" in start.out(), start.told()
    hit("L6")
    one.finish()
    assert_same_end(one, reference)


@pytest.mark.row("L7", "T7", "D5")
def test_what_would_make_another_run_is_refused(
    cut: Callable[..., Case], reference: End, hit: Callable[..., None]
) -> None:
    one = cut("run")
    tokens = one.recipe.parent / "other.jsonl"
    tokens.write_text("".join((one.recipe.parent / "chat.jsonl").read_text().splitlines(keepends=True)[:50]))
    changes = [
        ("L7", ["model.ffn_hidden_size=96"], "model.ffn_hidden_size was 64, is 96"),
        ("L7", ["model.num_layers=3"], "model.num_layers was 2, is 3"),
        ("L7", ["model.vocab_size=300"], "model.vocab_size was null, is 300"),
        ("L7", ["model.rope.base=5000.0"], "model.rope.base was 10000.0, is 5000.0"),
        ("T7", ["train.global_batch_size=4"], "train.global_batch_size was 2, is 4"),
        ("T7", ["run.seed=9"], "run.seed was 1234, is 9"),
        ("T7", ["data.seq_length=512"], "data.seq_length was 256, is 512"),
        ("D5", [f"data.train={tokens}"], "data was "),
    ]
    command = [sys.executable, "-m", "sft", "data", "prepare", str(one.recipe)]
    subprocess.run([*command, f"data.train={tokens}"], check=True, capture_output=True)
    subprocess.run([*command, "data.seq_length=512"], check=True, capture_output=True)
    for row, overrides, reason in changes:
        start = one.start(more=overrides)
        assert start.wait(40) == [2, 2], start.told()
        assert "cannot be continued with this recipe" in start.err() and reason in start.err(), start.told()
        hit(row)
    assert one.steps() == [1, 2, 3, 4, 5, 6]  # a refusal is no damage
    start = one.start(AT_ONCE, more=["run.seed=9", "checkpoint.allow_changes=[run.seed]"])
    start.wait(40)
    assert "run.seed was 1234, is 9, as allowed" in start.out(), start.told()
    hit("T7")
    one.finish()
    assert_same_end(one, reference)


@pytest.mark.row("L8", "T9")
def test_missing_moments_are_no_silent_new_start(cut: Callable[..., Case], hit: Callable[..., None]) -> None:
    """A checkpoint without optimizer (--no-save-optim), or with one kept by rank (Megatron-LM's default): told; its
    weights can be asked for."""
    import torch

    one = cut("run")
    folder = one.folder / "without"
    shutil.copytree(one.checkpoints / "iter_0000006", folder / "iter_0000006")
    (folder / "latest_checkpointed_iteration.txt").write_text("6")
    path = folder / "iter_0000006" / "common.pt"
    (path.parent / "manifest.json").unlink()
    common = torch.load(path, weights_only=False)
    optimizer = common.pop("optimizer")
    common.pop("sft")
    torch.save(common, path)
    fresh = f"run.dir={one.folder}/fresh"
    start = one.start(more=[fresh, f"checkpoint.resume={folder}"])
    assert start.wait(40) == [2, 2], start.told()
    assert "holds no optimizer that can be continued here (found none)" in start.err(), start.told()
    second = {"at": STEP, "call": 2, "rank": 0, "do": "kill-all"}
    start = one.start(second, more=[f"{fresh}2", f"model.init_from={folder}"])
    start.wait(40)
    assert "started from the weights of" in start.out() and "step  1/12" in start.out(), start.told()
    by_rank = {**common, "optimizer": optimizer, "content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"}}
    torch.save(by_rank, path)
    start = one.start(more=[fresh, f"checkpoint.resume={folder}", "parallel.cp=1", "parallel.tp=2"])
    assert start.wait(40) == [2, 2], start.told()
    assert "(found dp_reshardable)" in start.err() and "fully-reshardable" in start.err(), start.told()
    hit("T9")
    hit("L8", 2)


@pytest.mark.row("L10", "O4")
def test_two_runs_in_one_folder(case: Callable[..., Case], reference: End, hit: Callable[..., None]) -> None:
    """The second is refused, also in the same second; the first is not disturbed; a lock that was left is taken."""
    one, other = case("run"), case("other")
    other.overrides[0] = one.overrides[0]
    first = one.start({"at": STEP, "do": "sleep", "s": 0.4, "every": True})
    second = other.start()
    codes = second.wait(40) if first.codes() == [None, None] else []
    loser, winner = (second, first) if codes == [2, 2] else (first, second)
    assert loser.wait(40) == [2, 2] and "is in use by another run" in loser.err(), loser.told()
    hit("O4")
    assert winner.wait() == [0, 0], winner.told()
    assert_same_end(one, reference)
    hit("L10")

    left = case("left")
    left.start({"at": STEP, "call": 3, "rank": 0, "do": "kill-all"}).wait()
    assert (left.run / "run.lock").exists()
    assert "run.lock: taken over from" in left.finish().out()
    assert_same_end(left, reference)
    hit("L10")
