"""L, X: what can be wrong with the checkpoints that a run is to go on from."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.faults.runs import STEP, Hit, MakeCase

AT_ONCE = {"at": STEP, "rank": 0, "do": "kill-all"}
KINDS = {6: "__1_0.distcp", 5: ".metadata", 4: "common.pt", 3: "metadata.json", 2: "manifest.json"}
CORRUPT = r"iter_\d{7}\.corrupt-\d{8}-\d{6}"


def cut_short(path: Path) -> None:
    """By a byte; the last one of a manifest is a newline."""
    os.truncate(path, path.stat().st_size - (2 if path.name == "manifest.json" else 1))


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
        pytest.param(lambda path: os.truncate(path, 0), id="empty"),
        pytest.param(Path.unlink, id="gone"),
        pytest.param(flip, id="flipped", marks=pytest.mark.quick),
    ],
)
def test_damaged_checkpoints_are_put_aside_and_an_older_one_taken(
    cut: MakeCase, hit: Hit, harm: Callable[[Path], None]
) -> None:
    """Each of the newest five in another file: all are named, and step 1 is what is left."""
    one = cut()
    for step, kind in KINDS.items():
        harm(one.checkpoint(step) / kind)
    start = one.finish_the_same(beside=CORRUPT).says(f"resumed step 1 from {one.checkpoint(1)}")
    assert {path.name[:12] for path in one.checkpoints.glob("*.corrupt-*")} == {f"iter_{n:07d}" for n in KINDS}
    for step, kind in KINDS.items():
        start.says(f"{one.checkpoint(step)}/{kind}", f"renamed to {one.checkpoint(step)}.corrupt-")
        hit("L3" if kind == "manifest.json" else "L2" if harm is flip else "L1")


@pytest.mark.row("L3", "X2")
def test_a_manifest_that_tells_something_else(cut: MakeCase, hit: Hit) -> None:
    one = cut()
    canary = one.folder / "canary"
    canary.write_text("{}")
    for step, file in ((6, "../../../canary"), (5, str(canary)), (4, "common.pt")):
        path = one.checkpoint(step) / "manifest.json"
        content = json.loads(path.read_text())
        content["files"].setdefault(file, {"bytes": 2})["sha256"] = "0" * 64
        path.write_text(json.dumps(content))
    shard = one.checkpoint(3) / "__0_0.distcp"
    shard.rename(one.folder / "elsewhere")
    shard.symlink_to(one.folder / "elsewhere")
    (one.checkpoint(2) / "extra.bin").write_text("not of this checkpoint")
    one.finish().says(
        "iter_0000006/manifest.json names '../../../canary', which is not a file name in this folder",
        f"iter_0000005/manifest.json names '{canary}', which is not a file name in this folder",
        "iter_0000004/common.pt differs from the file that was saved",
        "iter_0000003/__0_0.distcp is not a plain file",
        f"resumed step 2 from {one.checkpoint(2)}",  # a file more does no harm
    )
    assert canary.read_text() == "{}"
    hit("X2", 3), hit("L3", 2)
    shutil.rmtree(one.checkpoint(2))
    one.assert_same_end(beside=CORRUPT)


@pytest.mark.row("L4")
@pytest.mark.parametrize("kind", ["__1_0.distcp", "metadata.json"])
def test_nothing_whole_is_an_error_and_no_new_run(cut: MakeCase, hit: Hit, kind: str) -> None:
    """Nor is the start after that one a new run: what was put aside is still a run that was to go on."""
    one = cut()
    files = [one.checkpoint(step) / kind for step in one.steps()]
    for file in files:
        file.unlink()
    before = (one.run / "metrics.jsonl").read_bytes()
    for told in (["holds no undamaged checkpoint, and a run that has saved is not started over", *map(str, files)], []):
        start = one.start().ends(2).says(*told)
        assert "started from random weights" not in start.out()
        assert (one.run / "metrics.jsonl").read_bytes() == before and one.status()["status"] == "failed-fatal"
        hit("L4")


@pytest.mark.row("L5")
def test_what_is_insisted_on_has_to_be_there(case: MakeCase, hit: Hit) -> None:
    one = case()
    typo = f"{one.folder}/typo"
    for key, value, text in (
        ("checkpoint.resume", "must", ", but "),
        ("checkpoint.resume", typo, " names no checkpoint: the path does not exist"),
        ("model.init_from", typo, ": the path has no checkpoint"),
    ):
        start = one.start(more=[f"{key}={value}"]).ends(2)
        assert start.err().startswith(f"CheckpointError: {key} = {value}{text}"), start.told()
        assert "\nstep " not in start.out() and not one.steps()
        hit("L5")


@pytest.mark.row("L6")
def test_ranks_that_see_other_names_follow_rank_0(cut: MakeCase, hit: Hit) -> None:
    """As on a network file system: this rank does not see what is there, and, the next time, sees it late."""
    one = cut()
    blind = {"rank": 1, "do": "nothing-there", "every": True}
    listings = [{"at": f"sft.checkpoint.folders:{name}", **blind} for name in ("candidates", "published")]
    one.start(*listings, AT_ONCE).ends(-9).says("resumed step 6")
    late = {"at": "os:lstat", "rank": 1, "match": "iter_0000006/.*distcp", "do": "missing"}
    start = one.start(late, AT_ONCE).ends(-9).says("resumed step 6")
    assert len(start.fired()) == 2, start.told()
    hit("L6", 2)
    one.finish_the_same()


@pytest.mark.row("L7", "T7", "D5")
def test_what_would_make_another_run_is_refused(cut: MakeCase, hit: Hit) -> None:
    one = cut()
    other = one.recipe.parent / "other.jsonl"
    other.write_text("".join((one.recipe.parent / "chat.jsonl").read_text().splitlines(keepends=True)[:50]))
    changes = [
        ("L7", "model.ffn_hidden_size=96", "model.ffn_hidden_size was 64, is 96"),
        ("L7", "model.num_layers=3", "model.num_layers was 2, is 3"),
        ("L7", "model.vocab_size=300", "model.vocab_size was null, is 300"),
        ("L7", "model.rope.base=5000.0", "model.rope.base was 10000.0, is 5000.0"),
        ("T7", "train.global_batch_size=4", "train.global_batch_size was 2, is 4"),
        ("T7", "run.seed=9", "run.seed was 1234, is 9"),
        ("T7", "data.seq_length=512", "data.seq_length was 256, is 512"),
        ("D5", f"data.train={other}", "data was "),
    ]
    for row, override, reason in changes:
        if override.startswith("data."):
            command = [sys.executable, "-m", "sft", "data", "prepare", str(one.recipe), override]
            subprocess.run(command, check=True, capture_output=True)
        one.start(more=[override]).ends(2).says("cannot be resumed with this recipe", reason)
        hit(row)
    assert one.steps() == [1, 2, 3, 4, 5, 6]  # a refusal is no damage
    start = one.start(AT_ONCE, more=["run.seed=9", "checkpoint.allow_changes=[run.seed]"]).ends(-9)
    start.says("run.seed was 1234, is 9, as allowed")
    hit("T7")
    one.finish_the_same()


@pytest.mark.row("L8", "T9")
def test_missing_moments_are_no_silent_new_start(cut: MakeCase, hit: Hit) -> None:
    """A checkpoint without optimizer (--no-save-optim), or with one kept by rank (Megatron-LM's default): told; its
    weights can be asked for."""
    one = cut()
    folder = one.folder / "without"
    path = folder / "iter_0000006" / "common.pt"
    shutil.copytree(one.checkpoint(6), path.parent)
    (folder / one.pointer.name).write_text("6")
    (path.parent / "manifest.json").unlink()
    common = torch.load(path, weights_only=False)
    optimizer = common.pop("optimizer")
    common.pop("sft")
    torch.save(common, path)
    fresh, resume = f"run.dir={one.folder}/fresh", f"checkpoint.resume={folder}"
    one.start(more=[fresh, resume]).ends(2).says("holds no optimizer state that this trainer can load (found none)")
    start = one.start({**AT_ONCE, "call": 2}, more=[f"{fresh}2", f"model.init_from={folder}"]).ends(-9)
    start.says("started from the weights of", "step  1/12")
    hit("L8", 2)
    by_rank = {**common, "optimizer": optimizer, "content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"}}
    torch.save(by_rank, path)
    start = one.start(more=[fresh, resume, "parallel.cp=1", "parallel.tp=2"]).ends(2)
    start.says("(found dp_reshardable)", "fully-reshardable")
    hit("T9")


@pytest.mark.row("L10", "O4")
def test_two_runs_in_one_folder(case: MakeCase, hit: Hit) -> None:
    """The second is refused, also in the same second; the first is not disturbed; a lock that was left is taken."""
    one, other = case(), case()
    other.overrides[0] = one.overrides[0]
    first = one.start({"at": STEP, "do": "sleep", "s": 0.4, "every": True})
    second = other.start()
    codes = second.wait() if first.codes() == [None, None] else []
    loser, winner = (second, first) if codes == [2, 2] else (first, second)
    loser.ends(2).says("is in use by another run")
    winner.ends(0)
    one.assert_same_end()

    left = case()
    left.start({"at": STEP, "call": 3, "rank": 0, "do": "kill-all"}).ends(-9)
    assert (left.run / "run.lock").exists()
    left.finish_the_same().says("run.lock: taken over from")
    hit("O4"), hit("L10", 2)
