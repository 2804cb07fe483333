"""Mistakes that can be found once the number of steps and the lengths of documents are known."""

import json
import re
from pathlib import Path

import pytest

from sft.cli import main
from sft.errors import ConfigError
from sft.recipe.run_checks import check_run
from tests.builders import QWEN3, RECIPE, chats, of_hf, parsed

LONG = dict(num_steps=32, num_packs=128, longest=1000)


@pytest.fixture(autouse=True)
def folder(recipe_folder: Path) -> None:
    """A folder with data of 8 to 17 tokens, and a model m that was trained on 512 positions."""
    chats(recipe_folder, 20, "a.jsonl")
    (recipe_folder / "a.yaml").write_text(RECIPE.replace("num_steps: 10", "num_epochs: 1"))
    (recipe_folder / "m").mkdir()
    (recipe_folder / "m" / "config.json").write_text(json.dumps(QWEN3))


def test_a_warm_up_as_long_as_the_run_is_refused() -> None:
    """train.num_epochs leaves the number of steps open until the data are packed."""
    epochs = ["train.num_steps=null", "train.num_epochs=1"]
    with pytest.raises(
        ConfigError, match=re.escape("Set in: optim.warmup_steps (command line: optim.warmup_steps=32)")
    ):
        check_run(parsed(*epochs, "optim.warmup_steps=32"), **LONG)
    assert check_run(parsed(*epochs, "optim.warmup_steps=31"), **LONG) == []


WARNINGS = {
    ("checkpoint.save_every=33",): "checkpoint.save_every = 33, but the run ends after 32 steps: only the last step is "
    "saved",
    ("checkpoint.save_every=33", "checkpoint.save_last=false"): "checkpoint.save_every = 33, but the run ends after 32 "
    "steps: nothing is saved",
    ("train.eval_every=33",): "train.eval_every = 33, but the run ends after 32 steps: only its start and its end are "
    "evaluated",
    ("profile.torch.steps=[2, 33]",): "profile.torch.steps has step 33, but the run ends after 32 steps: nothing is "
    "recorded then",
    (
        *("data.eval=a.jsonl", "checkpoint.keep_best=eval/lm loss", "checkpoint.keep_last=2"),
        *("checkpoint.save_every=15", "train.eval_every=10"),
    ): "checkpoint.keep_best compares saved steps that are also evaluated, but train.eval_every = 10 and "
    "checkpoint.save_every = 15; make save_every a multiple of eval_every",
    ("train.global_batch_size=129",): "the data fill 128 of the 129 packs of a step (train.global_batch_size = 129), "
    "and the other packs are empty; lower train.global_batch_size or data.seq_length",
}


@pytest.mark.parametrize("overrides, warning", WARNINGS.items(), ids=str)
def test_a_setting_without_effect_is_warned_of(overrides: tuple[str, ...], warning: str) -> None:
    assert check_run(parsed(*overrides), **LONG) == [warning]


def test_the_best_checkpoint_is_judged_without_data() -> None:
    keys = ("data.eval=a.jsonl", "checkpoint.keep_best=eval/lm loss", "checkpoint.keep_last=2", "train.eval_every=10")
    (warning,) = check_run(parsed(*keys, "checkpoint.save_every=15"))
    assert warning.startswith("checkpoint.keep_best compares saved steps that are also evaluated")
    assert check_run(parsed(*keys, "checkpoint.save_every=20")) == []


def test_what_has_an_effect_is_not_warned_of() -> None:
    fits = [
        "checkpoint.save_every=32",
        "train.eval_every=32",
        "profile.torch.steps=[32]",
        "train.global_batch_size=128",
    ]
    assert check_run(parsed(*fits), **LONG) == []
    assert check_run(parsed(*fits)) == [], "without data"


@pytest.mark.parametrize("setting", ["optim.schedule=constant", "optim.min_lr=1e-6"])
def test_a_smoke_run_whose_last_step_trains_nothing_is_warned_of(setting: str) -> None:
    one = dict(num_steps=1, num_packs=4, longest=10)
    warning = "the last of 1 step has learning rate 0 (optim.min_lr = 0) and changes no weight; for a short test use "
    assert check_run(parsed(), **one) == [f"{warning}optim.schedule=constant"]
    assert check_run(parsed(setting), **one) == []
    assert check_run(parsed(), num_steps=10, num_packs=40, longest=10) == [], "one step of ten is usual"


DYNAMIC_CP = ["parallel.cp=4", "parallel.dynamic_cp=true"]
NODES = (
    "parallel.gpus_per_node = 8, but torchrun started {0} processes on this node: dynamic CP plans messages between "
    "other nodes than there are; set parallel.gpus_per_node={0}"
)


@pytest.mark.parametrize(
    "world_size, local, warning",
    [(8, 4, NODES.format(4)), (16, 16, NODES.format(16)), (16, 8, None), (4, 4, None)],
    ids=["two nodes of 4", "a node of 16", "two nodes of 8", "half a node"],
)
def test_nodes_that_the_plan_does_not_know_are_warned_of(
    world_size: int, local: int, warning: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    assert check_run(parsed(*DYNAMIC_CP), **LONG) == ([] if warning is None else [warning])
    assert check_run(parsed(*DYNAMIC_CP, f"parallel.gpus_per_node={local}"), **LONG) == []
    assert check_run(parsed("parallel.cp=4"), **LONG) == [], "only dynamic CP reads the key"


def test_without_torchrun_nothing_is_known_of_nodes() -> None:
    assert check_run(parsed(*DYNAMIC_CP), **LONG) == []


def test_documents_beyond_the_positions_of_the_model() -> None:
    """Positions restart in every document, so the longest document decides, not the length of packs."""
    assert check_run(of_hf("m"), **LONG | {"longest": 512}) == []
    with pytest.raises(ConfigError) as refused:
        check_run(of_hf("m"), **LONG | {"longest": 513})
    problem = (
        "but model.hf = m was trained on 512 positions (max_position_embeddings).  Scale the positions: "
        "model.rope.scaling=yarn model.rope.factor=2 model.rope.original_max_position=512; or train beyond them as "
        "they are: model.rope.scaling=none"
    )
    assert str(refused.value) == f"the longest document has 513 tokens, {problem}"
    assert check_run(of_hf("m")) == [f"packs may hold documents of 1,024 tokens, {problem}"]


@pytest.mark.parametrize(
    "settings",
    [
        ["model.rope.scaling=none"],
        ["model.rope.base=5e6"],
        ["model.rope.scaling=yarn", "model.rope.factor=2", "model.rope.original_max_position=512"],
        ["model.rope.scaling=linear", "model.rope.factor=2"],
    ],
)
def test_positions_that_the_user_accepts_or_scales(settings: list[str]) -> None:
    assert check_run(of_hf("m", *settings), **LONG) == []


def test_a_scaling_that_does_not_reach_far_enough_is_refused() -> None:
    settings = ["model.rope.scaling=yarn", "model.rope.factor=1.5", "model.rope.original_max_position=512"]
    with pytest.raises(ConfigError, match="was trained on 512 positions, and model.rope.factor = 1.5 reaches 768."):
        check_run(of_hf("m", *settings), **LONG | {"longest": 769})


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["optim.warmup_steps=100"], "ConfigError: warm-up of 100 steps does not fit a run of 1 steps"),
        (
            ["checkpoint.resume=latest"],
            "CheckpointError: checkpoint.resume = latest names no checkpoint: the path does",
        ),
        (["checkpoint.resume=latest", "--no-data"], "CheckpointError: checkpoint.resume = latest names no checkpoint"),
        (["checkpoint.resume=m"], "CheckpointError: checkpoint.resume = m: the path has no checkpoint; expected a"),
        (["checkpoint.resume=must"], "CheckpointError: checkpoint.resume = must, but runs/a/checkpoints has no check"),
    ],
)
def test_check_refuses_what_training_refuses(
    overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "a.yaml", *overrides]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(message)


def test_check_prints_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "a.yaml", "checkpoint.save_every=50", "optim.schedule=constant"]) == 0
    assert "\nWARNING checkpoint.save_every = 50, but the run ends after 1 step: only" in capsys.readouterr().out
    steps = ["train.num_epochs=null", "train.num_steps=20", "checkpoint.resume=folder/of/another/machine"]
    assert main(["check", "a.yaml", "--no-data", "checkpoint.save_every=50", *steps]) == 0
    assert "\nWARNING checkpoint.save_every = 50, but the run ends after 20 steps" in capsys.readouterr().out


def test_a_pattern_is_answered_with_the_files_that_match(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "a.yaml", 'data.train=["*.jsonl", "no*.jsonl"]']) == 2
    first, second = capsys.readouterr().err.splitlines()[-2:]
    assert first.endswith("Patterns are not expanded.  Name the files, of which 1 match: 'data.train=[a.jsonl]'")
    assert second.endswith("Patterns are not expanded, and this pattern matches no file.")
