"""Generates pages, tables and pictures of docs/ that follow from the code alone.

python -m tools.pages            write all pages
python -m tools.pages --check    exit status 1 if a page is out of date
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from sft.hf.families import FAMILIES
from tools import (
    agent_docs,
    api_docs,
    cards,
    cli_docs,
    config_docs,
    fp8_table,
    kernel_table,
    layer_kinds,
    memory_table,
    metrics_docs,
    notebook_page,
    plot_balance,
    plot_cp,
    recipes_docs,
    room_diagram,
    speed_table,
    traffic_table,
)

DOCS = Path(__file__).resolve().parents[1] / "docs"
PICTURES: Mapping[str, Callable[[], str]] = {
    "context-parallel.svg": plot_cp.attention_work,
    "halo.svg": plot_cp.halo,
    "packing.svg": plot_balance.picture,
    "states.svg": plot_cp.states,
    "zigzag.svg": plot_cp.zigzag,
}
# Pictures that no command checks: they show measurements, or matplotlib draws them, whose files differ between its
# releases.  Each value says how the picture was made.
DRAWN_BY_HAND: Mapping[str, str] = {
    "delta-rule.svg": "`plot_delta_rule` of commit 86519c67",
    "dynamic-cp.png": "`plot_dynamic_cp` of commit 6f3cfd08",
    "layouts.svg": "python -m tools.plot_layouts",
    "distil.png": "python -m tools.plot_students",
    "extension.png": "python -m tools.context_extension",
    "inspect.png": "sft data inspect",
    "moments.png": "python -m tools.plot_moments",
    "plan.png": "sft plan",
    "retrieval.png": "sft plot",
}


def _performance(before: str) -> str:
    return traffic_table.page(memory_table.page(before))


def _drawn(picture: Callable[[], str], before: str) -> str:
    """The picture; the current text of its file is not read."""
    return picture()


# Each function converts the current text of a page to the generated text.
PAGES: Mapping[str, Callable[[str], str]] = {
    "reference/config.md": config_docs.page,
    "reference/metrics.md": metrics_docs.page,
    "reference/metrics.schema.json": metrics_docs.schema_text,
    "reference/kernels.md": kernel_table.page,
    "reference/cli.md": cli_docs.page,
    "reference/errors.md": cli_docs.errors_page,
    "concepts/architecture.md": room_diagram.page,
    "reference/recipes.md": recipes_docs.page,
    "concepts/layer-kinds.md": layer_kinds.page,
    "concepts/memory.md": fp8_table.page,
    "numbers/performance.md": _performance,
    "numbers/estimates.md": speed_table.page,
    **{f"pictures/{name}": partial(_drawn, picture) for name, picture in PICTURES.items()},
    "reference/python-api.md": api_docs.page,
    "start/notebook.md": notebook_page.page,
    "llms.txt": agent_docs.llms_text,
    "../skills/sft/SKILL.md": agent_docs.skill,
    **{f"cards/{cards.file_of(name)}.json": partial(cards.with_recipes, name) for name in FAMILIES},
    **{f"cards/{cards.file_of(name)}.md": partial(cards.page, name) for name in FAMILIES},
    "cards/index.md": cards.index,
    "../README.md": cards.summary,
}


def _text(file: Path) -> str:
    """The text of a page; "" for a page that is new."""
    return file.read_text(encoding="utf-8") if file.exists() else ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only print which pages are out of date")
    is_check = parser.parse_args(argv).check
    stale = []
    for name, make in PAGES.items():  # a page may be made from one above it
        before = _text(DOCS / name)
        text = make(before)
        if text != before:
            stale.append(name)
            if is_check:
                print(f"{name} is out of date; run: python -m tools.pages", file=sys.stderr)
            else:
                (DOCS / name).write_text(text, encoding="utf-8")
    return int(is_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
