"""A folder from another person cannot make sft read or write outside of it: every reader of names and files, with every
bad name and bad file."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sft.checkpoint import manifest
from sft.config import CheckpointConfig, ModelConfig
from sft.config.pretrained import HubSnapshot
from sft.console import QUIET
from sft.data.tokenizer.reading import read_tokenizer
from sft.errors import ConfigError, SftError
from sft.files import folder_files
from sft.files.folder_files import UnsafeFileError
from sft.hf import architecture, hub_weights
from sft.hf.pretrained import read_pretrained
from sft.hf.safetensors_files import SafetensorsFolder
from sft.mcore.checkpoint_io import metadata_index, safe_reader
from sft.metrics.results.records import read_records
from sft.recipe.load import load_recipe
from sft.weights import kept, run_folder
from sft.weights.atomic_folder import copy_companions, new_folder
from sft.weights.export.original import find_original
from sft.weights.lora import base_digest, merged_adapters
from sft.weights.lora.peft.config import read_config
from sft.weights.lora.peft.folder import read as read_adapter
from tests.builders import pretrained
from tests.unit.fixtures import torch_dist

SECRET = "a key that only its owner may read"
SIZES: dict[str, Any] = dict(num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=8)
BAD_NAMES = [
    *("", ".", "..", "../secret", "../../.bashrc", "a/../../secret", "a/..", "/etc/hostname", "a//b", "a/", "./a"),
    *("..\\secret", "C:\\x", "a\0b", "a\nb", "a\x1b[2Jb", "a\u202eb", "\ud800", "x" * 256, "/".join("a" * 21)),
]


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


# --- names in files --------------------------------------------------------------------------------------------------


def source_json(folder: Path, name: str) -> None:
    entry = {"num_bytes": len(SECRET), "sha256": hashlib.sha256(SECRET.encode()).hexdigest()}
    files = {name: entry, "config.json": entry}
    model = {"name": "m", "commit": None, "origin": "m", "tensors": None, "digests": {}}
    write_json(folder / "source.json", {"format": kept.FORMAT, **model, "files": files})
    (folder / "config.json").write_text(SECRET)


def names_of_source(folder: Path, name: str) -> None:
    source_json(folder, name)
    known = kept.read(folder)
    assert known is not None
    kept.copy(known, folder.parent / "run" / "hf")


def names_of_manifest(folder: Path, name: str) -> None:
    entry = {"bytes": len(SECRET), "sha256": ""}
    write_json(folder / "manifest.json", {"format": manifest.FORMAT, "files": {name: entry}})
    manifest.read(folder)


def names_of_safetensors_index(folder: Path, name: str) -> None:
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"w": name}})
    SafetensorsFolder(folder)


def names_of_hub_index(folder: Path, name: str) -> None:
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"w": name}})
    snapshot = HubSnapshot(name="o/m", repo="o/m", commit="1" * 40, folder=folder)
    hub_weights._weight_files(snapshot, {name: 1})


def names_of_checkpoint_index(folder: Path, name: str) -> None:
    torch_dist.save(folder)

    def move(index: Any) -> None:
        torch_dist.place_of(index, "weight").relative_path = name

    torch_dist.change_index(folder, move)
    metadata_index.read_index(folder)


NAME_READERS = [
    names_of_source,
    names_of_manifest,
    names_of_safetensors_index,
    names_of_hub_index,
    names_of_checkpoint_index,
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
@pytest.mark.parametrize("read", NAME_READERS)
def test_every_reader_refuses_every_bad_name(read: Callable[[Path, str], None], name: str, tmp_path: Path) -> None:
    folder = tmp_path / "unpacked" / "model"
    folder.mkdir(parents=True)
    for outside in (tmp_path / ".bashrc", tmp_path / "unpacked" / "secret", tmp_path / "secret"):
        outside.write_text(SECRET)
    with pytest.raises(SftError) as refused:
        read(folder, name)
    assert "\x1b" not in str(refused.value)
    assert sorted(os.listdir(tmp_path)) == [".bashrc", "secret", "unpacked"]


@pytest.mark.parametrize("name", ["a", "a.b", "additional_chat_templates/tools.jinja", "ä b", "..a", "x" * 255])
def test_plain_names_are_taken(name: str) -> None:
    assert folder_files.check_name(name) == name


@pytest.mark.parametrize("name", [None, 5, ["a"], b"a"])
def test_a_name_is_a_text(name: object) -> None:
    with pytest.raises(UnsafeFileError):
        folder_files.check_name(name)


# --- files -----------------------------------------------------------------------------------------------------------


def companions(folder: Path) -> None:
    with new_folder(folder.parent / "copy", 0) as target:
        copy_companions(folder, target)


def tokenizer(folder: Path) -> None:
    if not (folder / "tokenizer.json").exists():
        (folder / "tokenizer.json").write_text("{}")
    read_tokenizer("m", folder)


def index_of_hub(folder: Path) -> None:
    hub_weights._weight_files(HubSnapshot(name="o/m", repo="o/m", commit="1" * 40, folder=folder), None)


def weights_of_adapter(folder: Path) -> None:
    write_json(folder / "adapter_config.json", {"peft_type": "LORA", "r": 4, "lora_alpha": 4})
    read_adapter(folder)


FILE_READERS: list[tuple[str, Callable[[Path], object]]] = [
    ("config.json", architecture.read),
    ("source.json", kept.read),
    ("manifest.json", manifest.read),
    ("merged_adapters.json", merged_adapters.read),
    ("adapter_config.json", read_config),
    ("adapter_model.safetensors", weights_of_adapter),
    ("model.safetensors", SafetensorsFolder),
    ("model.safetensors", lambda folder: base_digest.digest_of(folder, folder)),
    ("model.safetensors.index.json", SafetensorsFolder),
    ("model.safetensors.index.json", index_of_hub),
    (".metadata", metadata_index.read_index),
    ("common.pt", safe_reader.common_state),
    ("tokenizer.json", companions),
    ("tokenizer.json", tokenizer),
    ("vocab.txt", tokenizer),
    ("chat_template.jinja", companions),
    ("additional_chat_templates/x.jinja", companions),
    ("additional_chat_templates/x.jinja", tokenizer),
]
HUGE = 2 << 30


def a_link(path: Path) -> None:
    secret = next(parent for parent in path.parents if parent.name == "model").with_name("secret")
    secret.write_text(SECRET)
    path.symlink_to(os.path.relpath(secret, path.parent))


def a_link_to_an_endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_huge_file(path: Path) -> None:
    path.touch()
    os.truncate(path, HUGE)  # a sparse file, which takes no space on the disk


BAD_FILES = [a_link, a_link_to_an_endless_device, a_pipe, a_huge_file]


@pytest.mark.parametrize("make", BAD_FILES)
@pytest.mark.parametrize("name, read", FILE_READERS)
def test_every_reader_refuses_every_bad_file(
    name: str, read: Callable[[Path], object], make: Callable[[Path], None], tmp_path: Path
) -> None:
    if make is a_huge_file and name == "model.safetensors":
        pytest.skip("weights have no limit")
    folder = tmp_path / "model"
    (folder / name).parent.mkdir(parents=True)
    make(folder / name)
    with pytest.raises(SftError) as refused:
        read(folder)
    assert name.rpartition("/")[2] in str(refused.value)
    assert not (tmp_path / "copy").exists()


def test_links_within_a_folder_and_within_the_cache_of_the_hub_are_right(tmp_path: Path) -> None:
    model = tmp_path / "hub" / "models--o--m"
    snapshot, blobs = model / "snapshots" / "1", model / "blobs"
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    blobs.mkdir()
    (blobs / "2").write_text("x")
    (snapshot / "vocab.txt").symlink_to("../../blobs/2")
    (snapshot / "additional_chat_templates" / "t.jinja").symlink_to("../../../blobs/2")
    (snapshot / "vocab.json").symlink_to("vocab.txt")
    target = tmp_path / "target"
    target.mkdir()
    copied = copy_companions(snapshot, target)
    assert copied == ["vocab.json", "vocab.txt", "additional_chat_templates/t.jinja"]
    assert [(target / name).is_symlink() for name in copied] == [False] * 3
    (tmp_path / "latest").symlink_to(snapshot)
    assert folder_files.regular_file(tmp_path / "latest", "vocab.txt").read_text() == "x"


@pytest.mark.parametrize("leads_to", ["../../../models--o--private/blobs/2", "../../refs/main", "../2/vocab.txt"])
def test_a_link_to_another_part_of_the_cache_is_refused(leads_to: str, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--o--m" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    path = snapshot / leads_to
    Path(os.path.normpath(path)).parent.mkdir(parents=True)
    Path(os.path.normpath(path)).write_text(SECRET)
    (snapshot / "vocab.txt").symlink_to(leads_to)
    with pytest.raises(UnsafeFileError, match="vocab.txt is a link out of the folder"):
        folder_files.regular_file(snapshot, "vocab.txt")


def test_blobs_that_are_a_link_are_not_the_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "unpacked" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id").write_text(SECRET)
    (tmp_path / "unpacked" / "blobs").symlink_to(tmp_path / ".ssh")
    (snapshot / "vocab.txt").symlink_to("../../blobs/id")
    with pytest.raises(UnsafeFileError, match="out of the folder"):
        folder_files.regular_file(snapshot, "vocab.txt")


def test_a_copy_does_not_leave_its_target(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source / "a", target, tmp_path / "home"):
        folder.mkdir(parents=True)
    (source / "a" / "b").write_text("new")
    (target / "a").symlink_to(tmp_path / "home")
    with pytest.raises(UnsafeFileError, match="leaves"):
        folder_files.copy(source, "a/b", target)
    assert not os.listdir(tmp_path / "home")


# --- a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["model.hf", "model.init_from", "checkpoint.resume"])
def test_a_model_does_not_replace_a_file_beside_the_run(place: str, tmp_path: Path) -> None:
    """source.json names ../../.bashrc, and this file exists in the unpacked archive."""
    home, unpacked = tmp_path / "home", tmp_path / "archive"
    run = home / "run"
    run.mkdir(parents=True)
    (home / ".bashrc").write_text("mine")
    folder = unpacked / "a" / "model" if place == "model.hf" else unpacked / "a" / "hf"
    folder.mkdir(parents=True)
    source_json(folder, "../../.bashrc")
    (unpacked / ".bashrc").write_text(SECRET)
    model: dict[str, Any] = {"pretrained": pretrained(folder)} if place == "model.hf" else {}
    checkpoint = unpacked / "a" / "iter_0000001"
    checkpoint.mkdir()
    (checkpoint / "metadata.json").write_text("{}")
    if place == "model.init_from":
        model["init_from"] = str(checkpoint)
    resume = str(checkpoint) if place == "checkpoint.resume" else "auto"
    config = ModelConfig(**SIZES, **model)
    with pytest.raises(SftError, match=r"source.json is damaged .*the name '../../.bashrc' is not the plain path"):
        run_folder.prepare(run, config, CheckpointConfig(resume=resume), QUIET, is_new=True)
    assert (home / ".bashrc").read_text() == "mine" and not os.listdir(run)


@pytest.mark.parametrize("name", ["vocab.txt", "additional_chat_templates/x.jinja", "config.json"])
def test_a_secret_behind_a_link_does_not_reach_the_run(name: str, tmp_path: Path) -> None:
    folder, run = tmp_path / "model", tmp_path / "run"
    (folder / name).parent.mkdir(parents=True)
    run.mkdir()
    if name != "config.json":
        write_json(folder / "config.json", {"model_type": "qwen2"})
    (tmp_path / "secret").write_text(SECRET)
    (folder / name).symlink_to(tmp_path / "secret")
    config = ModelConfig(**SIZES, pretrained=pretrained(folder), init_from="random")
    with pytest.raises(SftError, match="is a link out of the folder"):
        run_folder.prepare(run, config, CheckpointConfig(), QUIET, is_new=True)
    assert not os.listdir(run)


def test_tensors_behind_a_link_are_not_passed_through(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    source_json(folder, "config.json")
    save_file({"w": torch.ones(2)}, tmp_path / "private.safetensors")
    (folder / "passed_through.safetensors").symlink_to(tmp_path / "private.safetensors")
    known = kept.read(folder)
    assert known is not None
    with pytest.raises(UnsafeFileError, match="out of the folder"):
        known.passed_through()


@pytest.mark.parametrize("key", ["checkpoint.resume", "model.init_from", "model.hf", "run.dir", "run.dir, resumed"])
def test_a_link_named_hf_takes_no_model_along(key: str, tmp_path: Path) -> None:
    """An unpacked checkpoint, or the folder of a run, contains a link hf to a model of the user."""
    private, archive, run = tmp_path / "private", tmp_path / "archive", tmp_path / "run"
    source_json(private, "tokenizer.json")
    (private / "tokenizer.json").write_text(SECRET)
    for folder in (archive / "iter_0000001", run):
        folder.mkdir(parents=True)
    (archive / "iter_0000001" / "metadata.json").write_text("{}")
    link = (run if key.startswith("run.dir") else archive) / "hf"
    link.symlink_to(private)
    before = sorted(os.listdir(tmp_path)), sorted(os.listdir(run)), sorted(os.listdir(private))
    model = {"init_from": str(archive)} if key == "model.init_from" else {}
    resume = str(archive) if key == "checkpoint.resume" else "auto"
    config = ModelConfig(**SIZES, **model)
    with pytest.raises(ConfigError) as refused:
        if key == "model.hf":
            read_pretrained(str(archive))
        run_folder.prepare(run, config, CheckpointConfig(resume=resume), QUIET, is_new="resumed" not in key)
    words = "is a link to the files of a model.  Replace it by a copy of them, or remove it."
    assert str(refused.value) == f"{link} {words}"
    assert (sorted(os.listdir(tmp_path)), sorted(os.listdir(run)), sorted(os.listdir(private))) == before


@pytest.mark.parametrize("named", ["", "like", "model.hf"])
def test_an_export_takes_nothing_from_a_link_named_hf(named: str, tmp_path: Path) -> None:
    """A link does no harm if it is not needed, because a better folder comes first."""
    private, archive = tmp_path / "private", tmp_path / "archive"
    write_json(private / "config.json", {})
    (archive / "iter_0000001").mkdir(parents=True)
    (archive / "hf").symlink_to(private)
    write_json(tmp_path / "models" / "m" / "config.json", {})
    (tmp_path / "models" / "hf").symlink_to(private)
    model = tmp_path / "models" / "m"
    recipe = {"model.hf": str(model)} if named == "model.hf" else {}
    checkpoint = archive / "iter_0000001" if named != "model.hf" else tmp_path / "iter_0000001"
    if named:
        assert find_original(checkpoint, recipe, model if named == "like" else None).folder == model
    else:
        with pytest.raises(ConfigError, match=f"^{archive}/hf is a link to the files of a model"):
            find_original(checkpoint, recipe, None)


# --- files that the user names ---------------------------------------------------------------------------------------


def test_a_link_that_leads_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").symlink_to("vocab.txt")
    with pytest.raises(UnsafeFileError, match="vocab.txt is a link that leads to itself"):
        folder_files.regular_file(tmp_path, "vocab.txt")


@pytest.mark.parametrize("make", [a_pipe, a_link_to_an_endless_device, a_huge_file])
@pytest.mark.parametrize("read", [lambda path: load_recipe(str(path)), read_records])
def test_pipes_and_devices_are_not_waited_for(
    read: Callable[[Path], object], make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "file")
    if make is a_huge_file:
        os.truncate(tmp_path / "file", folder_files.METRICS_BYTES + 1)
    with pytest.raises(SftError, match=f"{tmp_path / 'file'} (has|is a pipe)"):
        read(tmp_path / "file")
