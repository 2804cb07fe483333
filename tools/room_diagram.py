"""Makes the diagram of docs/concepts/architecture.md: packages and allowed imports, by the contract in setup.cfg.

tools/pages.py writes the diagram into the page.
"""

import ast
import configparser
import re
from pathlib import Path

from tools import page_text

ROOT = Path(__file__).parents[1]


def layers() -> list[list[str]]:
    """The packages of each layer, the highest first: [["__main__"], ["cli"], ..., ["errors", "console", ...]]."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = contracts["importlinter:contract:layers"]["layers"].split("\n")
    return [[name.strip(" ()") for name in line.split("|")] for line in lines if line.strip()]


def purpose(package: str) -> str:
    """The first sentence of the package's docstring, up to a colon."""
    folder = ROOT / "sft" / package
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    opening = " ".join(text.split("\n\n")[0].split())
    return re.split(r"[.:](?: |$)", opening)[0]


def diagram() -> str:
    """One block per layer, and an arrow from each block to the next.  Packages of a block do not import each other."""
    blocks = []
    for packages in layers():
        blocks.append("".join(f"  {name:14}{purpose(name)}\n" for name in packages))
    return "      |\n      v\n".join(blocks)


def page(text: str) -> str:
    """The page `text` with the current diagram."""
    return page_text.replaced(text, "```text rooms\n", "```\n", diagram())
