"""Runs whose data are in an object store: on nodes with their own disks, and with a store that refuses them."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from sft.checkpoint.remote_folder import RemoteFolder
from sft.cli import main
from tests.launching import GOOD, RECIPE, Rank, ended, environments, records, start, tensors
from tests.object_store import ACCESS_KEY, SECRET, Server

OTHER = GOOD.replace("2 + 2?", "3 + 1?")
DATA, STORES, REMOTE = "s3://bucket/chat.jsonl", "s3://bucket/cache", "s3://bucket/runs/a"


def started(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> list[Rank]:
    """Starts a rank on each of two nodes.  A node has the disk `folder`/a or b; they share only absolute paths."""
    ranks = []
    for node, environ in zip("ab", environments(2), strict=True):
        (folder / node).mkdir(exist_ok=True)
        monkeypatch.chdir(folder / node)
        words = ["train", str(folder / "recipe.yaml"), *overrides]
        ranks.append(Rank(words, {**os.environ, **environ, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}))
    return ranks


def lose(s3: Server, ranks: list[Rank], lost: int, step: int) -> None:
    """Kills the rank of a node when it begins to send the checkpoint of `step`, and waits for the end of the other."""

    def kill(number: int, method: str, path: str) -> None:
        if method == "PUT" and f"/iter_{step:07}/__{lost}" in path:
            os.kill(ranks[lost].pid, signal.SIGKILL)

    s3.before = kill
    codes = [code for code, _, _ in ended(ranks)]
    s3.before = lambda number, method, path: None
    assert codes[lost] == -signal.SIGKILL and codes[1 - lost] not in (0, 2), codes


def verdict(node: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    """The exit code of `sft status` on a node."""
    monkeypatch.chdir(node)
    return main(["status", str(node.parent / "recipe.yaml"), *overrides])


def test_nodes_with_their_own_disks(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Data and checkpoints are in an object store.  The second node is lost, then the first, with all their files; the
    curve is that of a run on one disk."""
    from sft.files.object_store import ObjectStore

    ObjectStore("s3://bucket").write("chat.jsonl", f"{GOOD}\n{OTHER}\n".encode())
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(folder=tmp_path))
    keys = [f"data.train={DATA}", "data.cache_dir=cache", "data.num_workers=1", "train.num_steps=6"]
    keys += ["checkpoint.save_every=1", "checkpoint.keep_last=2"]
    nodes = [tmp_path / name for name in "ab"]
    nodes[0].mkdir()
    monkeypatch.chdir(nodes[0])
    assert main(["data", "prepare", str(tmp_path / "recipe.yaml"), *keys]) == 0
    (code, _, told), other = ended(started(tmp_path, monkeypatch, *keys))
    assert (code, other[0]) == (2, 2) and not (tmp_path / "run/checkpoints").exists()
    assert told.startswith("DataError: ") and "on rank 1" in told and "data.cache_remote" in told, told

    keys += [f"data.cache_remote={STORES}", "run.dir=run"]
    (code, _, told), other = ended(started(tmp_path, monkeypatch, *keys))
    assert (code, other[0]) == (2, 2) and len(told.strip().splitlines()) == 1, told
    assert told.startswith("ConfigError: run.dir = run is on another disk on each node") and "Traceback" not in told
    assert [verdict(node, monkeypatch, *keys) for node in nodes] == [2, 2]

    keys += [f"checkpoint.remote={REMOTE}"]
    monkeypatch.chdir(nodes[0])
    assert main(["data", "prepare", str(tmp_path / "recipe.yaml"), *keys]) == 0
    must = [*keys, "checkpoint.resume=must"]
    (code, _, told), other = ended(started(tmp_path, monkeypatch, *must))
    assert (code, other[0]) == (2, 2) and f"neither run/checkpoints nor {REMOTE} has a checkpoint" in told, told
    records_of: dict[int, dict[str, Any]] = {}
    for lost, step in ((1, 3), (0, 5)):
        lose(s3, started(tmp_path, monkeypatch, *keys), lost, step)
        records_of |= {record["step"]: record for record in records(nodes[0], "train")}
        assert RemoteFolder(REMOTE).steps() == [step - 2, step - 1]
        shutil.rmtree(nodes[lost])
        nodes[lost].mkdir()
        assert [verdict(node, monkeypatch, *keys) for node in nodes] == [75, 75]
    # no start of node a is left; the store knows them
    monkeypatch.chdir(nodes[0])
    assert main(["data", "prepare", str(tmp_path / "recipe.yaml"), *keys]) == 0
    first, second = ended(started(tmp_path, monkeypatch, *must))
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert "resumed step 4 from run/checkpoints/iter_0000004" in first[1]
    records_of |= {record["step"]: record for record in records(nodes[0], "train")}
    assert RemoteFolder(REMOTE).steps() == [5, 6]
    assert [verdict(node, monkeypatch, *keys) for node in nodes] == [0, 0]
    assert [[*(node / "run/checkpoints").glob("iter_*")] for node in nodes] == [[], []]
    stores = [sorted(path.name for path in (node / "cache").glob("*/tokens.npy")) for node in nodes]
    assert stores[0] == stores[1] != []

    (tmp_path / "chat.jsonl").write_text(f"{GOOD}\n{OTHER}\n")
    same = ["train.num_steps=6", "checkpoint.save_every=6"]
    (code, _, told), _ = start(tmp_path, [f"run.dir={tmp_path}/local/run", *same])
    assert code == 0, told
    assert [records_of[step] for step in range(1, 7)] == records(tmp_path / "local", "train")
    for name, content in s3.content("runs/a/iter_0000006/").items():
        (tmp_path / name).write_bytes(content)
    assert tensors(tmp_path) == tensors(tmp_path / "local/run/checkpoints/iter_0000006")


REFUSALS = {
    "403 Forbidden|RequestTimeTooSkewed": "the clock of this machine differs too much from that of the store",
    "301 Moved Permanently|PermanentRedirect": "the bucket is in another region; set AWS_REGION",
    "400 Bad Request|AuthorizationHeaderMalformed": "the bucket is in another region; set AWS_REGION",
}


@pytest.mark.parametrize("answer", REFUSALS)
def test_a_store_that_refuses_the_run(s3: Server, tmp_path: Path, answer: str) -> None:
    (tmp_path / "chat.jsonl").write_text(GOOD)
    s3.before = lambda number, method, path: answer
    (code, out, told), other = start(tmp_path, [f"checkpoint.remote={REMOTE}"])
    assert code == 2 and other == (2, "", ""), (told, other)
    assert told.startswith(f"ConfigError: {REMOTE}/") and REFUSALS[answer] in told and "Traceback" not in told, told
    assert len(told.strip().splitlines()) == 1
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for text in (written, out.encode(), told.encode()):
        assert SECRET.encode() not in text and ACCESS_KEY.encode() not in text
    assert not (tmp_path / "run/checkpoints").exists()
