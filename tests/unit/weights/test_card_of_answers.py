"""The section of the model card about long-context questions."""

import json
from pathlib import Path
from typing import Any

from sft.weights.export.model_card import write_model_card
from sft.weights.export.original import Original

FELL = "needle at 4,096 tokens fell from 1.00 to 0.11 of 9 answers (95% interval of the difference: -0.89 to -0.23)"
TABLE = """\
## Questions about long texts

Share of right answers by the length of the text in tokens, before training → now; answers are read, not generated:

| task | 1,024 | 4,096 |
|---|---|---|
| needle | 1.00 → 1.00 | 1.00 → 0.11 ↓ |
| code | - | 0.50 → 1.00 |

**Below the base, beyond chance (↓):**
"""


def record(step: int, length: int, **right: str) -> dict[str, Any]:
    answers = {task: {"right": 0.0, "loss": 1.5, "each": each} for task, each in right.items()}
    return {"kind": "long", "step": step, "length": length, "digest": f"{length}", "answers by task": answers}


def card(folder: Path, records: list[dict[str, Any]], step: int, tail: str = "") -> str:
    run = folder / "run"
    checkpoint = run / "checkpoints" / f"iter_{step:07d}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    common = {"sft": {"recipe": {}, "state": {"step": step, "num_tokens": 9}}}
    write_model_card(folder, checkpoint, common, Original(folder=folder, name="base", tokenizer=folder))
    return (folder / "README.md").read_text()


RECORDS = [
    record(0, 1024, needle="111"),
    record(0, 4096, needle="1" * 9, code="10"),
    {"kind": "train", "step": 7, "lm loss": 2.0},
    record(7, 1024, needle="111"),
    record(7, 4096, needle="0" * 8 + "1", code="11"),
]


def test_the_table_before_and_after(tmp_path: Path) -> None:
    text = card(tmp_path, RECORDS, 7)
    assert TABLE in text and f"- {FELL}\n" in text and "| training | 7 | 2.0000 |" in text


def test_other_steps_other_questions_and_damaged_lines(tmp_path: Path) -> None:
    assert "long texts" not in card(tmp_path, RECORDS, 5)
    other = [{**RECORDS[1], "digest": "other"}, *RECORDS[2:]]
    text = card(tmp_path, other, 7)
    assert "| needle | 1.00 | 0.11 |" in text and "→" not in text and "Below the base" not in text
    assert "| training | 7 |" in card(tmp_path, RECORDS, 7, '{"kind": "lo')
    assert "long texts" not in card(tmp_path, [*RECORDS, record(7, 1024, needle="")], 7)
