"""Exports to an object store: equal to an export to a folder, complete when config.json is there, and refusals."""

from pathlib import Path

import pytest

from sft.api.models import export
from sft.console import QUIET
from sft.errors import CheckpointError, ConfigError, StorageError
from sft.files import object_store
from sft.files.object_store import ObjectStore
from sft.weights.import_hf import import_hf
from tests.object_store import Server
from tests.unit.fixtures import hf

URL, PREFIX = "s3://bucket/models/a", "models/a/"


def test_an_export_to_a_store(s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that fails in the middle is incomplete, and the same command sends the rest."""
    monkeypatch.setattr(object_store, "_RETRY_S", 0.2)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "staging"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "staging").mkdir()
    import_hf(hf.save(tmp_path / "model", "llama"), tmp_path / "checkpoint", QUIET)
    wanted = export(tmp_path / "checkpoint", tmp_path / "export", quiet=True)

    s3.before = lambda number, method, path: "503" if method == "PUT" and path.endswith("manifest.json") else None
    with pytest.raises(StorageError, match="manifest.json cannot be written"):
        export(tmp_path / "checkpoint", URL, quiet=True)
    arrived = s3.content(PREFIX)
    assert "config.json" not in arrived and "model.safetensors" in arrived and not [*(tmp_path / "staging").iterdir()]

    s3.before = lambda number, method, path: None
    s3.requests.clear()
    done = export(tmp_path / "checkpoint", URL, quiet=True)
    puts = [path.removeprefix(f"/bucket/{PREFIX}") for method, path, _ in s3.requests if method == "PUT"]
    assert puts[-1] == "config.json" and "model.safetensors" not in puts
    assert (done.folder, done.num_bytes) == (URL, wanted.num_bytes)
    files = {str(path.relative_to(tmp_path / "export")): path.read_bytes() for path in (tmp_path / "export").rglob("*")}
    assert s3.content(PREFIX) == files
    assert not [*(tmp_path / "staging").iterdir()]

    with pytest.raises(CheckpointError, match=f"^{URL} holds a model; nothing was written"):
        export(tmp_path / "checkpoint", URL, quiet=True)
    ObjectStore("s3://bucket/b").write("notes.txt", b"mine")
    with pytest.raises(CheckpointError, match="holds notes.txt, which are no part of this export; nothing was written"):
        export(tmp_path / "checkpoint", "s3://bucket/b", quiet=True)
    assert s3.content("b/") == {"notes.txt": b"mine"}


@pytest.mark.parametrize(
    "url, reason",
    [
        ("gs://bucket/a", "names a store gs://, which is not tested, so it is refused"),
        ("s3://missing/a", "the bucket does not exist"),
    ],
)
def test_refusals(s3: Server, tmp_path: Path, url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        export(tmp_path, url, quiet=True)
