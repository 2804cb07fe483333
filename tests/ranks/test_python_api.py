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
first = sft.train(recipe)
facts["first"] = [first.step, first.num_steps, first.stopped, first.last["lm loss"]]
again = sft.train(recipe)
facts["again"] = [again.step, again.is_done, again.last]
try:  # the refusal to resume comes after the process group was made
    sft.train(sft.load("recipe.yaml", one | {"run.seed": 7, "train.num_steps": 4}))
except sft.SftError as error:
    facts["refused"] = str(error)
longer = {"run.dir": f"{folder}/longer", "data.cache_dir": f"{folder}/run/cache", "train.num_steps": 4}
halved = sft.train(sft.load("recipe.yaml", one | longer | {"run.exit_after_minutes": 1e-6}))
facts["stopped"] = [halved.step < 4, halved.exit_code, halved.stopped]
ended = sft.train(sft.load("recipe.yaml", one | longer))
facts["ended"] = [ended.step, ended.exit_code]
facts["signals"] = signal.getsignal(signal.SIGTERM) == before
json.dump(facts, open("facts.json", "w"))
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

    (tmp_path / "ranked.py").write_text(RANKED)
    monkeypatch.chdir(tmp_path)
    outputs = ended([Rank([], {**os.environ, **env}, "ranked") for env in environments(2)])
    told = [out.partition("ENDED ")[2].strip() for _, out, _ in outputs]
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
    assert facts["again"] == [2, True, None]
    assert "run.seed" in facts["refused"] and "checkpoint.allow_changes" in facts["refused"]
    assert facts["stopped"][:2] == [True, 75] and "exit_after_minutes" in facts["stopped"][2]
    assert facts["ended"] == [4, 0] and facts["signals"]
