"""Rows L and X of the fault matrix: damaged checkpoints from which a run is to resume, and two runs in one folder."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sft.checkpoint import manifest
from tests.faults.runs import STEP, Hit, MakeCase

AT_ONCE = {"at": STEP, "rank": 0, "do": "kill-all"}
KINDS = {6: "__1_0.distcp", 5: ".metadata", 4: "common.pt", 3: "metadata.json", 2: "manifest.json"}
CORRUPT = r"iter_\d{7}\.corrupt-\d{8}-\d{6}"


def cut_short(path: Path) -> None:
    """Removes the last byte of a file; in a manifest, this byte is a newline."""
    os.truncate(path, path.stat().st_size - (2 if path.name == "manifest.json" else 1))


def flip(path: Path) -> None:
    """Flips one bit in the middle of a file; of the manifest, in its first byte, so that it is no JSON any more."""
    content = bytearray(path.read_bytes())
    content[0 if path.name == manifest.NAME else len(content) // 2] ^= 0x10
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
    """Damages another file in each of the newest five checkpoints: the run names all five, and resumes from step 1."""
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
        f"resumed step 2 from {one.checkpoint(2)}",  # an additional file does no harm
    )
    assert canary.read_text() == "{}"
    hit("X2", 3), hit("L3", 2)
    shutil.rmtree(one.checkpoint(2))
    one.assert_same_end(beside=CORRUPT)


@pytest.mark.row("L6")
def test_ranks_that_see_other_names_follow_rank_0(cut: MakeCase, hit: Hit) -> None:
    """On a network file system, a rank may not see files that exist, or, the next time, see them late."""
    one = cut()
    blind = {"rank": 1, "do": "nothing-there", "every": True}
    listings = [{"at": f"sft.checkpoint.folders:{name}", **blind} for name in ("candidates", "published")]
    one.start(*listings, AT_ONCE).ends(-9).says("resumed step 6")
    late = {"at": "os:lstat", "rank": 1, "match": "iter_0000006/.*distcp", "do": "missing"}
    start = one.start(late, AT_ONCE).ends(-9).says("resumed step 6")
    assert len(start.fired()) == 2, start.told()
    hit("L6", 2)
    one.finish_the_same()


@pytest.mark.row("L8", "T9")
def test_missing_moments_are_no_silent_new_start(cut: MakeCase, hit: Hit) -> None:
    """A checkpoint may have no optimizer (--no-save-optim), or an optimizer stored by rank (Megatron-LM's default): the
    run names the lack, and a key lets it load the weights alone."""
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
    """The second run is refused, also in the same second, and does not disturb the first.  A lock that a dead run left
    is taken over."""
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
