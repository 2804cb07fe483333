"""Generates pages: docs/config.md, docs/metrics.md and its schema, docs/architecture.md, docs/recipes.md.

python -m tools.pages            write all pages
python -m tools.pages --check    exit status 1 if a page is out of date
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tools import config_docs, metrics_docs, recipes_docs, room_diagram

DOCS = Path(__file__).resolve().parents[1] / "docs"
# Each function converts the current text of a page to the generated text.
PAGES: Mapping[str, Callable[[str], str]] = {
    "config.md": config_docs.page,
    "metrics.md": metrics_docs.page,
    "metrics.schema.json": metrics_docs.schema_text,
    "architecture.md": room_diagram.page,
    "recipes.md": recipes_docs.page,
}


def main(argv: list[str] | None = None, folder: Path = DOCS) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only print which pages are out of date")
    is_check = parser.parse_args(argv).check
    texts = {folder / name: (folder / name).read_text(encoding="utf-8") for name in PAGES}
    stale = {path: text for path, before in texts.items() if (text := PAGES[path.name](before)) != before}
    for path, text in stale.items():
        if is_check:
            print(f"{path.name} is out of date; run: python -m tools.pages", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
    return int(is_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
