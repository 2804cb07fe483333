"""What is kept of a step that was no number."""

import json
import os
from pathlib import Path

from sft.run import nonfinite_dump

SAMPLES = [{"sample": 3, "row": "chat.jsonl:4"}, {"sample": 7, "row": "ü.jsonl:1"}]
RANKS = [{"rank": 0, "microbatch losses": ["3.5"]}, {"rank": 1, "microbatch losses": ["nan", "inf"]}]


def test_everything_is_in_one_folder(tmp_path: Path) -> None:
    made = nonfinite_dump.keep(tmp_path, 12, samples=SAMPLES, ranks=RANKS, recipe="run: {dir: a}\n")
    assert made == tmp_path / "bad_steps" / "step_0000012"
    assert sorted(os.listdir(made)) == ["ranks.json", "recipe.yaml", "samples.json"]
    assert json.loads((made / "samples.json").read_text()) == SAMPLES
    assert json.loads((made / "ranks.json").read_text()) == RANKS
    assert (made / "recipe.yaml").read_text() == "run: {dir: a}\n"


def test_the_same_step_again_takes_the_place(tmp_path: Path) -> None:
    """Resumed, and bad once more."""
    for ranks in (RANKS, RANKS[:1]):
        made = nonfinite_dump.keep(tmp_path, 12, samples=SAMPLES, ranks=ranks, recipe="")
    assert json.loads((made / "ranks.json").read_text()) == RANKS[:1]
    other = nonfinite_dump.keep(tmp_path, 13, samples=[], ranks=[], recipe="")
    assert made.is_dir() and other.name == "step_0000013"
