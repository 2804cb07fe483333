"""Runs every command of docs/start/quickstart.md in the order of the page, and the five lines of the README, as
written."""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sft.cli import main
from tests.builders import chats
from tests.unit.fixtures.hub import environment, serving
from tests.warm_commands import commands
from tools.make_tiny_model import TEMPLATE

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/start/quickstart.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
# The run of the page, except that its model comes from a hub, and one process trains it.
FROM_HUB = """
sft train quickstart.yaml model.hf=org/tiny run.dir=runs/hub data.cache_dir=runs/quickstart/cache train.num_steps=2 \\
    parallel.cp=1
"""
# Additions that the README's lines need here: two CPU processes, and packs that the tiny model can learn.
SMALL = (
    "run.device=cpu run.precision=fp32 parallel.tp=1 parallel.cp=2 data.seq_length=512 train.global_batch_size=2 "
    "train.num_epochs=null train.num_steps=2"
)
# vllm cannot run here: transformers opens the folder instead, and generates an answer.
SERVE = """
python - models/mine <<'END'
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = (kind.from_pretrained(sys.argv[1]) for kind in (AutoTokenizer, AutoModelForCausalLM))
chat = [{"role": "user", "content": "2 + 2 = ?"}]
tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=4)[0]))
END
"""
LOSS_TOLERANCE = 1e-5  # relative; fp32, another layout


@pytest.fixture
def shell(tmp_path: Path) -> Callable[..., str]:
    """Runs a command in a folder of its own, with `sft`, `torchrun` and `python` of this environment.

    Returns what the command prints on stdout.
    """
    commands(tmp_path / "bin")
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def run(command: str, **variables: str) -> str:
        words = ["bash", "-euo", "pipefail", "-c", command]
        environ = {**os.environ, **variables, **own}
        done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


def losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["lm loss"] for record in records if record["kind"] == "train"]


@pytest.mark.slow
def test_every_command_of_the_page_runs(
    tmp_path: Path, shell: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE.partition("## With a real model")[0], re.MULTILINE | re.DOTALL)
    assert len(blocks) == 9
    outputs = [shell(block) for block in blocks]
    (quoted,) = re.findall(r"^```text\n(weights .*\n)```$", PAGE, re.MULTILINE)
    assert quoted in outputs[3]
    (preview,) = re.findall(r"^\$ sft data inspect quickstart.yaml --samples 1\n(.*?)```$", README, re.M | re.S)
    assert preview in outputs[4]
    trained = losses(tmp_path / "runs/quickstart")
    assert len(trained) == 10 and trained[-1] < trained[0]
    assert "<|im_start|>assistant" in outputs[-1]  # the text that the exported model writes
    with serving() as hub:
        commit = hub.add("org/tiny", tmp_path / "models/tiny")
        shell(FROM_HUB, **environment(hub, tmp_path / "hf"))
        assert hub.downloads(".safetensors") == ["model.safetensors"]
    assert losses(tmp_path / "runs/hub") == pytest.approx(trained[:2], rel=LOSS_TOLERANCE)
    # The hub is gone: the run folder holds everything that an export needs.
    monkeypatch.chdir(tmp_path)
    assert main(["export", "runs/hub", "models/from-hub"]) == 0
    assert (tmp_path / "models/from-hub/chat_template.jinja").read_text() == TEMPLATE
    assert json.loads((tmp_path / "runs/hub/hf/source.json").read_text())["commit"] == commit


def five_lines() -> list[str]:
    """The commands of the README, without comments."""
    (lines,) = re.findall(r"^```bash\n(sft check .*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [line.partition(" #")[0].rstrip() for line in lines.splitlines()]


@pytest.mark.slow
def test_the_five_lines_of_the_readme_run(tmp_path: Path, shell: Callable[..., str]) -> None:
    """The hub runs on this machine, and its Qwen/Qwen3-8B is the tiny model; transformers replaces vllm."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    chats(tmp_path, 20, "my.jsonl")
    shell("python -m tools.make_tiny_model models/tiny")
    *lines, serve = five_lines()
    assert serve == "vllm serve models/mine"
    with serving() as hub:
        hub.add("Qwen/Qwen3-8B", tmp_path / "models/tiny")
        for line in lines:
            words = line.replace("--world-size 8", "--world-size 2").replace("--processes 8", "--processes 2")
            assert " data.train=my.jsonl" in words or words.startswith("sft export ")
            small = f" {SMALL}" if "data.train" in words else ""
            shell(words + small, **environment(hub, tmp_path / "hf"))
    assert len(losses(tmp_path / "runs/qwen3_8b_64k")) == 2
    assert "<|im_start|>assistant" in shell(SERVE)
