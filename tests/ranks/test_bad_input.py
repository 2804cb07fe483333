"""A mistake in the input ends a run of two real processes with one paragraph from rank 0 and exit code 2, and leaves
nothing.

Mistakes that the recipe alone shows are reported without starting torch (tests/unit/commands/test_cli.py,
tests/unit/recipe); this file has mistakes that only the running processes can find.
"""

from pathlib import Path

import pytest

from tests.launching import GOOD, start

MISTAKES = {  # overrides, beginning of rank 0's message, a part of the message
    "data that cannot be prepared": (
        ["data.doc_multiple=64"],
        "DataError: {folder}/chat.jsonl is not tokenised with these settings in {folder}/run/cache.  First run ",
        "sft data prepare {folder}/recipe.yaml data.doc_multiple=64",
    ),
    "warm-up longer than the run": (
        ["train.num_steps=null", "train.num_epochs=1", "optim.warmup_steps=100"],
        "ConfigError: warm-up of 100 steps does not fit a run of ",
        "Set in: optim.warmup_steps (command line: optim.warmup_steps=100).",
    ),
    "no checkpoint to start from": (["model.init_from=no/where"], "CheckpointError: model.init_from = no/where", ""),
    "more processes than the layout": (["parallel.cp=1", "parallel.tp=4"], "ConfigError: ", "tp = 4"),
}


@pytest.mark.parametrize("overrides,begins,mentions", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_paragraph(tmp_path: Path, overrides: list[str], begins: str, mentions: str) -> None:
    """Tests one mistake for each place that can refuse; the other messages have unit tests of their own."""
    (tmp_path / "chat.jsonl").write_text(GOOD + '\n{"messages": [' if "doc_multiple" in overrides[0] else GOOD)
    (code, _, told), other = start(tmp_path, overrides)
    assert code == 2, told
    assert told.startswith(begins.format(folder=tmp_path)), told
    assert mentions.format(folder=tmp_path) in told and "Traceback" not in told
    assert len(told.strip().splitlines()) <= 6
    assert other == (2, "", "")
    assert not list(tmp_path.glob("run/checkpoints/*"))
