"""The checkpoints in an object store: which are complete, which one a run continues from, and which are removed."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from sft.checkpoint import manifest
from sft.checkpoint.manifest import Manifest
from sft.checkpoint.remote_folder import RemoteFolder
from sft.checkpoint.train_state import TrainState, recipe_values
from sft.cli import main
from sft.data.packing import plan_files
from sft.errors import CheckpointError
from sft.files.file_digest import entry_of
from tests.builders import RECIPE, parsed
from tests.object_store import Server

URL = "s3://bucket/runs/a"


def copied(remote: RemoteFolder, folder: Path, step: int, text: str = "weights", **facts: object) -> Path:
    """A checkpoint of one file, in `folder` and in the store."""
    path = folder / f"iter_{step:07d}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "__0_0.distcp").write_text(text)
    entries = {"__0_0.distcp": entry_of(path / "__0_0.distcp")}
    manifest.write(path, Manifest(files=entries, facts={"step": step, **facts}))
    remote.send(step, path, entries, remote.begin(step, set(entries)))
    remote.publish(step, path, give_up_after=None)
    return path


def test_a_checkpoint_is_complete_as_long_as_it_has_its_manifest(s3: Server, tmp_path: Path) -> None:
    remote = RemoteFolder(URL)
    assert remote.steps() == [] and remote.newest() is None and not remote.is_complete(4)
    copied(remote, tmp_path, 4)
    copied(remote, tmp_path, 12_345_678)
    assert remote.steps() == [4, 12_345_678] and remote.newest() == 12_345_678 and remote.is_complete(4)
    assert s3.content("runs/a/")["latest_checkpointed_iteration.txt"] == b"12345678"
    remote.begin(12_345_678, {"__0_0.distcp"})
    assert remote.steps() == [4] and remote.newest() == 4


@pytest.mark.parametrize(
    "pointer, newest", [(b"2", 2), (b"3", 2), (b"9", 4), (b"1", 4), (b"", 4), (b"../2", 4), (b"\xff", 4)]
)
def test_the_pointer_as_in_a_folder(s3: Server, tmp_path: Path, pointer: bytes, newest: int) -> None:
    remote = RemoteFolder(URL)
    copied(remote, tmp_path, 2)
    copied(remote, tmp_path, 4)
    remote._store.write("latest_checkpointed_iteration.txt", pointer)
    assert remote.newest() == newest


def test_only_what_did_not_arrive_is_sent_again(s3: Server, tmp_path: Path) -> None:
    remote, path = RemoteFolder(URL), tmp_path / "iter_0000004"
    path.mkdir()
    for name, text in {"a": "same", "b": "new!", "c": "none"}.items():
        (path / name).write_text(text)
    entries = {name: entry_of(path / name) for name in "abc"}
    (tmp_path / "old").write_text("old!")
    remote._store.upload(path / "a", "iter_0000004/a", entries["a"].sha256)
    remote._store.upload(tmp_path / "old", "iter_0000004/b", entry_of(tmp_path / "old").sha256)  # the same size
    remote._store.upload(tmp_path / "old", "iter_0000004/of_another_layout", "")
    s3.requests.clear()
    assert remote.send(4, path, entries, remote.begin(4, set(entries))) == 8
    assert [path.rpartition("/")[2] for method, path, _ in s3.requests if method == "PUT"] in (["b", "c"], ["c", "b"])
    assert s3.content("runs/a/iter_0000004/") == {"a": b"same", "b": b"new!", "c": b"none"}


def test_a_load_requests_the_bytes_that_it_needs_and_hardly_more(s3: Server, tmp_path: Path) -> None:
    """Listings, pointer and manifest included: at most 1.05 of the bytes of the checkpoint."""
    remote, needed = RemoteFolder(URL), 2_000_000
    copied(remote, tmp_path / "a", 2, "old" * needed)
    path = copied(remote, tmp_path / "a", 4, "x" * needed)
    (tmp_path / "b").mkdir()
    s3.requests.clear()
    step = remote.newer(tmp_path / "b")
    assert step == 4
    remote.read_manifest(step, tmp_path / "b")
    entries = manifest.read(tmp_path / "b").files
    remote.receive(step, list(entries), entries, tmp_path / "b")
    assert (tmp_path / "b/__0_0.distcp").read_bytes() == (path / "__0_0.distcp").read_bytes()
    assert needed <= sum(size for method, _, size in s3.requests if method != "HEAD") <= 1.05 * needed


def test_later_checkpoints_are_given_up_and_old_ones_removed(s3: Server, tmp_path: Path) -> None:
    remote = RemoteFolder(URL)
    for step in (2, 4, 6, 8):
        copied(remote, tmp_path, step)
    remote.publish(6, tmp_path / "iter_0000006", give_up_after=4)
    assert remote.steps() == [2, 4, 6]
    assert {name for name in s3.content("runs/a/") if "08/" in name} == {
        "iter_0000008/__0_0.distcp",
        "iter_0000008/manifest.given-up.json",
    }
    copied(remote, tmp_path, 10)
    remote.remove_old(10, keep_last=None, keep_every=None, keep_steps=set())
    assert remote.steps() == [2, 4, 6, 10]
    remote.remove_old(10, keep_last=2, keep_every=4, keep_steps={None})
    assert remote.steps() == [4, 6, 10]
    remote.remove_old(10, keep_last=2, keep_every=None, keep_steps={4})
    assert remote.steps() == [4, 6, 10]
    remote.remove_old(10, keep_last=2, keep_every=None, keep_steps=set())
    assert remote.steps() == [6, 10] and not any("02/" in name or "04/" in name for name in s3.content("runs/a/"))


def test_a_damaged_copy_is_refused_with_the_way_out(s3: Server, tmp_path: Path) -> None:
    remote = RemoteFolder(URL)
    path = copied(remote, tmp_path, 4)
    entries = {"__0_0.distcp": entry_of(path / "__0_0.distcp")}
    remote._store.write("iter_0000004/__0_0.distcp", b"Weights")
    (tmp_path / "new").mkdir()
    with pytest.raises(CheckpointError, match=rf"Remove {URL}/iter_0000004/manifest.json, and the run continues"):
        remote.receive(4, ["__0_0.distcp"], entries, tmp_path / "new")


def test_check_and_status_know_the_copy(s3: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    run = [f"run.dir={tmp_path}/run", f"checkpoint.remote={URL}"]
    config = parsed(*run).config
    plan = plan_files.settings(config)
    facts = dict(state=asdict(TrainState(step=4)), recipe=recipe_values(config), plan=plan, layout={}, versions={})
    copied(RemoteFolder(URL), tmp_path / "elsewhere", 4, base=None, **json.loads(json.dumps(facts)))
    code = main(["status", str(recipe), *run])
    out, err = capsys.readouterr()
    assert code == 75 and f"the next start continues after step 4, from {URL}/iter_0000004" in out, (out, err)
    assert not (tmp_path / "run").exists()
    assert main(["status", str(recipe), *run, "checkpoint.resume=never"]) == 2
    assert f"checkpoint.remote = {URL} holds checkpoints of an earlier run" in capsys.readouterr().err
