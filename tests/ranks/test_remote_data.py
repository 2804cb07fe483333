"""Runs whose data are in an object store: on nodes with their own disks, and with a store that refuses them."""

import os
from pathlib import Path

import pytest

from sft.cli import main
from tests.launching import GOOD, RECIPE, Rank, ended, environments, records, start
from tests.object_store import ACCESS_KEY, SECRET, Server

DATA, STORES, REMOTE = "s3://bucket/chat.jsonl", "s3://bucket/cache", "s3://bucket/runs/a"


def on_two_nodes(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> list[tuple[int, str, str]]:
    """Runs a rank on each of two nodes.  A node has the disk `folder`/a or b, and they share only run.dir."""
    ranks = []
    for node, environ in zip("ab", environments(2), strict=True):
        (folder / node).mkdir(exist_ok=True)
        monkeypatch.chdir(folder / node)
        words = ["train", str(folder / "recipe.yaml"), *overrides]
        ranks.append(Rank(words, {**os.environ, **environ, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}))
    return ended(ranks)


def test_nodes_with_their_own_disks(s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second node fetches the tokenised data from data.cache_remote; without it, the run is refused."""
    from sft.files.object_store import ObjectStore

    ObjectStore("s3://bucket").write("chat.jsonl", GOOD.encode())
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(folder=tmp_path))
    keys = [f"data.train={DATA}", "data.cache_dir=cache", "data.num_workers=1"]
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    assert main(["data", "prepare", str(tmp_path / "recipe.yaml"), *keys]) == 0
    (code, _, told), other = on_two_nodes(tmp_path, monkeypatch, *keys)
    assert (code, other[0]) == (2, 2) and not (tmp_path / "run/checkpoints").exists()
    assert told.startswith("DataError: ") and "on rank 1" in told and "data.cache_remote" in told, told

    keys += [f"data.cache_remote={STORES}"]
    monkeypatch.chdir(tmp_path / "a")
    assert main(["data", "prepare", str(tmp_path / "recipe.yaml"), *keys]) == 0
    first, second = on_two_nodes(tmp_path, monkeypatch, *keys)
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert len([path for method, path, _ in s3.requests if method == "GET" and path == "/bucket/chat.jsonl"]) == 1
    stores = [sorted(path.name for path in (tmp_path / node / "cache").glob("*/tokens.npy")) for node in "ab"]
    assert stores[0] == stores[1] != []
    losses = [record["lm loss"] for record in records(tmp_path, "train")]
    (tmp_path / "chat.jsonl").write_text(GOOD)
    (code, _, told), _ = start(tmp_path, [f"run.dir={tmp_path}/local/run"])
    assert code == 0, told
    assert losses == [record["lm loss"] for record in records(tmp_path / "local", "train")]


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
