"""`sft.train` with the real trainer: several times in one process, and once in each process of torchrun."""

import json
import os
from pathlib import Path

import pytest

from tests.builders import chats
from tests.launching import RECIPE, Rank, ended, environments, records, start

# A notebook: each entry is a cell.
ALONE = """
import json, os, signal, sys
import sft

folder, one = sys.argv[1], {"parallel.cp": 1}
facts, before = {}, signal.getsignal(signal.SIGTERM)
recipe = sft.load("recipe.yaml", one)
assert sft.prepare(recipe).train.num_samples == 8
steps = []
first = sft.train(recipe, on_step=lambda record: steps.append(record["lm loss"]))
facts["steps"] = steps
facts["first"] = [first.step, first.num_steps, first.stopped, first.last["lm loss"]]
scored = sft.evaluate(sft.load("recipe.yaml", one | {"data.eval": "chat.jsonl"}))
facts["scored"] = [scored.step, scored.records["eval"]["lm loss"], scored.weights]
again = sft.train(recipe)
facts["again"] = [again.step, again.is_done, again.last]
try:  # the refusal to resume comes after the process group was made
    sft.train(sft.load("recipe.yaml", one | {"run.seed": 7, "train.num_steps": 4}))
except sft.SftError as error:
    facts["refused"] = str(error)
longer = {"run.dir": f"{folder}/longer", "data.cache_dir": f"{folder}/run/cache", "train.num_steps": 4}
longer["data.eval"] = "chat.jsonl"
sft.prepare(sft.load("recipe.yaml", one | longer), quiet=True)
halved = sft.train(sft.load("recipe.yaml", one | longer | {"run.exit_after_minutes": 1e-6}))
facts["stopped"] = [halved.step < 4, halved.exit_code, halved.stopped]
print("QUIET")
scores = []
ended = sft.train(sft.load("recipe.yaml", one | longer), on_evaluation=scores.append, quiet=True)
facts["scores"] = [(record["set"], record["step"]) for record in scores]
facts["ended"] = [ended.step, ended.exit_code]
facts["signals"] = signal.getsignal(signal.SIGTERM) == before
json.dump(facts, open("facts.json", "w"))
"""
# The callback of rank 0 fails after the first step; RANKED continues this run.
BROKEN = """
import sft, torch

def fails(record):
    torch.manual_seed(0)
    raise KeyError(record["step"])

try:
    outcome = sft.train(sft.load("recipe.yaml", {"run.dir": "ranked", "data.cache_dir": "run/cache"}), on_step=fails)
    print("ENDED", outcome.step, outcome.stopped)
except KeyError as error:
    print("ENDED", repr(error))
"""
RANKED = """
import sft

recipe = sft.load("recipe.yaml", {"run.dir": "ranked", "data.cache_dir": "run/cache"})
outcome = sft.train(recipe)
try:
    sft.train(recipe)
except sft.SftError as error:
    print("ENDED", outcome.step, outcome.is_done, repr(outcome.last["lm loss"]), "trained before" in str(error))
"""


@pytest.mark.slow
def test_a_notebook_and_ranks_of_torchrun_train_as_the_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats(tmp_path, 8)
    # The command on two ranks prepares the data and writes the recipe.
    assert [code for code, _, _ in start(tmp_path, [])] == [0, 0]
    expected = [record["lm loss"] for record in records(tmp_path, "train")]

    monkeypatch.chdir(tmp_path)
    for name, program in (("broken", BROKEN), ("ranked", RANKED)):
        (tmp_path / f"{name}.py").write_text(program)
        outputs = ended([Rank([], {**os.environ, **env}, name) for env in environments(2)])
        told = [out.partition("ENDED ")[2].strip() for _, out, _ in outputs]
        if name == "broken":
            assert told == ["KeyError(1)", "1 another rank was asked to stop"], outputs
    assert told == [f"2 True {expected[-1]!r} True"] * 2, outputs

    (tmp_path / "alone").mkdir()
    chats(tmp_path / "alone", 8)
    (tmp_path / "alone/recipe.yaml").write_text(RECIPE.format(folder=tmp_path / "alone"))
    (tmp_path / "alone/notebook.py").write_text(ALONE)
    monkeypatch.chdir(tmp_path / "alone")
    ((code, out, err),) = ended([Rank([str(tmp_path / "alone")], {**os.environ}, "notebook")])
    assert code == 0, out + err
    facts = json.loads((tmp_path / "alone/facts.json").read_text())
    assert facts["first"][:3] == [2, 2, None] and facts["first"][3] == pytest.approx(expected[-1], rel=1e-6)  # cp 1
    step, loss, weights = facts["scored"]
    assert step == 2 and loss == pytest.approx(expected[-1], rel=0.05) and "iter_0000002" in weights
    assert facts["again"] == [2, True, None]
    assert "run.seed" in facts["refused"] and "checkpoint.allow_changes" in facts["refused"]
    assert facts["stopped"][:2] == [True, 75] and "exit_after_minutes" in facts["stopped"][2]
    assert facts["ended"] == [4, 0] and facts["signals"] and facts["steps"][-1] == facts["first"][3]
    assert facts["scores"][-1] == ["eval", 4]
    said = [line.split(":")[0] for line in out.partition("QUIET\n")[2].splitlines()]
    assert [line for line in said if line != "WARNING"] == ["lm loss, train", "lm loss, held-out", "done"]
