"""The notebook of the site: its cells run in order in one namespace, as in Jupyter, which is not installed."""

import ast
import json
import os
from pathlib import Path

import pytest

from tests.launching import Rank, ended
from tools.notebook_page import NOTEBOOK, cells


def shown(cell: str) -> str:
    """The cell, which prints the value of its last expression."""
    tree = ast.parse(cell)
    if isinstance(last := tree.body[-1], ast.Expr):
        tree.body[-1] = ast.parse(f"print('SHOWN', repr({ast.unparse(last.value)}))").body[0]
    return ast.unparse(tree)


@pytest.mark.slow
def test_the_cells_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = [shown(text) for kind, text in cells() if kind == "code"]
    (tmp_path / "cells.py").write_text("\n".join(code))
    monkeypatch.chdir(tmp_path)
    ((status, out, err),) = ended([Rank([], {**os.environ, "HF_HUB_OFFLINE": "1"}, "cells")])
    assert status == 0, out + err
    values = [value for value in out.split("SHOWN ")[1:]]
    assert len(values) == 7, out
    assert values[0].startswith("Recipe(the mapping: run.dir=runs/notebook, ") and values[1].startswith("layout ")
    losses, change = json.loads(values[4].splitlines()[0]), float(values[5].splitlines()[0])
    assert len(losses) == 6 and losses[-1] < losses[0] and change < 0


def test_the_notebook_has_no_outputs_and_its_form() -> None:
    content = json.loads(NOTEBOOK.read_text())
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    for cell in content["cells"]:
        assert set(cell) - {"execution_count", "outputs"} == {"cell_type", "id", "metadata", "source"}
        assert cell.get("outputs", []) == []
