"""Two processes of a node: only one requests files from the hub, and both get the same files."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from sft.errors import ConfigError
from sft.hf import once_per_node as node
from tests.launching import environments
from tests.unit.fixtures.hub import environment, serving

RANK = """
import sys
from sft.errors import ConfigError
from sft.hf import hub_weights
try:
    print(hub_weights.model_folder("org/tiny@" + sys.argv[1] if sys.argv[1:] else "org/tiny"))
except ConfigError as error:
    print(error)
    sys.exit(2)
"""


def test_weights_are_requested_once_and_errors_are_shared(tmp_path: Path) -> None:
    folder = tmp_path / "upload"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"a": np.zeros(100_000, dtype=np.float32)}, folder / "model.safetensors")
    with serving() as hub:
        commit = hub.add("org/tiny", folder)
        hub.pause_s = 0.02  # so that the other process starts during the downloads
        start = environment(hub, tmp_path / "cache")

        def run(*words: str) -> list[tuple[int, str]]:
            processes = []
            for rank in reversed(environments(2)):  # rank 1 starts first, and must wait
                command = [sys.executable, "-c", RANK, *words]
                processes.append(subprocess.Popen(command, env={**start, **rank}, stdout=-1, stderr=-1, text=True))
            return [(process.wait(), process.communicate()[0].strip()) for process in processes]

        both = run()
        snapshot = tmp_path / "cache/hub/models--org--tiny/snapshots" / commit
        assert both == [(0, str(snapshot))] * 2
        assert (snapshot / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
        assert hub.downloads(".safetensors") == ["model.safetensors"]
        assert hub.downloads("config.json") == ["config.json"]
        assert hub.asked.count("GET api/models/org/tiny") == 1
        (first, text), other = run("v9")
        assert first == 2 and "has no revision v9" in text and other == (2, text)


Node = Callable[..., None]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Node:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def become(local_rank: int, **more: str) -> None:
        for name, value in {**environments(2)[local_rank], "MASTER_PORT": "1", **more}.items():
            monkeypatch.setenv(name, value)

    return become


def test_a_process_outside_of_a_run_works_itself(monkeypatch: pytest.MonkeyPatch, rank: Node, tmp_path: Path) -> None:
    assert node.once_per_node("ask", lambda: "a") == "a"
    rank(0, LOCAL_WORLD_SIZE="1")
    assert node.once_per_node("ask", lambda: "b") == "b"
    assert not list(tmp_path.iterdir())


def test_the_others_take_the_result_of_this_start_alone(rank: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_here() -> str:
        raise AssertionError

    rank(0)
    assert node.once_per_node("ask", lambda: "commit") == "commit"
    rank(1)
    assert node.once_per_node("ask", not_here) == "commit"
    monkeypatch.setattr(node, "_SECONDS_TO_BEGIN", 0.3)
    for task, also in (("load", {}), ("ask", {"MASTER_PORT": "2"}), ("ask", {"TORCHELASTIC_RESTART_COUNT": "1"})):
        rank(1, **also)
        with pytest.raises(ConfigError, match=f"LOCAL_RANK 0 of this node did not begin to {task} within"):
            node.once_per_node(task, not_here)
    rank(1, MASTER_PORT="1", TORCHELASTIC_RESTART_COUNT="")
    later = time.time() + 3600
    monkeypatch.setattr("psutil.Process.create_time", lambda _: later)  # as for a start an hour later
    with pytest.raises(ConfigError, match="did not begin"):
        node.once_per_node("ask", not_here)
