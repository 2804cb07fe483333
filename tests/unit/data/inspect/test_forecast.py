"""`sft data plan`: its output, and that a run follows the plan that it writes."""

from pathlib import Path

import pytest

from sft.cli import main
from sft.console import QUIET
from sft.data.cache.corpus import Corpus
from sft.data.cache.prepare import prepare_train
from sft.data.chat.tokenizer import load_tokenizer
from sft.data.loader import Loader, make_loader
from sft.errors import ConfigError
from sft.parallel.layout import Layout
from sft.recipe.load import parse_recipe
from tests.unit.surveys import chat_of, lay_out, write

# Attention takes as long as all other computation at 64 * (2 * 64 + 2 * 64 + 3 * 192) / 64 = 832 tokens.
RECIPE = """\
run: {dir: runs/a, device: cpu}
model: {num_layers: 2, hidden_size: 64, ffn_hidden_size: 192, num_attention_heads: 4, init_from: random}
data:
  train:
    chat: {files: chat.jsonl, weight: 3}
    code: {files: code.jsonl, weight: 1}
  seq_length: 256
  num_workers: 1
train: {num_steps: 20, global_batch_size: 4}
optim: {lr: 1e-5}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(tmp_path, monkeypatch)
    Path("a.yaml").write_text(RECIPE)
    write("chat", *[chat_of(64)] * 20)
    write("code", *[chat_of(128)] * 10)


def loader(*overrides: str) -> tuple[Loader, Corpus]:
    config = parse_recipe(RECIPE, "a.yaml", overrides).config
    corpus = prepare_train(config, load_tokenizer(config.data), QUIET)
    return make_loader(config, Layout.resolve(config, 2), corpus, pad_id=0), corpus


def test_what_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Each source has 1,280 tokens, and the shares are 3 : 1, so chat is repeated three times.  5,120 tokens are 20
    packs of 256: 5 steps.

    A sample of n tokens has n - 21 supervised tokens: 60 * 43 + 10 * 107 = 3,650.
    """
    assert main(["data", "plan", "a.yaml", "--world-size", "2"]) == 0
    assert capsys.readouterr().out == """\
packs   20 packs of at most 256 tokens, 100.00% full; 70 samples of 30
        of their capacity: tokens 100.00%, alignment 0.00%, ends of packs 0.00%, empty packs of the last batch (0) 0.00%
steps   steps per epoch 5 = 20 packs / global_batch_size 4, rounded up
        num_steps 20 = 4.00 epochs
        tokens per step 1,024 / 1,024 / 1,024 (min / median / max), 5,120 in all
        supervised tokens per step 709 / 730 / 751 (min / median / max), 3,650 in all
sources chat 75.00% of tokens (wanted 75.00%), seen 3.00 times
        code 25.00% of tokens (wanted 25.00%), seen 1.00 times
balance attention takes as many FLOPs as all else at 832 tokens; 5 batches checked
        efficiency per step 99.1% / 100.0% (min / median), of at most 99.1% / 100.0% (min / median)
        efficiency per microbatch 99.1% / 100.0% (min / median), of at most 100.0% / 100.0% (min / median)
        longest sequence alone: at most 100.0% / 100.0% (min / median)
"""


def test_waste_by_cause(capsys: pytest.CaptureFixture[str]) -> None:
    """20 samples of 33 tokens, padded to 64, three to a pack of 208, in 7 of 8 packs: the waste of each cause by
    hand."""
    write("chat", *[chat_of(33)] * 20)
    assert main(["data", "plan", "a.yaml", "data.train=chat.jsonl", "data.seq_length=224"]) == 0
    told = capsys.readouterr().out.splitlines()
    # 8 * 224 = 1792 tokens are: samples 20 * 33, padding 20 * 31, tail of packs 7 * 224 - 20 * 64, and one missing
    # pack.
    assert told[1].strip() == (
        "of their capacity: tokens 36.83%, alignment 34.60%, ends of packs 16.07%, "
        "empty packs of the last batch (1) 12.50%"
    )


def test_a_larger_cp_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Four samples of 256 tokens cost 256 + 256 * 256 / 832 = 335 each, and 32 samples of 32 tokens cost 33: 300 for
    each of 8 ranks."""
    write("chat", *[chat_of(256), *[chat_of(32)] * 8] * 4)
    arguments = ["data", "plan", "a.yaml", "data.train=chat.jsonl", "--world-size", "8", "train.global_batch_size=8"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1].strip() == (
        "no assignment is balanced, because one rank must take the longest sequence; parallel.cp=2 would lift the "
        "limit to 100.0%"
    )


def test_a_written_plan_is_followed(capsys: pytest.CaptureFixture[str]) -> None:
    """Also with another seed, which would give another order."""
    assert main(["data", "plan", "a.yaml", "--write", "p"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "written p: 20 global batches of 4 epochs; a run follows it with data.plan=p"
    )
    made, _ = loader()
    replayed, _ = loader("data.plan=p", "run.seed=99")
    other, _ = loader("run.seed=99")
    assert made.plans.total_steps(4) == replayed.plans.total_steps(4) == 20
    for step in range(20):
        assert made.plans.global_batch(step) == replayed.plans.global_batch(step)
        assert made.slots(step) == replayed.slots(step)
    assert any(made.plans.global_batch(step) != other.plans.global_batch(step) for step in range(20))


def test_a_plan_that_ends_too_early_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "plan", "a.yaml", "--write", "p", "train.num_steps=5"]) == 0
    replayed, _ = loader("data.plan=p")
    assert replayed.plans.locate(4) == (0, 4)
    with pytest.raises(ConfigError, match="p ends after epoch 1, but the run needs more epochs.  Write a longer plan"):
        replayed.plans.locate(5)
    assert main(["check", "a.yaml", "data.plan=p"]) == 2
    assert "data.plan = p ends after epoch 1" in capsys.readouterr().err


def test_plans_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "plan", "a.yaml", "--write", "p"]) == 0
    assert main(["data", "plan", "a.yaml", "--write", "q", "run.seed=1"]) == 0
    capsys.readouterr()
    assert main(["data", "plan", "--diff", "p", "p"]) == 0
    assert capsys.readouterr().out == "the plans are equal\n"
    assert main(["data", "plan", "--diff", "p", "q"]) == 1
    assert capsys.readouterr().out.startswith("first difference: epoch 0, global batch 0, both counted from 0\n")


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "plan"]) == 2
    assert "ConfigError: a RECIPE is missing." in capsys.readouterr().err
    assert main(["data", "plan", "a.yaml", "data.train.code.files=none.jsonl"]) == 2
    assert "ConfigError: data.train.code.files = none.jsonl (command line: " in capsys.readouterr().err
    assert main(["data", "plan", "a.yaml", "data.plan=none"]) == 2
    assert "data.plan = none (command line: data.plan=none) does not exist" in capsys.readouterr().err
    assert main(["data", "plan", "a.yaml", "--write", "p"]) == 0
    write("code", *[chat_of(128)] * 11)
    assert main(["data", "plan", "a.yaml", "data.plan=p"]) == 2
    assert "DataError: the plan p was made for other data or sizes: data was " in capsys.readouterr().err


def test_sources_of_named_files() -> None:
    _, corpus = loader("data.train={b: {files: [chat.jsonl, code.jsonl]}, a: {files: chat.jsonl}}")
    assert corpus.sources == ("b", "a")
    assert [corpus.sample(i).source for i in (0, 29, 30, 49)] == [0, 0, 1, 1]
