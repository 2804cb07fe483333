"""`sft init`, `sft explain` and `sft generate`: a way in for somebody who has read nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sft
from sft.cli import main
from sft.errors import ConfigError
from sft.parallel.rendezvous import check_environment
from sft.recipe import library
from sft.recipe.load import load_recipe
from tests import builders
from tools.make_tiny_model import make

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make(folder / "model")
    builders.chats(folder, 4, "chats.jsonl")
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)

    def words(*arguments: str) -> tuple[int, str]:
        code = main(arguments)
        output = capsys.readouterr()
        return code, output.out + output.err

    return words


def test_the_list_of_recipes_and_a_copy(run) -> None:
    code, text = run("init")
    assert code == 0 and max(map(len, text.splitlines())) <= 120
    names = [line.split()[0] for line in text.splitlines() if line][:-1]
    assert names == [recipe.name for recipe in library.recipes()] and {"demo", "qwen3_8b_128k_1n"} <= {*names}
    assert run("init", "qwen3_8b_64k", "--out", "mine.yaml")[0] == 0
    assert "sft train mine.yaml --processes 8" in Path("mine.yaml").read_text()
    assert run("init", "qwen3_8b_64k", "--out", "mine.yaml") == (
        2,
        "ConfigError: mine.yaml exists, and is not overwritten.  Give another file with --out.\n",
    )
    assert "Did you mean qwen3_8b_64k" in run("init", "qwen3_8b_65k")[1]
    assert run("init", "demo", "a=1")[0] == 2


def test_a_recipe_for_a_model(run, tiny: Path) -> None:
    code, text = run("init", "data.train=a.jsonl", "--model", f"{tiny}/model", "--gpus", "2", "--lora")
    assert code == 0, text
    assert text.splitlines() == [
        "recipe  model_lora.yaml, for 2 x h100 (predicted, not measured)",
        "next    set data.train in model_lora.yaml, and run: sft check model_lora.yaml --world-size 2 --gpu h100",
    ]
    written = Path("model_lora.yaml").read_text()
    assert "# Launch:   sft train model_lora.yaml --processes 2" in written
    assert "  # Peak learning rate: often 1e-5 for all weights, and 2e-4 for LoRA.\n  lr: 0.0002\n" in written
    config = load_recipe("model_lora.yaml").config
    assert (config.data.seq_length, config.lora.rank, config.data.train) == (1024, 16, ["a.jsonl"])
    assert run("init", "demo", "--model", "x")[0] == 2


def test_explain_without_a_recipe(run) -> None:
    assert run("explain", "optim.lr") == (
        0,
        "optim.lr\n    type     a number above 0.0; required\n"
        "    meaning  Peak learning rate: often 1e-5 for all weights, and 2e-4 for LoRA.\n",
    )
    group = run("explain", "profile.memory", "parallel.dp", "train.max_bad_steps", "data.train.chat.weight")[1]
    assert "profile.memory.steps\n" in group and "it is world_size / (tp * cp * pp)" in group
    assert "train.max_bad_steps is now called train.max_nonfinite_steps" in group and "data.train.NAME.weight" in group
    code, text = run("explain", "optim.learning_rate")
    assert code == 2 and "It is called optim.lr here, which takes a number above 0.0." in text


def test_answers_of_a_folder_equal_those_of_transformers(run, tiny: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    code, output = run("generate", f"{tiny}/model", "--prompts", f"{tiny}/chats.jsonl", "--max-tokens", "5", "--json")
    assert code == 0, output
    answers = [json.loads(line) for line in output.splitlines()]
    rows = [json.loads(line)["messages"] for line in (tiny / "chats.jsonl").read_text().splitlines()]
    assert [answer["expected"] for answer in answers] == [row[-1]["content"] for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    model = AutoModelForCausalLM.from_pretrained(tiny / "model")
    text = tokenizer.apply_chat_template(rows[0][:-1], tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer.encode(text)])
    first = ids.shape[1]
    for _ in range(5):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert answers[0]["answer"] == tokenizer.decode(ids[0, first:]) and answers[0]["prompt_tokens"] == first
    assert not answers[0]["is_whole"]


def test_draws_repeat_with_their_seed(tiny: Path) -> None:
    def draw(seed: int) -> str:
        return sft.generate(tiny / "model", ["hi"], max_tokens=8, temperature=1.0, seed=seed)[0].text

    assert draw(1) == draw(1) != draw(2)


@pytest.mark.parametrize(
    "words, message",
    [
        (("--prompt", "hi", "--max-tokens", "0"), "max_tokens = 0"),
        ((), "is no run and no checkpoint of a run, so there are no held-out rows.  Give --prompt TEXT."),
        (("--prompts", "gone.jsonl"), "gone.jsonl does not exist"),
        (("--prompt", "hi", "--device", "cuda"), "torch sees no GPU"),
        (("--rows", "0"), "--rows 0 is not above 0"),
    ],
)
def test_refusals_of_generate(run, tiny: Path, words: tuple[str, ...], message: str) -> None:
    code, text = run("generate", f"{tiny}/model", *words)
    assert code == 2 and message in text and "Traceback" not in text


def test_one_process_for_several_ranks(run, tiny: Path) -> None:
    recipe = f"run: {{dir: a}}\nmodel: {{hf: {tiny}/model}}\ndata: {{train: {tiny}/chats.jsonl, seq_length: 64}}\n"
    Path("a.yaml").write_text(recipe + "train: {num_steps: 1, global_batch_size: 2}\noptim: {lr: 1e-5}\n")
    code, text = run("train", "a.yaml", "parallel.cp=2")
    assert code == 2 and "On one machine: sft train a.yaml parallel.cp=2 --processes 2; on several" in text


def test_half_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    check_environment()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="has WORLD_SIZE, but not RANK, MASTER_ADDR, MASTER_PORT"):
        check_environment()
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    check_environment()


def test_status_of_a_run_folder(run, tiny: Path) -> None:
    Path("runs/a").mkdir(parents=True)
    assert run("status", "runs/a")[1] == (
        "ConfigError: runs/a has no recipe.yaml, so it is not the folder of a run.  Give one, or a recipe.\n"
    )
    recipe = f"run: {{dir: elsewhere}}\nmodel: {{hf: {tiny}/model}}\ndata: {{train: a.jsonl, seq_length: 64}}\n"
    Path("runs/a/recipe.yaml").write_text(recipe + "train: {num_steps: 1, global_batch_size: 2}\noptim: {lr: 1e-5}\n")
    assert "runs/a: the run was never started" in run("status", "runs/a")[1]


@pytest.mark.parametrize(
    "keys", [("lora.rank=4",), pytest.param((), marks=pytest.mark.grid)], ids=["lora", "all-weights"]
)
def test_a_check_needs_no_megatron(tiny: Path, tmp_path: Path, keys: tuple[str, ...]) -> None:
    """Importing megatron-core takes several CPU seconds, and a check reads headers and data only."""
    recipe = f"run: {{dir: a, device: cpu}}\nmodel: {{hf: {tiny}/model}}\n"
    recipe += f"data: {{train: {tiny}/chats.jsonl, seq_length: 64}}\ntrain: {{num_steps: 1, global_batch_size: 2}}\n"
    (tmp_path / "a.yaml").write_text(recipe + "optim: {lr: 1e-5}\n")
    script = "import sys; from sft.cli import main; code = main(sys.argv[1:]); print(code, 'megatron' in sys.modules)"
    words = [sys.executable, "-W", "ignore", "-c", script, "check", "a.yaml", *keys]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.stdout.splitlines()[-1:] == ["0 False"], done.stdout + done.stderr
