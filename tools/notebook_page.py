"""Makes docs/start/notebook.md, which shows the cells of docs/start/notebook.ipynb on the site."""

import json
from pathlib import Path

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs/start/notebook.ipynb"
_FILE = "\nThe file: [notebook.ipynb](notebook.ipynb); tools/notebook_page.py makes this page from it.\n"


def cells() -> list[tuple[str, str]]:
    """The kind, markdown or code, and the text of each cell."""
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return [(cell["cell_type"], "".join(cell["source"])) for cell in content["cells"]]


def page(before: str) -> str:
    """The page; its current text is not read.  tests/docs/test_notebook.py runs the cells."""
    (_, first), *rest = cells()
    parts = [first + "\n" + _FILE]
    for kind, text in rest:
        parts.append(f"{text}\n" if kind == "markdown" else f"<!-- not run: part -->\n```python\n{text}\n```\n")
    return "\n".join(parts)
