"""The folder hf/ of a run: complete before the first step, checked later, and repaired only with the same content."""

import hashlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sft.config import CheckpointConfig, ModelConfig
from sft.console import QUIET, Console
from sft.errors import CheckpointError, ConfigError
from sft.hf.pretrained import read_pretrained
from sft.weights import kept, run_folder
from sft.weights.import_hf import import_hf
from tests.unit.fixtures import hf
from tests.unit.fixtures.hf import Make, same, tensors

UNTRAINED = "model.layers.1.self_attn.rotary_emb.inv_freq"
NO_EXPORTS = CheckpointConfig()


def model_config(**fields: Any) -> ModelConfig:
    sizes = dict(num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=8)
    pretrained = read_pretrained(fields["hf"])[0] if fields.get("hf") else None
    return ModelConfig(**sizes, **fields, pretrained=pretrained)


@pytest.fixture
def source(made: Make) -> Path:
    """A bf16 model with a tokenizer, and with one fp32 tensor that is not trained."""
    folder = made("llama", dtype=torch.bfloat16)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    return hf.rewrite(folder, **{UNTRAINED.replace(".", "/"): torch.arange(4.0)})


class Run:
    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, io.StringIO()
        folder.mkdir(exist_ok=True)

    def prepare(self, *, is_new: bool = True, checkpoint: CheckpointConfig = NO_EXPORTS, **model: Any) -> str:
        """Prepares the folder.  Returns the printed text."""
        self.said.seek(self.said.truncate(0))
        config = model_config(**model)
        run_folder.prepare(self.folder, config, checkpoint, Console(0, self.said), is_new=is_new)
        return self.said.getvalue()

    def check(self) -> str:
        self.said.seek(self.said.truncate(0))
        run_folder.check(self.folder, Console(0, self.said))
        return self.said.getvalue()

    def files(self) -> dict[str, bytes]:
        paths = sorted(path for path in (self.folder / "hf").rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder / "hf")): path.read_bytes() for path in paths}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def test_what_a_run_keeps(run: Run, source: Path) -> None:
    said = run.prepare(hf=str(source))
    assert said.startswith(f"kept 1 tensor that is not trained and the files of {source} in {run.folder}/hf (")
    names = {"config.json", "generation_config.json", "tokenizer.json", "additional_chat_templates/tools.jinja"}
    files = run.files()
    assert files.keys() == names | {"passed_through.safetensors", "source.json"}
    assert all(files[name] == (source / name).read_bytes() for name in names)
    stored = tensors(source)
    assert same(tensors(run.folder / "hf"), {UNTRAINED: stored[UNTRAINED]})
    written = json.loads(files["source.json"])
    assert (written["name"], written["commit"], written["origin"]) == (str(source), None, str(source))
    assert written["digests"] == {UNTRAINED: hashlib.sha256(stored[UNTRAINED].numpy().tobytes()).hexdigest()}
    assert written["tensors"].keys() == stored.keys()
    assert written["tensors"][UNTRAINED] == {"shape": [4], "dtype": "F32", "role": "passed through"}
    assert written["tensors"]["model.norm.weight"] == {"shape": [32], "dtype": "BF16", "role": "trained"}
    assert not run.check()


def test_a_snapshot_of_the_hub_names_its_commit(run: Run, source: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123abc"
    snapshot.parent.mkdir(parents=True)
    source.rename(snapshot)
    run.prepare(hf=str(snapshot))
    files = kept.read(run.folder / "hf")
    assert files is not None and files.commit == "0123abc"


@pytest.mark.parametrize("damage", ["removed", "shorter"])
def test_damage_is_repaired_from_the_origin(run: Run, source: Path, damage: str) -> None:
    run.prepare(hf=str(source))
    before, path = run.files(), run.folder / "hf" / "passed_through.safetensors"
    path.unlink() if damage == "removed" else path.write_bytes(path.read_bytes()[:-1])
    said = run.check()
    assert said.startswith(f"WARNING: {path} ") and f"was copied anew from {source}" in said
    assert run.files() == before and not run.check()


@pytest.mark.parametrize("origin", ["gone", "changed"])
def test_damage_that_cannot_be_repaired_is_a_warning(run: Run, source: Path, origin: str) -> None:
    """The run continues, because its checkpoints are complete; nothing replaces the kept files."""
    run.prepare(hf=str(source))
    (run.folder / "hf" / "passed_through.safetensors").unlink()
    before = run.files()
    if origin == "gone":
        shutil.rmtree(source)
    else:
        hf.rewrite(source, **{UNTRAINED.replace(".", "/"): torch.zeros(4)})
    for _ in range(2):
        said = run.check()
        assert "passed_through.safetensors is missing" in said
        assert "Training goes on, and checkpoints are complete, but an export needs --hf FOLDER" in said
    assert run.files() == before and sorted(path.name for path in run.folder.iterdir()) == ["hf"]


def test_a_flipped_bit_is_found_when_the_run_resumes(run: Run, source: Path) -> None:
    run.prepare(hf=str(source))
    before, path = run.files(), run.folder / "hf" / "passed_through.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert not run.check()  # checks sizes only
    assert "its SHA-256 is another" in run.prepare(hf=str(source), is_new=False)
    assert run.files() == before


def test_a_resumed_run_keeps_what_it_began_with_and_a_new_one_does_not(run: Run, source: Path, tmp_path: Path) -> None:
    run.prepare(hf=str(source))
    before = run.files()
    hf.save(tmp_path / "other", "llama", seed=6)
    assert not run.prepare(hf=str(tmp_path / "other"), is_new=False)
    assert run.files() == before
    run.prepare(hf=str(tmp_path / "other"))  # the first start saved no checkpoint
    assert "passed_through.safetensors" not in run.files()


def test_an_imported_checkpoint_and_a_run_hand_on_what_they_keep(run: Run, source: Path, tmp_path: Path) -> None:
    import_hf(source, tmp_path / "imported", QUIET)
    shutil.rmtree(source)
    run.prepare(init_from=str(tmp_path / "imported"))
    expected = run.files()
    assert expected["passed_through.safetensors"] and len(expected) == 6
    (run.folder / "checkpoints").mkdir()
    shutil.copytree(tmp_path / "imported" / "iter_0000000", run.folder / "checkpoints" / "iter_0000005")
    for number, path in enumerate((run.folder / "checkpoints", run.folder / "checkpoints" / "iter_0000005")):
        other = Run(tmp_path / f"other{number}")
        other.prepare(init_from=str(path))
        del expected["source.json"]  # it names another origin
        assert {name: content for name, content in other.files().items() if name != "source.json"} == expected
        expected["source.json"] = b""
    (tmp_path / "imported" / "hf" / "passed_through.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="passed_through.safetensors is damaged"):
        Run(tmp_path / "third").prepare(init_from=str(tmp_path / "imported"))


def test_random_weights_have_no_tensors_of_a_source(run: Run, source: Path) -> None:
    run.prepare(hf=str(source), init_from="random")
    files = kept.read(run.folder / "hf")
    assert files is not None and files.tensors is None and "passed_through.safetensors" not in files.files


def test_a_run_of_no_hugging_face_model(run: Run) -> None:
    run.prepare(init_from="random")
    assert not (run.folder / "hf").exists() and not run.check()
    with pytest.raises(ConfigError, match="checkpoint.export_hf = every, but the run is of no Hugging Face model"):
        run.prepare(init_from="random", checkpoint=CheckpointConfig(export_hf="every"))
