"""The picture of students on labels and on a teacher."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from sft.metrics.results.records import SCHEMAS
from tools.plot_students import draw, read_students, row


def test_a_row_of_the_table() -> None:
    steps = np.array([0.0, 20, 40, 60])
    assert row(steps, np.array([0.1, 0.5, 0.4, 0.9])) == "20, 60 (0.90)"
    assert row(steps, np.array([0.1, 0.6, 0.4, 0.3])) == "20, - (0.60)"
    assert row(steps, np.array([0.1, 0.2, 0.3, 0.4])) == "-, - (0.40)"


def test_runs_in_order_and_the_picture(tmp_path: Path) -> None:
    for name in ("labels-7", "teacher-10", "labels-10", "teacher-7", "other"):
        (tmp_path / name).mkdir()
        records = [
            {"kind": "eval", "step": step, "set": held_out, "token accuracy": step / 40}
            for step in (0, 20, 40)
            for held_out in ("512", "2048")
        ]
        records[0]["schema"] = SCHEMAS[-1]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    students = read_students(tmp_path)
    assert [*students] == [("labels", 7), ("teacher", 7), ("labels", 10), ("teacher", 10)]
    assert students["labels", 7]["2048"].tolist() == [[0, 20, 40], [0, 0.5, 1]]
    draw(students, tmp_path / "a.png")
    assert plt.imread(tmp_path / "a.png").shape[:2] == (418, 1210)  # 3.8 by 11 inches at 110 dots
