"""What a person would say about a recipe: rates, batches, padding, memory; and no problem that follows from another."""

import re
from pathlib import Path

import numpy as np
import pytest

from sft.cli import main
from sft.config.keys import in_units
from sft.errors import ConfigError
from sft.recipe.load import parse_recipe
from sft.recipe.run_checks import check_run, wasteful_multiple

ROOT = Path(__file__).resolve().parents[3]
WIDE = """\
run: {dir: runs/a, device: auto}
model: {num_layers: 2, hidden_size: 4096, ffn_hidden_size: 8192, num_attention_heads: 32, init_from: x}
data: {train: a.jsonl, seq_length: 64K, tokenizer: byte}
train: {num_steps: 40, global_batch_size: 8}
optim: {lr: 1e-5}
"""


def warnings(*overrides: str, **facts: int) -> list[str]:
    return check_run(parse_recipe(WIDE, "a.yaml", overrides), **facts)


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_recipe(text, "a.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ((), []),
        (("optim.lr=2e-3",), ["optim.lr = 0.002 is outside 1e-07 to 0.001, in which published runs train all weights"]),
        (("optim.lr=1e-8",), ["optim.lr = 1e-08 is outside"]),
        (("lora.rank=8", "lora.alpha=8"), ["optim.lr = 1e-05 is a learning rate for all weights; adapters usually"]),
        (("lora.rank=8", "lora.alpha=8", "optim.lr=2e-4"), []),
        (("lora.rank=8", "lora.alpha=8", "optim.lr=1e-2"), ["optim.lr = 0.01 is outside 5e-05 to 0.005"]),
        (("optim.lr=2e-3", "model.hidden_size=64"), []),  # a test, not a model
        (("optim.lr=2e-3", "model.init_from=random"), []),
        (("optim.lr=10", "model.hidden_size=64"), ["optim.lr = 10: AdamW changes each weight by about the learning"]),
        (("train.global_batch_size=512",), ["a step has up to 33,554,432 tokens (train.global_batch_size = 512"]),
    ],
)
def test_rates_and_batches(overrides: tuple[str, ...], expected: list[str]) -> None:
    found = warnings(*overrides)
    assert len(found) == len(expected) and all(map(str.startswith, found, expected)), found


def test_an_epoch_of_few_steps() -> None:
    assert warnings(num_packs=80) == []
    assert warnings(num_packs=79) == []
    assert warnings(num_packs=72)[0].startswith("an epoch has only 9 steps")


def test_padding_inside_documents() -> None:
    config = parse_recipe(WIDE, "a.yaml", ["parallel.cp=2"]).config
    # 36 and 40 tokens -> 64 and 64 with a multiple of 32; 36 and 40 with the smallest multiple 2 x cp = 4.
    assert list(wasteful_multiple(config, np.array([36, 40]))) == [
        "data.doc_multiple = 32 makes 40.6% of the tokens padding inside documents; data.doc_multiple=4 would make 0.0%"
    ]
    assert list(wasteful_multiple(config, np.array([1000, 2000]))) == []
    assert list(wasteful_multiple(config, np.array([], dtype=int))) == []


def test_units_of_whole_numbers() -> None:
    recipe = parse_recipe(WIDE, "a.yaml", ["data.seq_length=128k"])
    assert recipe.config.data.seq_length == 131072
    assert parse_recipe(WIDE, "a.yaml").config.data.seq_length == 65536
    assert [in_units("data.seq_length", text) for text in ("1M", "2 K", "0K", "1.5K", "64KB", 7)] == [
        *(1 << 20, 2048, "0K", "1.5K", "64KB", 7)
    ]
    assert in_units("run.dir", "64K") == "64K" and in_units("optim.lr", "1K") == "1K"


def test_no_problem_follows_from_another() -> None:
    empty = refusal("\n")
    assert "model.hf is missing from a.yaml; expected a folder or a name on the hub" in empty
    assert "model.num_layers is missing" not in empty
    foreign = refusal("base_model: Qwen/Qwen3-8B\n")
    assert "It is called model.hf here" in foreign and "model.hf is missing" not in foreign
    twice = refusal("data: {train: a.jsonl}\nmodel: {num_layers: 2}\nmodel: {hidden_size: 64}\n")
    assert "model is given twice" in twice and "model.hidden_size is missing" not in twice
    assert "model.hidden_size is missing" in refusal("model: {num_layers: 2}\n")


@pytest.mark.parametrize(
    "layers, said",
    [
        (2, None),
        # 36 layers of 4 x 4096^2 + 3 x 4096 x 8192 parameters x 18 bytes are 101 GiB: over 79, and below 139.
        (36, "GiB (predicted), which fits h200 and b200 only"),
        (
            80,
            "which fits no common GPU (b200: 172 usable); sft check a.yaml model.num_layers=80 data.seq_length=4096 "
            "train.recompute=full --world-size 1 --gpu h100 names",
        ),
    ],
)
def test_memory_without_a_gpu(tmp_path, monkeypatch, capsys, layers: int, said: str | None) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(WIDE)
    words = [f"model.num_layers={layers}", "data.seq_length=4096", "train.recompute=full"]
    assert main(["check", "a.yaml", "--no-data", *words]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "a rank needs" in line]
    assert len(lines) == (said is not None) and (said is None or said in lines[0]), lines


def test_the_refusal_in_the_readme(released_models: None, capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipes").symlink_to(ROOT / "recipes")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (quoted,) = re.findall(r"^\$ sft (check .*?)\n\n", readme, re.MULTILINE | re.DOTALL)
    command, _, refusal = quoted.partition("\n")
    assert main(command.split()) == 2
    assert " ".join(refusal.split()) == " ".join(capsys.readouterr().err.split())
