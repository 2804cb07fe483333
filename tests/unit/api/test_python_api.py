"""`import sft`: its imports, the results and refusals of each function, and that the command line calls these
functions."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import sft
from sft.api import process
from sft.cli import main
from sft.data.work import Work
from sft.errors import CheckpointError, ConfigError, DataError
from sft.parallel.layout import Layout

ROOT = Path(__file__).resolve().parents[3]
FUNCTIONS = ("load", "check", "prepare", "train", "evaluate", "export", "plan", "generate")
CHAT = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]}\n'
# Eight GPUs with 80 GB hold this model at this length; one GPU does not hold it at a million tokens.
LLAMA = """\
run: {dir: runs/a}
model:
  {num_layers: 32, hidden_size: 4096, ffn_hidden_size: 14336, num_attention_heads: 32, num_query_groups: 8,
   vocab_size: 128256, init_from: random}
data: {train: a.jsonl, seq_length: 65536, tokenizer: byte}
train: {num_steps: 10, global_batch_size: 16}
optim: {lr: 1e-5}
"""


@pytest.fixture(autouse=True)
def folder(recipe_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (recipe_folder / "llama.yaml").write_text(LLAMA)
    (recipe_folder / "a.jsonl").write_text(CHAT * 3)
    monkeypatch.setattr("sft.run.environment.prepare", lambda config, layout: frozenset())
    monkeypatch.setattr(process, "_joined", set())
    return recipe_folder


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The learning rate and the world size of each recipe that would be trained."""
    trained: list[tuple[str, int]] = []

    def stand_in(
        recipe: sft.Recipe, layout: SimpleNamespace, from_user: frozenset[str], callbacks: object, is_quiet: bool
    ) -> sft.Outcome:
        trained.append((str(recipe.config.optim.lr), layout.world_size))
        return sft.Outcome(folder=Path("runs/a"), step=7, num_steps=10, stopped="SIGTERM", last={"lm loss": 2.5})

    monkeypatch.setitem(sys.modules, "sft.api.rank", SimpleNamespace(main=stand_in))
    return trained


def refusal(call: Callable[[], object], kind: type[sft.SftError] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert " --" not in f" {caught.value}", "an error of the API names no option of a command"
    return str(caught.value)


def test_import_sft_imports_nothing_heavy_and_offers_everything() -> None:
    program = (
        "import sys, sft\n"
        "print(sorted({'torch', 'megatron', 'pydantic', 'numpy', 'yaml'} & sys.modules.keys()))\n"
        "for name in sft.__all__: getattr(sft, name)\n"
        "print(sorted({'torch', 'megatron', 'transformers'} & sys.modules.keys()))\n"
        "print(set(sft.__all__) <= set(dir(sft)), hasattr(sft, 'nothing'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout == "[]\n[]\nTrue False\n", done.stderr


# load


def test_values_and_words_load_the_same_recipe() -> None:
    values = {"optim.lr": 2e-5, "data.train": ["a.jsonl", Path("b.jsonl")], "data.eval": {"held": "c.jsonl"}}
    words = ["optim.lr=2e-5", "data.train=[a.jsonl, b.jsonl]", "data.eval={held: c.jsonl}"]
    by_value = sft.load("a.yaml", {**values, "parallel.dynamic_cp": False, "log.wandb": None, "run.dir": "7"})
    by_word = sft.load(Path("a.yaml"), [*words, "parallel.dynamic_cp=false", "log.wandb=null", 'run.dir="7"'])
    assert by_value.config == by_word.config
    assert by_value.config.data.train == ["a.jsonl", "b.jsonl"] and by_value.config.optim.lr == 2e-5
    assert by_value.config.run.dir == "7"  # a text with the form of a number stays a text


def test_overrides_that_load_refuses() -> None:
    assert 'overrides = "optim.lr=1" is one text' in refusal(lambda: sft.load("a.yaml", "optim.lr=1"))
    assert "optim.lr has a value of type complex" in refusal(lambda: sft.load("a.yaml", {"optim.lr": 1j}))
    assert "unknown key optim.rl (command line: optim.rl=1)" in refusal(lambda: sft.load("a.yaml", {"optim.rl": 1}))


# prepare


def test_prepare_counts_samples_and_tokens_and_sweeps(folder: Path) -> None:
    """A chat with the byte tokenizer: 2 + 11 bytes, and 5 marks: two before each message, and one after the answer."""
    first = sft.prepare(sft.load("a.yaml"))
    assert first.cache_dir == Path("runs/a/cache") and first.held_out == {} and first.removed == {}
    assert (first.train.num_samples, first.train.num_supervised) == (3, 36)  # 11 bytes and the end mark of the answer
    assert first.train.num_tokens == 3 * first.train.longest
    again = sft.prepare(sft.load("a.yaml"), verify=True)
    assert again == first and again.train.work is None
    assert first.train.work == Work()  # the byte tokenizer has no template
    (folder / "b.jsonl").write_text(CHAT)
    held_out = sft.prepare(sft.load("a.yaml", {"data.eval": {"held": "b.jsonl"}})).held_out
    assert list(held_out) == ["held"] and held_out["held"].num_samples == 1
    swept = sft.prepare(sft.load("a.yaml"), sweep=True)
    assert len(swept.removed) == 1 and min(swept.removed.values()) > 0


def test_prepare_refuses_missing_files_and_bad_rows(folder: Path) -> None:
    missing = sft.load("a.yaml", {"data.train": "b.jsonl"})
    assert "data.train = b.jsonl" in refusal(lambda: sft.prepare(missing))
    (folder / "b.jsonl").write_text("{}\n")
    assert refusal(lambda: sft.prepare(missing), DataError).startswith("b.jsonl:1")


# check and evaluate


def test_check_returns_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    checked = sft.check(sft.load("a.yaml"))
    assert capsys.readouterr().out == ""
    assert main(["check", "a.yaml"]) == 0
    printed = capsys.readouterr().out
    assert f"{checked!r}\n" == printed
    assert checked["data"] and checked["layout"] and checked["no topic"] == []
    assert [f"WARNING {line}" for line in checked.warnings] == [
        line for line in printed.splitlines() if line.startswith("WARNING")
    ]
    without = sft.check(sft.load("a.yaml"), data=False)
    assert without["data"] == ["not read (--no-data)"]
    assert "cheapest" in refusal(lambda: sft.check(sft.load("llama.yaml"), world_size=1, gpu="h100", data=False))


def test_evaluate_returns_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/ranks/test_python_api.py scores weights."""
    asked: list[object] = []

    def stand_in(
        recipe: sft.Recipe, layout: Layout, source: str | None, file: Path | None, is_quiet: bool
    ) -> tuple[str, int, object]:
        asked.append((layout.world_size, source, file, is_quiet))
        return "runs/a/checkpoints/iter_0000007", 7, {"chat": {"lm loss": 2.5}, "code": {"lm loss": None}}

    monkeypatch.setitem(sys.modules, "sft.evaluation.held_out", SimpleNamespace(main=stand_in))
    monkeypatch.setattr("sft.api.evaluation.check_source", lambda source: None)  # there is no such run
    recipe = sft.load("a.yaml", {"data.eval": "a.jsonl"})
    found = sft.evaluate(recipe, Path("runs/a"), file="scores.json")
    assert asked == [(1, "runs/a", Path("scores.json"), False)]
    assert (found.step, found.records["chat"]["lm loss"]) == (7, 2.5)
    assert repr(found) == "Evaluated(runs/a/checkpoints/iter_0000007: chat 2.5000, code no supervised token)"
    assert "names no held-out set" in refusal(lambda: sft.evaluate(sft.load("a.yaml")))


# train


def test_train_returns_the_outcome(trainer: list[tuple[str, int]]) -> None:
    outcome = sft.train(sft.load("a.yaml"))
    assert trainer == [("1e-05", 1)]
    assert not outcome.is_done and outcome.exit_code == 75 and outcome.last == {"lm loss": 2.5}
    assert main(["train", "a.yaml"]) == 75
    with pytest.raises(AttributeError):
        setattr(outcome, "step", 8)  # noqa: B010


def test_train_refuses_a_process_in_which_no_run_can_start(
    trainer: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, said = sft.load("a.yaml"), []
    thread = threading.Thread(target=lambda: said.append(refusal(lambda: sft.train(recipe))))
    thread.start()
    thread.join()
    assert "sft.train was called in a thread" in said[0]
    with monkeypatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: True)
        assert "has a process group of torch.distributed" in refusal(lambda: sft.train(recipe))
    two = sft.load("a.yaml", {"parallel.cp": 2})
    with pytest.raises(ConfigError, match="parallel.cp = 2 does not fit 1 GPU") as caught:
        sft.train(two)
    assert "sft train a.yaml parallel.cp=2 --processes 2" in str(caught.value)  # a whole command, with the override
    assert trainer == []


def test_ranks_of_torchrun_train_once_and_a_process_alone_again_and_again(
    trainer: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sft.train(sft.load("a.yaml"))
    sft.train(sft.load("a.yaml"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "1")
    recipe = sft.load("a.yaml", {"parallel.cp": 2})
    sft.train(recipe)
    assert "has trained before" in refusal(lambda: sft.train(recipe))
    monkeypatch.setenv("MASTER_PORT", "2")  # as for other ranks, or for another store
    sft.train(recipe)
    assert [world_size for _, world_size in trainer] == [1, 1, 2, 2]


# export and plan


def test_export_refuses_a_folder_without_a_checkpoint() -> None:
    assert "runs/a: the path has no checkpoint" in refusal(lambda: sft.export("runs/a", "out"), CheckpointError)


def test_plan_returns_proposals_and_writes_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    found = sft.plan("llama.yaml", [8, 16], sft.PlanOptions(top=2))
    assert [report.num_gpus for report in found.reports] == [8, 16]
    assert found.best is found.reports[0].proposals[0] and found.best.layout.world_size == 8
    assert found.best.memory.device <= found.best.usable.bytes
    assert "several numbers of GPUs" in refusal(lambda: found.write("b.yaml"))
    sft.plan("llama.yaml", 8, overrides={"train.global_batch_size": 32}).write("out/b.yaml")
    written = sft.load("out/b.yaml").config
    assert written.train.global_batch_size == 32 and written.parallel.tp == found.best.config.parallel.tp
    assert capsys.readouterr().out == ""


def test_a_plan_in_which_nothing_fits() -> None:
    found = sft.plan("llama.yaml", 1, sft.PlanOptions(seq_length=1048576))
    assert found.best is None and found.reports[0].changes
    assert "the plan has no layout that fits" in refusal(lambda: found.write("b.yaml"))


def test_plan_refuses_arguments_that_do_not_fit_each_other() -> None:
    both = sft.PlanOptions(global_batch_size=8, tokens_per_step=2**20)
    assert "both give the packs of a step" in refusal(lambda: sft.plan("llama.yaml", 8, both))
    assert "gpus = 0 is no list of numbers of GPUs, such as 8" in refusal(lambda: sft.plan("llama.yaml", 0))


# The command line

COMMANDS = {
    "recipes.load": ["check", "a.yaml", "--no-data"],
    "checks.topics": ["check", "a.yaml", "--no-data"],
    "data.prepare": ["data", "prepare", "a.yaml"],
    "training.train": ["train", "a.yaml"],
    "evaluation.evaluate": ["eval", "a.yaml"],
    "models.export": ["export", "runs/a", "out"],
    "plans.plan": ["plan", "--model", "llama.yaml", "--gpus", "8"],
}


@pytest.mark.parametrize(("function", "words"), COMMANDS.items(), ids=COMMANDS.keys())
def test_the_command_line_calls_the_api(
    function: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise ConfigError(f"{function} was called.")

    monkeypatch.setattr(f"sft.api.{function}", broken)
    assert main(words) == 2
    assert capsys.readouterr().err == f"ConfigError: {function} was called.\n"


def test_every_function_says_what_it_raises() -> None:
    assert set(FUNCTIONS) <= set(sft.__all__)
    for name in FUNCTIONS:
        assert "Raises " in (getattr(sft, name).__doc__ or ""), name


def test_a_recipe_from_a_mapping_and_its_repr() -> None:
    groups = {
        "run": {"dir": Path("runs/a")},
        "model": {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 4},
        "data": {"train": ["a.jsonl"], "seq_length": "1K"},
        "train": {"num_steps": 2, "global_batch_size": 2},
        "optim": {"lr": 1e-5},
    }
    recipe = sft.load(groups | {"model": groups["model"] | {"init_from": "random"}}, {"optim.lr": 2e-5})
    assert (recipe.config.data.seq_length, recipe.config.optim.lr) == (1024, 2e-5)
    assert repr(recipe) == (
        "Recipe(the mapping: run.dir=runs/a, model.num_layers=2, model.hidden_size=64, model.ffn_hidden_size=64, "
        "model.num_attention_heads=4, model.init_from=random, data.train=[a.jsonl], data.seq_length=1024, "
        "train.num_steps=2, train.global_batch_size=2, optim.lr=2e-05)"
    )
    with pytest.raises(sft.ConfigError, match="unknown key optim.rate [(]the mapping, line 1[)]"):
        sft.load(groups | {"optim": {"rate": 1}})
