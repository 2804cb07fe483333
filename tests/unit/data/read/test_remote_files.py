"""Data files at URLs: equal samples, one transfer for each version, tokenised stores that travel, and refusals."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from sft.cli import main
from sft.data.cache.corpus import Corpus, find_prepared, map_prepared
from sft.data.chat.tokenizer import ByteTokenizer
from sft.data.read import remote_files
from sft.errors import ConfigError, DataError, StorageError
from tests.builders import RECIPE
from tests.object_store import SECRET, Server
from tests.unit.corpora import LONG, ROW, corpus_of, write
from tests.unit.fixtures import hub as fake
from tests.unit.fixtures.folder import config

URL, STORES = "s3://bucket/chats", "s3://bucket/cache"


def put(name: str, content: bytes) -> str:
    from sft.files.object_store import ObjectStore

    ObjectStore(URL).write(name, content)
    return f"{URL}/{name}"


def lines(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def gets(s3: Server, part: str = "") -> list[str]:
    return [path for method, path, _ in s3.requests if method == "GET" and part in path]


def trained(urls: list[str], cache: Path, **keys: object) -> Corpus:
    """The corpus as a run sees it, which neither tokenises nor fetches data files."""
    data = config(**keys)
    return map_prepared(find_prepared(urls, data, ByteTokenizer(), cache, command="sft data prepare"), data, command="")


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_samples_are_those_of_a_local_file_and_each_byte_comes_once(s3: Server, tmp_path: Path, kind: str) -> None:
    local = tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist([ROW, LONG]), local)
    else:
        local.write_bytes(lines(ROW, LONG) if kind == "jsonl" else gzip.compress(lines(ROW, LONG)))
    url, cache = put(local.name, local.read_bytes()), tmp_path / "cache"
    wanted = corpus_of(str(local))
    s3.requests.clear()
    said: list[str] = []
    made = corpus_of(url, cache=cache, log=said)
    assert made.digest == wanted.digest and made.sources == wanted.sources == ("a",)
    assert [made.sample(i).tokens.tolist() for i in range(2)] == [wanted.sample(i).tokens.tolist() for i in range(2)]
    assert sum(size for method, _, size in s3.requests if method == "GET") == local.stat().st_size
    assert said[0].startswith(f"{url}: fetched to {made.files[0]}") and f"bucket/chats/a.{kind}" in str(made.files[0])

    s3.requests.clear()  # neither another preparation nor a run reads the object again
    assert corpus_of(url, cache=cache).digest == trained([url], cache).digest == wanted.digest
    assert gets(s3) == [] and [method for method, _, _ in s3.requests] == ["HEAD"] * 2


def test_copies_have_the_names_of_their_urls(s3: Server, tmp_path: Path) -> None:
    urls = [put("a/x.jsonl", lines(ROW)), put("b/x.jsonl", lines(LONG))]
    corpus = corpus_of(*urls, cache=tmp_path / "cache")
    assert corpus.sources == tuple(urls)
    assert [corpus.name(i) for i in range(2)] == [f"{url}:1" for url in urls]
    put("b/x.jsonl", b"{")
    with pytest.raises(DataError, match=f"^{urls[1]}:1: "):
        corpus_of(*urls, cache=tmp_path / "cache")
    of_hub = Path("hf/hub/datasets--org--my--chats/snapshots/8049/d/a.parquet")
    assert remote_files.url_of(of_hub) == "hf://datasets/org/my--chats/d/a.parquet"
    assert remote_files.url_of(Path("remote/a.jsonl")) is None


def test_a_file_that_changes_is_noticed(s3: Server, tmp_path: Path) -> None:
    url = put("a.jsonl", lines(ROW))
    old = corpus_of(url, cache=tmp_path)
    put("a.jsonl", lines(LONG))
    with pytest.raises(DataError, match=f"^{url} was not copied to .* or was changed since.*: sft data prepare$"):
        trained([url], tmp_path)
    new = corpus_of(url, cache=tmp_path)
    assert new.digest != old.digest and trained([url], tmp_path).digest == new.digest
    assert new.files != old.files and old.files[0].exists()  # an older run may still read it


def test_a_transfer_that_ends_leaves_no_file(s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sft.files import object_store

    monkeypatch.setattr(object_store, "_RETRY_S", 0.2)
    url = put("a.jsonl", lines(ROW))
    s3.before = lambda number, method, path: "503" if method == "GET" else None
    with pytest.raises(StorageError, match="a.jsonl cannot be read"):
        corpus_of(url, cache=tmp_path)
    assert [path for path in (tmp_path / "remote").rglob("*") if path.is_file()] == []


def test_stores_travel_and_are_tokenised_once(s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three machines with their own disks: the first tokenises, the others fetch, also if they train at once."""
    path, said = write(tmp_path / "a.jsonl", ROW, LONG), []
    first = corpus_of(path, cache=tmp_path / "1", cache_remote=STORES)
    (store,) = {name.partition("/")[0] for name in s3.content("cache/")}
    assert [path for method, path, _ in s3.requests if method == "PUT"][-1] == f"/bucket/cache/{store}/ledger.json"
    second = corpus_of(path, cache=tmp_path / "2", cache_remote=STORES, log=said)
    assert second.digest == first.digest and "fetched" in said[0] and "(cached)" in said[1] and not second.work
    third = trained([path], tmp_path / "3", cache_remote=STORES)
    assert third.digest == first.digest and third.sample(1).tokens.tolist() == first.sample(1).tokens.tolist()
    assert not any(path.name.endswith(".work") for path in (tmp_path / "3").iterdir())

    s3.requests.clear()
    corpus_of(path, cache=tmp_path / "1", cache_remote=STORES)
    assert len(s3.requests) == 1  # asks whether the store is there
    (tmp_path / "1" / store / "ledger.json").read_bytes()

    from sft.files.object_store import ObjectStore

    ObjectStore(STORES).remove([f"{store}/ledger.json"])  # a transfer that was killed: the rest is sent
    s3.requests.clear()
    corpus_of(path, cache=tmp_path / "1", cache_remote=STORES)
    assert [path for method, path, _ in s3.requests if method == "PUT"] == [f"/bucket/cache/{store}/ledger.json"]

    damaged = bytearray(s3.content("cache/")[f"{store}/tokens.npy"])
    damaged[-1] ^= 1
    ObjectStore(STORES).write(f"{store}/tokens.npy", bytes(damaged))
    with pytest.raises(DataError, match=f"^{STORES}/{store} is damaged.  Remove {STORES}/{store}/ledger.json, and run"):
        trained([path], tmp_path / "4", cache_remote=STORES)
    assert not (tmp_path / "4" / store).exists()


def test_the_command_line(s3: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training and held-out files at URLs; a sweep removes what another version left."""
    url, held_out = put("a.jsonl", lines(ROW, LONG)), put("b.jsonl", lines(LONG))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    keys = [f"run.dir={tmp_path}/run", f"data.train={url}", f"data.eval=[{held_out}]", "data.num_workers=1"]
    assert main(["data", "prepare", str(recipe), *keys]) == 0
    put("a.jsonl", lines(ROW))
    assert main(["data", "prepare", str(recipe), *keys, "--sweep"]) == 0
    copies = [path.name for path in (tmp_path / "run/cache/remote").rglob("*.jsonl")]
    assert sorted(copies) == ["a.jsonl", "b.jsonl"]
    capsys.readouterr()
    for wrong, reason in {
        "gs://bucket/a.jsonl": "names a store gs://, which is not tested, so it is refused",
        "s3://bucket": "names no file; give s3://BUCKET/FILE",
        "s3://bucket/*.jsonl": "holds a pattern, and patterns are not expanded.  Name the files.",
        "hf://models/a/b/c.jsonl": "must be hf://datasets/OWNER/NAME/FILE",
        "s3://bucket/missing.jsonl": "data file s3://bucket/missing.jsonl does not exist.",
        "s3://missing/a.jsonl": "the bucket does not exist",
    }.items():
        assert main(["data", "prepare", str(recipe), *keys, f"data.train={wrong}"]) == 2
        error = capsys.readouterr().err
        assert reason in error and wrong in error and SECRET not in error and "Traceback" not in error
    assert main(["data", "prepare", str(recipe), *keys, "data.cache_remote=az://x/y"]) == 2
    assert "data.cache_remote" in capsys.readouterr().err
    assert main(["data", "prepare", str(recipe), *keys, f"data.chat_template={url}"]) == 2
    assert "is a URL, which only data.train and data.eval may name" in capsys.readouterr().err


HUB_SESSION = """
import sys
from pathlib import Path
from sft.console import QUIET
from sft.data.read.remote_files import find_staged, stage
from sft.errors import DataError
for url in sys.argv[2:]:
    try:
        path = find_staged(url[1:], Path("c"), command="prepare") if url[0] == "?" else stage(url, Path("c"), QUIET)
        print(path.read_text().strip())
    except DataError as error:
        print(f"refused: {error}")
"""


def test_files_of_the_hub(tmp_path: Path) -> None:
    """main moves: a run keeps the commit that was staged last, without a network; a commit stays."""
    url = "hf://datasets/org/chats"

    def session(*urls: str, **environment: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", HUB_SESSION, "", *urls],
            env={**fake.environment(hub, tmp_path / "home"), **environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    with fake.serving() as hub:
        commits = []
        for text in ("old", "new"):
            (tmp_path / text / "d").mkdir(parents=True)
            (tmp_path / text / "d" / "a.jsonl").write_text(text)
            commits.append(hub.add("datasets/org/chats", tmp_path / text))
        newest = hub.commits["datasets/org/chats"].pop()
        assert session(f"{url}/d/a.jsonl", f"?{url}/d/a.jsonl") == ["old", "old"]
        hub.commits["datasets/org/chats"].append(newest)
        hub.asked.clear()
        found = session(f"?{url}/d/a.jsonl", HF_ENDPOINT="http://127.0.0.1:9")
        assert found == ["old"] and hub.asked == []
        answers = session(
            f"{url}/d/a.jsonl", f"?{url}/d/a.jsonl", f"{url}@{commits[0]}/d/a.jsonl", f"{url}/b.jsonl",
            "hf://datasets/org/none/a.jsonl", f"{url}@v9/a.jsonl", f"?{url}/b.jsonl",
        )  # fmt: skip
        assert answers[:3] == ["new", "new", "old"] and len(hub.downloads("a.jsonl")) == 1
        assert answers[3] == f"refused: {url}/b.jsonl does not exist: dataset org/chats has no file b.jsonl."
        assert "is neither a folder nor a dataset" in answers[4] and "has no revision v9" in answers[5]
        assert answers[6].startswith(f"refused: {url}/b.jsonl was not copied to c, or was changed since.")
        (dead,) = session(f"{url}/d/a.jsonl", HF_ENDPOINT="http://127.0.0.1:9")
        assert "the Hugging Face hub cannot be reached" in dead
        assert session(f"{url}/d/a.jsonl", HF_HUB_OFFLINE="1") == ["new"]


@pytest.mark.parametrize("url", ["s3://bucket/", "s3://Bucket/a.jsonl", "az://b/a.jsonl", "hf://datasets/a/b"])
def test_urls_that_are_refused(url: str, tmp_path: Path) -> None:
    assert remote_files.refusal(url) is not None
    with pytest.raises((ConfigError, DataError)):
        corpus_of(url, cache=tmp_path)
