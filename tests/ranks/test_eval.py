"""`sft eval` gives the records of a run's own evaluations, on every layout, and does not change the run."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sft.cli import main
from sft.metrics.results.records import flat
from sft.metrics.rows import ROUNDING, ROWS, SAME
from sft.run.lock import RunLock
from tests.builders import answer, chats
from tests.launching import HF_RECIPE, RECIPE, records, untimed
from tests.ranks import hf_models, scenarios
from tests.ranks.commands import Result, scored, sft
from tests.ranks.layouts import EP, MOE, PP, SHARDED, SP
from tests.ranks.pool import RankPool, Ranks
from tests.unit.fixtures import hf
from tests.unit.fixtures.folder import make_folder, template

# Relative tolerance; fp32 sums in another order.  One rounding of a loss of 5 nats is 5e-8 of the loss; the mean over
# 60 tokens has a smaller error.
LOSS_TOLERANCE = 1e-7
RUN = [
    "train.num_steps=2",
    "train.global_batch_size=2",
    "train.eval_every=1",
    "checkpoint.save_every=1",
    "optim.schedule=constant",
]
ONE = "parallel.cp=1"


def trained(pool: RankPool, folder: Path, *overrides: str) -> Path:
    """The recipe of a finished run of two steps on cp 2 that evaluated two held-out sets after every step."""
    chats(folder, 20)
    chats(folder, 7, "held_out.jsonl")
    chats(folder, 3, "more.jsonl")
    recipe = folder / "recipe.yaml"
    sets = f"{{eval: {folder}/held_out.jsonl, both: [{folder}/more.jsonl, {folder}/held_out.jsonl]}}"
    text = RECIPE.format(folder=folder).replace("seq_length: 256", f"seq_length: 256, eval: {sets}")
    recipe.write_text(text)
    assert main(["data", "prepare", str(recipe)]) == 0
    result = sft(pool, "train", str(recipe), *RUN, *overrides)
    assert result.code == 0, result.err
    (folder / "chat.jsonl").unlink()  # evaluation does not need the training data
    return recipe


@pytest.fixture(scope="module")
def dense(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(ranks(2), tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def experts(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(ranks(2), tmp_path_factory.mktemp("experts"), *MOE)


def logged(recipe: Path, step: int) -> dict[str, dict[str, Any]]:
    """The records of the run's evaluation after `step`, by held-out set."""
    return {r["set"]: r for r in records(recipe.parent, "eval") if r["step"] == step}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run, without the tokenised data."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and folder / "cache" not in path.parents]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_the_records_of_the_run_to_the_last_digit_and_nothing_of_it_changes(ranks: Ranks, dense: Path) -> None:
    """The records also agree while another process holds the lock of the run."""
    run = dense.parent / "run"
    with RunLock(run, report=print, heartbeat_s=1e6):
        before = contents(run)
        newest = scored(ranks(2), dense, *RUN)
        older = scored(ranks(2), dense, *RUN, "--from", str(run / "checkpoints/iter_0000001"))
        assert contents(run) == before
    for content, step in ((newest, 2), (older, 1)):
        assert content["step"] == step and f"iter_{step:07d}" in content["weights"]
        assert {name: untimed(record) for name, record in content["sets"].items()} == logged(dense, step)
    assert logged(dense, 1) != logged(dense, 2)
    assert newest["format"] == "sft eval 1" and newest["layout"]["cp"] == 2 and "megatron-core" in newest["versions"]
    # Every sample counts once: the 7 chats of test_run.py, with answers of 1, 2, 3, ... characters.
    assert [newest["sets"][name]["documents"] for name in ("eval", "both")] == [7, 10]


def test_the_lines_of_the_run_on_stdout_and_progress_on_stderr(ranks: Ranks, dense: Path) -> None:
    result = sft(ranks(2), "eval", str(dense), *RUN, "--from", str(dense.parent / "run"))
    lines = result.out.splitlines()
    record = logged(dense, 2)["both"]
    assert [line.split(":")[0] for line in lines] == ["held-out after step 2", "held-out both after step 2"]
    assert f"lm loss {record['lm loss']:.4f} on {record['tokens/supervised']} supervised tokens" in lines[1]
    assert "scoring the weights of " in result.err and "more.jsonl" in result.err


def assert_close(ours: dict[str, Any], logged: dict[str, Any]) -> None:
    """Numbers that rounding may change are close, counts are equal, and no other value depends on the layout."""
    rule = {row.name: row.layout for row in ROWS}
    assert ours.keys() == logged.keys()
    found = dict(flat(ours))
    for key, value in flat(logged):
        layout = rule[re.sub(r"^(loss by \w+)/[^/]+/", r"\1/NAME/", key)]
        if layout == ROUNDING and value is not None:
            assert found[key] == pytest.approx(value, rel=LOSS_TOLERANCE), key
        elif layout in (SAME, ROUNDING):
            assert found[key] == value, key


LAYOUTS = {"tp 2": [ONE, *SP], "pp 2": [ONE, *PP], "dp 2": [ONE]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_differ_by_rounding(ranks: Ranks, dense: Path, layout: str) -> None:
    content = scored(ranks(2), dense, *RUN, *LAYOUTS[layout])
    for name, record in logged(dense, 2).items():
        assert_close(untimed(content["sets"][name]), record)


ON_STAGES = pytest.param([ONE, *PP], marks=pytest.mark.grid)


@pytest.mark.parametrize("layout", [EP, [ONE, *SP, *EP], ON_STAGES], ids=" ".join)
def test_experts(ranks: Ranks, experts: Path, layout: list[str]) -> None:
    content = scored(ranks(2), experts, *RUN, *MOE, *layout)
    for name, record in logged(experts, 2).items():
        assert_close(untimed(content["sets"][name]), record)


def test_one_process_and_other_sets(ranks: Ranks, dense: Path) -> None:
    content = scored(ranks(2), dense, *RUN, ONE, f"data.eval={dense.parent}/more.jsonl", alone=True)
    assert list(content["sets"]) == ["eval"] and content["sets"]["eval"]["documents"] == 3
    of_run = logged(dense, 2)["both"]["loss by source"]["more"]
    ours = content["sets"]["eval"]["loss by source"]["more"]
    assert ours["tokens"] == of_run["tokens"] and ours["loss"] == pytest.approx(of_run["loss"], rel=LOSS_TOLERANCE)


def test_the_checkpoint_that_a_new_run_would_resume(ranks: Ranks, dense: Path, tmp_path: Path) -> None:
    older = dense.parent / "run/checkpoints/iter_0000001"
    content = scored(ranks(2), dense, *RUN, f"run.dir={tmp_path}/new", f"checkpoint.resume={older}")
    assert content["step"] == 1
    assert {name: untimed(record) for name, record in content["sets"].items()} == logged(dense, 1)


def gradient_buffers(overrides: Sequence[str], trains: bool) -> tuple[int, bool]:
    """The bytes of megatron-core's gradient buffers of an engine, and whether it has an optimizer."""
    with scenarios.running(overrides, trains=trains) as engine:
        buffers = [b for chunk in engine.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return sum(buffer.grad_data.nbytes for buffer in buffers), engine.optimizer is not None


def test_an_engine_that_does_not_train_has_no_gradients_and_no_optimizer(ranks: Ranks) -> None:
    for overrides in (SHARDED, MOE):
        assert ranks(2).run(gradient_buffers, overrides, False) == [(0, False)] * 2
        num_bytes, has_optimizer = ranks(2).run(gradient_buffers, overrides, True)[0]
        assert num_bytes > 100_000 and has_optimizer


# Refusals


def refused(pool: RankPool, recipe: Path, *words: str) -> str:
    """The error of `sft eval RECIPE` with these arguments: one paragraph, exit code 2, and no result."""
    before, file = contents(recipe.parent / "run"), recipe.parent / "refused.json"
    result: Result = sft(pool, "eval", str(recipe), *RUN, ONE, *words, "--json", str(file), alone=True)
    assert (result.code, result.out) == (2, "") and not file.exists()
    assert contents(recipe.parent / "run") == before
    (error,) = [line for line in result.err.splitlines() if "Error: " in line]
    return error


def test_what_cannot_be_scored(ranks: Ranks, dense: Path, tmp_path: Path) -> None:
    run, pool = dense.parent / "run", ranks(2)
    assert "nowhere does not exist in " in refused(pool, dense, "--from", "nowhere")
    assert f"no weights to score: {tmp_path} has none; expected a folder iter_" in refused(
        pool, dense, "--from", str(tmp_path)
    )
    nothing = refused(pool, dense, "data.eval=null")
    assert "data.eval (command line: data.eval=null) names no held-out set" in nothing
    assert "data.eval = gone.jsonl (command line: data.eval=gone.jsonl) does not exist" in refused(
        pool, dense, "data.eval=gone.jsonl"
    )
    other = refused(pool, dense, "model.rope.base=5e5")
    assert "iter_0000002 is of another model than this recipe: model.rope.base was 10000.0, is 500000.0" in other
    assert "checkpoint.allow_changes=[model.rope.base]" in other
    sizes = refused(pool, dense, "model.num_layers=4", "checkpoint.allow_changes=[model.num_layers]")
    assert "is of another model: " in sizes

    tokenizer = make_folder(tmp_path / "tokenizer", template("chatml"))
    tokens = refused(pool, dense, f"data.tokenizer={tokenizer}")
    assert f"iter_0000002 was trained with the tokenizer byte, and the recipe uses {tokenizer}, which makes" in tokens
    damaged = shutil.copytree(run / "checkpoints/iter_0000002", tmp_path / "damaged")
    shard = next(damaged.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"{damaged} is damaged: {shard} has " in refused(pool, dense, "--from", str(damaged))


def test_a_hugging_face_folder_has_the_loss_of_transformers(ranks: Ranks, tmp_path: Path) -> None:
    """Evaluates another folder than that of the recipe.  The first token of a sample is not predicted."""
    for name, seed in (("source", 4), ("other", 6)):
        hf.save(tmp_path / name, "qwen3", seed=seed)
    hf.save(tmp_path / "shallow", "qwen3", num_hidden_layers=1)
    samples = [answer(length, length // 4, seed=length) for length in (40, 97, 200, 33)]
    rows = [{"tokens": s.tokens.tolist(), "loss_mask": (s.weights > 0).astype(int).tolist()} for s in samples]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "recipe.yaml"
    held_out = f"seq_length: 256, eval: {tmp_path}/held_out.jsonl"
    recipe.write_text(HF_RECIPE.format(folder=tmp_path).replace("seq_length: 256", held_out))
    for words, name in (([], "source"), (["--from", str(tmp_path / "other")], "other")):
        model = hf.load(tmp_path / name)
        with torch.no_grad():
            losses = torch.cat([hf_models.hf_losses(model, s)[torch.from_numpy(s.weights[1:] > 0)] for s in samples])
        record = scored(ranks(2), recipe, *words)["sets"]["eval"]
        assert record["tokens/supervised"] == len(losses) == 10 + 24 + 50 + 8
        assert record["lm loss"] == pytest.approx(float(losses.mean()), abs=hf_models.TOKEN_LOSS_TOLERANCE)
    result = sft(ranks(2), "eval", str(recipe), "--from", str(tmp_path / "shallow"), "parallel.cp=1", alone=True)
    assert result.code == 2 and "shallow is another model than that of the recipe: model.num_layers is 1" in result.err


def test_an_accepted_change_of_the_model_is_scored(ranks: Ranks, dense: Path) -> None:
    words = ["model.rope.base=5e5", "checkpoint.allow_changes=[model.rope.base]"]
    losses = scored(ranks(2), dense, *RUN, ONE, *words, alone=True)["sets"]["eval"]["lm loss"]
    assert losses != logged(dense, 2)["eval"]["lm loss"]


def test_a_result_that_cannot_be_written_is_refused_before_the_work(ranks: Ranks, dense: Path) -> None:
    file = dense.parent / "nowhere/scored.json"
    result = sft(ranks(2), "eval", str(dense), *RUN, ONE, "--json", str(file), alone=True)
    assert result.code == 2 and "its folder does not exist" in result.err and result.out == ""
