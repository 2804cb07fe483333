"""Models and tokenizers that a recipe names as on the Hugging Face hub; the hub runs on this machine."""

import errno
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from sft.cli import main
from sft.errors import ConfigError
from sft.hf import hub, hub_weights
from sft.run.outcome import Outcome
from sft.weights.initial import describe
from tests.builders import chats, parsed
from tests.unit.fixtures.hf import Make, released
from tests.unit.fixtures.hub import Hub, serving, use

NAME = "org/tiny"


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with serving() as served:
        yield served


@pytest.fixture
def served(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A hub with one commit of a model in two files, and with other files that are not needed."""
    fresh = Hub(url=server.url)
    server.__dict__.update(fresh.__dict__)
    folder = tmp_path / "upload"
    (folder / "onnx").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "generation_config.json", "onnx/config.json"):
        (folder / name).write_text(json.dumps({"file": name}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    for name in ("model-1", "model-2", "consolidated"):
        save_file({name: np.arange(50_000, dtype=np.float32)}, folder / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in ("model-1", "model-2")}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    server.add(NAME, folder)
    monkeypatch.chdir(tmp_path)
    use(monkeypatch, server, tmp_path / "cache")
    return server


SMALL = {"config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"}
SMALL |= {"model.safetensors.index.json"}
WEIGHTS = ["model-1.safetensors", "model-2.safetensors"]


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clears the caches of this process, as in a new process."""
    monkeypatch.setattr(hub, "_snapshots", {})


def refusal(name: str = NAME, *, weights: bool = False) -> str:
    with pytest.raises(ConfigError) as error:
        hub_weights.download_weights(hub.snapshot(name)) if weights else hub.local_folder(name)
    text = str(error.value)
    assert text.startswith(f"{name}: ") or name in text
    assert "\n" not in text
    return text


def test_a_look_up_fetches_all_but_the_weights_and_a_process_asks_once(served: Hub) -> None:
    folder = hub.local_folder(NAME)
    assert {path.name for path in folder.iterdir()} == SMALL
    assert hub.snapshot(NAME).commit == served.commits[NAME][0][0] == folder.name
    asked = len(served.asked)
    assert hub.local_folder(NAME) == folder
    assert len(served.asked) == asked
    assert hub_weights.missing_weights(hub.snapshot(NAME)) == hub_weights.MissingWeights(
        files=tuple(WEIGHTS), num_bytes=2 * 200_080
    )


def test_weights_are_those_of_the_index(served: Hub) -> None:
    folder = hub_weights.download_weights(hub.snapshot(NAME))
    assert {path.name for path in folder.iterdir()} == {*SMALL, *WEIGHTS}
    assert sorted(served.downloads(".safetensors")) == WEIGHTS
    assert hub_weights.missing_weights(hub.snapshot(NAME)) is None
    assert (folder / "model-2.safetensors").read_bytes() == (
        served.commits[NAME][0][1] / "model-2.safetensors"
    ).read_bytes()


def test_a_later_process_downloads_nothing_again_and_offline_asks_nothing(
    served: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hub_weights.download_weights(hub.snapshot(NAME))
    served.asked.clear()
    forget(monkeypatch)
    assert hub_weights.download_weights(hub.snapshot(NAME)) == folder
    assert set(served.asked) == {f"GET api/models/{NAME}", f"GET api/models/{NAME}/revision/main"}
    served.asked.clear()
    forget(monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub_weights.download_weights(hub.snapshot(NAME)) == folder
    assert not served.asked


def test_a_commit_is_a_revision_and_main_is_the_newest(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = served.commits[NAME][0][0]
    newer = Path(shutil.copytree("upload", "newer"))
    (newer / "config.json").write_text("{}")
    second = served.add(NAME, newer)
    assert hub.snapshot(NAME).commit == second
    assert hub.snapshot(f"{NAME}@{first}").commit == first
    assert (hub.local_folder(f"{NAME}@{first}") / "config.json").read_text() != "{}"
    assert hub.commits() == {NAME: second, f"{NAME}@{first}": first}


def test_folders_and_paths_are_no_hub_names(served: Hub) -> None:
    Path(NAME).mkdir(parents=True)
    assert hub.local_folder(NAME) == Path(NAME)
    for path in ("./org/other", "../other", "/org/other", "~/other", "a/b/c", "other", "byte", "org/other@", "-a/b"):
        assert not hub.is_hub_name(path), path
    for name in ("org/other", "Qwen/Qwen3-8B", "org/o.t-h_er@refs/pr/1", "org/other@v1.0"):
        assert hub.is_hub_name(name), name
    assert not served.asked


def test_what_the_hub_refuses(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.search(
        r"no such folder in .*, and http://.* shows no such model to anyone without", refusal("org/nothing")
    )
    assert "has no revision v9 of org/tiny.  org/tiny without @ is the newest commit" in refusal(f"{NAME}@v9")
    served.refuse[f"{NAME}/resolve"] = (403, "GatedRepo", "")
    gated = refusal()
    assert "the model is gated, and anyone without a token has no access" in gated
    assert f"Ask for access at {served.url}/org/tiny" in gated
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "gated, and the account of your token" in refusal()
    served.refuse.clear()
    served.tokens = {"hf_right"}
    assert "refuses access (401: Invalid credentials in Authorization header)" in refusal()
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert hub.local_folder(NAME).is_dir()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    forget(monkeypatch)
    assert "refuses access (401" in refusal()  # although the cache has the files


def test_offline_without_a_cache_or_with_a_part_of_it(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    absent = refusal()
    assert "cache" in absent and "does not have this model" in absent and "`hf download org/tiny`" in absent
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    folder = hub.local_folder(NAME)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    forget(monkeypatch)
    partial = refusal(weights=True)
    assert "lacks model-1.safetensors, model-2.safetensors" in partial
    assert f"`hf download org/tiny --revision {folder.name}`" in partial
    (folder / "tokenizer.json").unlink()
    forget(monkeypatch)
    assert "has only a part of this model" in refusal()
    assert not [path for path in served.asked if "safetensors" in path and "index" not in path]


def test_a_hub_that_cannot_be_reached(
    served: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    away = "there is no such folder in .*, and http://127.0.0.1:9 cannot be reached, or the connection broke off"
    assert re.search(rf"{away} \(ConnectError: ", refusal())
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", served.url)
    commit = hub.snapshot(NAME).commit
    served.add(NAME, Path("upload"))
    served.refuse["api"] = (503, "", "maintenance")
    forget(monkeypatch)
    assert hub.snapshot(NAME).commit == commit  # the log says so
    assert f"so {NAME} is commit {commit} of the cache" in capsys.readouterr().err


def test_a_connection_that_breaks_off(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the connection breaks once, the library continues at the same byte.  If it always breaks, there is an error,
    and no file looks complete."""
    no_sleep = SimpleNamespace(sleep=lambda _: None, time=lambda: 0.0)
    monkeypatch.setattr("huggingface_hub.file_download.time", no_sleep)
    served.break_off["model-1.safetensors"] = 70_000
    folder = hub_weights.download_weights(hub.snapshot(NAME))
    assert served.downloads("model-1.safetensors") == ["model-1.safetensors"] * 2
    assert (folder / WEIGHTS[0]).read_bytes() == (served.commits[NAME][0][1] / WEIGHTS[0]).read_bytes()
    (folder / WEIGHTS[0]).resolve().unlink()
    (folder / WEIGHTS[0]).unlink()
    monkeypatch.setattr(served, "break_off", _Always(served, "model-1.safetensors", 0))
    broken = refusal(weights=True)
    assert "the connection broke off" in broken and "files that are complete are kept" in broken
    assert not (folder / WEIGHTS[0]).exists()


class _Always(dict[str, int]):
    def __init__(self, _: Hub, end: str, stop: int) -> None:
        super().__init__({end: stop})

    def pop(self, key: str, *_: object) -> int:  # type: ignore[override]
        return self[key]


def test_a_disk_without_space(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    served.claimed_bytes = 1 << 50
    assert "still to be downloaded have 2048 TiB, but the disk of the cache" in refusal(weights=True)
    assert served.downloads(".safetensors") == []

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    forget(monkeypatch)
    assert "the disk of the cache" in refusal() and "is full" in refusal()


def test_weights_that_are_no_safetensors(served: Hub, tmp_path: Path) -> None:
    for name in ("model.safetensors.index.json", *WEIGHTS, "consolidated.safetensors"):
        (tmp_path / "upload" / name).unlink()
    (tmp_path / "upload" / "pytorch_model.bin").write_bytes(b"pickle")
    text = refusal(weights=True)
    assert "neither model.safetensors nor model.safetensors.index.json (it has chat_template.jinja, config.json" in text
    assert "pickles (.bin, .pth) are never opened" in text


def test_an_index_that_names_a_file_that_is_not_there(served: Hub, tmp_path: Path) -> None:
    (tmp_path / "upload" / "model-2.safetensors").unlink()
    assert "names model-2.safetensors, but the repository has no such file" in refusal(weights=True)


def test_commands_say_it_in_one_paragraph(served: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*overrides: str) -> str:
        assert main(["check", "a.yaml", "--no-data", *overrides]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        return error

    Path("a.yaml").write_text(f"run: {{dir: r}}\nmodel: {{hf: {NAME}}}\n{REST}")
    Path("upload/config.json").write_text(json.dumps(released("qwen3_0p6b")))
    assert "model.hf = org/none (command line: model.hf=org/none): org/none: there is no" in said("model.hf=org/none")
    assert main(["check", "a.yaml", "--no-data", "--explain", "model.num_layers"]) == 0
    assert f"from     derived: {NAME}/config.json, num_hidden_layers\n" in capsys.readouterr().out
    Path("code").mkdir()
    Path("code/config.json").write_text(json.dumps(released("qwen3_0p6b", auto_map={"AutoModel": "modeling.Own"})))
    served.add("org/code", Path("code"))
    assert "auto_map" in said("model.hf=org/code")
    chats(tmp_path, 8)
    small = ["data.tokenizer=byte", "data.train=chat.jsonl"]
    assert main(["check", "a.yaml", *small]) == 2
    assert "surplus: model-1\n  surplus: model-2\n" in capsys.readouterr().err
    hub_weights.download_weights(hub.snapshot(NAME))
    assert main(["check", "a.yaml", *small]) == 2
    assert "surplus: model-1\n  surplus: model-2\n" in capsys.readouterr().err
    Path("a").write_text("{}")
    assert main(["data", "prepare", "a.yaml", "data.tokenizer=org/none"]) == 2
    assert "data.tokenizer = org/none (command line: data.tokenizer=org/none): org/none: " in capsys.readouterr().err


REST = "data: {train: a, seq_length: 256}\ntrain: {num_steps: 5, global_batch_size: 4}\noptim: {lr: 1e-3}\n"


def test_every_tensor_is_known_before_a_download(served: Hub, made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The headers are read from files that are larger than the requested ranges."""
    folder = made("qwen3", shard="500KB", intermediate_size=4096)
    assert len(list(folder.glob("*.safetensors"))) > 2
    served.add("org/real", folder)
    keys = ("model.hf=org/real", "model.num_layers=null", "model.init_from=null", "run.precision=fp32")
    config = parsed(*keys, *SIZES).config
    assert re.fullmatch(
        r"org/real: 25 tensors trained; 3.1 MiB; not downloaded yet: \d+ files, 3.1 MiB",
        describe(config, None),
    )
    assert served.parts and max(num_bytes for _, num_bytes in served.parts) <= 100_001
    assert not list(hub.local_folder("org/real").glob("*.safetensors"))
    hub_weights.download_weights(hub.snapshot("org/real"))
    assert describe(config, None) == "org/real: 25 tensors trained; 3.1 MiB"
    for path in hub.local_folder("org/real").glob("*.safetensors"):
        path.unlink()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert describe(config, None).endswith("HF_HUB_OFFLINE is set, so that no start can download them")


@pytest.mark.parametrize(
    "words, files",
    [
        (["train", "a.yaml"], WEIGHTS),
        (["train", "a.yaml", "model.init_from=random"], []),
        (["train", "a.yaml", "run.dir=begun"], []),  # the run's weights come from the checkpoint
        (["train", "a.yaml", "run.dir=begun", "lora.rank=2"], WEIGHTS),  # a checkpoint of adapters has no base weights
        (["eval", "a.yaml", "data.eval=chat.jsonl"], WEIGHTS),
        (["eval", "a.yaml", "data.eval=chat.jsonl", "model.init_from=random", "--from", NAME], WEIGHTS),
        (["eval", "a.yaml", "data.eval=chat.jsonl", "run.dir=begun", "--from", "adapter"], WEIGHTS),
        (["eval", "a.yaml", "data.eval=chat.jsonl", "--from", "begun"], []),
        (["eval", "a.yaml", "data.eval=chat.jsonl", "lora.rank=2", "--from", "begun"], WEIGHTS),
        (["probe", "leak", "a.yaml"], WEIGHTS),
        (["probe", "data", "a.yaml"], []),
        (["data", "prepare", "a.yaml"], []),
    ],
    ids=" ".join,
)
def test_commands_download_the_weights_that_they_use(
    served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], files: list[str]
) -> None:
    Path("a.yaml").write_text(f"run: {{dir: r, device: cpu}}\nmodel: {{hf: {NAME}}}\n{REST}")
    Path("upload/config.json").write_text(json.dumps(released("qwen3_0p6b")))
    Path("begun/checkpoints/iter_0000001").mkdir(parents=True)
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text("{}")
    chats(tmp_path, 8)
    done = Outcome(folder=tmp_path, step=1, num_steps=1, stopped=None, last=None)
    for module, ended in (("api.rank", done), ("evaluation.held_out", ("weights", 0, {}))):
        stand_in = SimpleNamespace(main=lambda *_, ended=ended, is_quiet: ended)
        monkeypatch.setitem(sys.modules, f"sft.{module}", stand_in)
    asked = SimpleNamespace(run=lambda *_, **__: None)
    report = SimpleNamespace(check_path=lambda _: None, publish=lambda *_: 0)
    probes = SimpleNamespace(data=asked, leak=asked, parity=asked, report=report)
    monkeypatch.setitem(sys.modules, "sft.probe", probes)
    monkeypatch.setattr("sft.run.signals.leave_with_parent", lambda: None)
    monkeypatch.setattr("sft.run.environment.prepare", lambda *_: [])
    assert main([*words, "data.tokenizer=byte", "data.train=chat.jsonl"]) == 0
    assert sorted(served.downloads(".safetensors")) == files


SIZES = [f"model.{key}=null" for key in ("hidden_size", "ffn_hidden_size", "num_attention_heads")]
