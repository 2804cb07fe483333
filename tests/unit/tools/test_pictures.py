"""Every picture of the site is made by a tool: `make pages` runs it, or the pages with the picture name it.

Some tests check the content of pictures.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from sft.parallel.layout import Layout
from sft.recipe.load import parse_recipe
from tools import layer_kinds, pages, plot_cp
from tools.bench.__main__ import SUBJECTS
from tools.plot_layouts import FAULTS, LAYOUTS, RECIPE, ROOT, difference, draw, with_fault

SHOWN = re.compile(r"!\[[^\]]*\]\(([^)]*pictures/([^)/]+))\)")


def test_every_picture_has_a_tool() -> None:
    files = {path.name for path in (pages.DOCS / "pictures").iterdir()}
    assert files == set(pages.PICTURES) | set(pages.DRAWN_BY_HAND)
    assert {f"pictures/{name}" for name in pages.PICTURES} <= pages.PAGES.keys()  # `make lint` compares these


@pytest.mark.parametrize("path", sorted(pages.DOCS.rglob("*.md")), ids=lambda path: path.name)
def test_a_page_names_the_command_of_a_picture_that_is_not_compared(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for _, name in SHOWN.findall(text):
        assert name in pages.PICTURES or pages.DRAWN_BY_HAND[name] in text, f"{path.name} shows {name}"


def test_work_of_contiguous_parts_and_of_zigzag() -> None:
    """Of 8 chunks, chunk k attends to k whole chunks and half of its own: 0.5, 1.5, ..., 7.5 of 32."""
    drawn = plot_cp.attention_work()
    assert "work of ranks 0 to 3: 6%, 19%, 31%, 44%" in drawn  # 2, 6, 10 and 14 of 32
    assert "work of ranks 0 to 3: 25%, 25%, 25%, 25%" in drawn


def test_keys_that_ranks_receive() -> None:
    """The document of sft/parallel/halo.py: rank 0 receives 8 9, rank 1 receives 0 1 and 6 7, rank 2 receives 2 3."""
    assert re.findall(r"receives (\d) keys", plot_cp.halo()) == ["2", "4", "2"]


def test_bytes_of_layers_by_hand() -> None:
    """A token of Llama has 8 x 2 x 128 elements with 2 + 2 + 4 bytes, sent to 7 other ranks; of DeepSeek-V3, 576
    elements."""
    rows = {tuple(line.split(" | ")[:2]): line.split(" | ")[2:] for line in layer_kinds.table().splitlines()[2:]}
    assert rows["| full attention", "Llama-3.1-8B"][0] == f"{65_536 * 2_048 * 8 * 7 / 2**20:,.1f} MiB"
    assert rows["| latent attention", "DeepSeek-V3"][0] == f"{65_536 * 576 * 8 * 7 / 2**20:,.1f} MiB"
    # 15 chunks of 4,096 tokens have 127 keys before them; rank 7 holds the neighbouring chunks 7 and 8, so 14 chunks
    # receive keys.
    assert rows["| window of 128, sinks", "gpt-oss-20b"][0] == f"{14 * 127 * 1_024 * 8 / 2**20:,.1f} MiB"


def test_every_benchmark_is_on_the_page_of_numbers() -> None:
    text = (pages.DOCS / "numbers/index.md").read_text(encoding="utf-8")
    assert not [name for name in SUBJECTS if not re.search(rf"`{name}\b|bench {name}\b", text)]


# --- the picture of the README -----------------------------------------------------------------------------------


def test_each_layout_takes_all_its_processes() -> None:
    resolved = []
    for world_size, settings in LAYOUTS.values():
        config = parse_recipe(RECIPE, "recipe.yaml", ["run.dir=a", "data.train=a.jsonl", *settings]).config
        layout = Layout.resolve(config, world_size)
        resolved.append((layout.tp, layout.cp, layout.pp, layout.dp))
    assert resolved == [
        *((1, 1, 1, 1), (1, 1, 1, 2), (2, 1, 1, 1), (1, 1, 2, 1)),
        *((1, 4, 1, 1), (1, 4, 1, 1), (2, 2, 1, 1), (1, 2, 2, 1)),
    ]


def test_differences_are_relative() -> None:
    told = difference(np.array([4.0, 2.5, 1.5]), np.array([4.0, 2.0, 2.0]))
    assert np.isnan(told[0]) and told[1:].tolist() == [0.25, 0.25]


def test_the_picture_names_every_layout_and_fault(tmp_path: Path) -> None:
    curves = {name: np.array([5.0, 4.0 + 1e-8 * number]) for number, name in enumerate(LAYOUTS)}
    draw(curves, {name: np.array([5.5, 4.5]) for name in FAULTS}, tmp_path / "a.svg")
    picture = (tmp_path / "a.svg").read_text()
    assert all(f">{name}<" in picture for name in (*LAYOUTS, *FAULTS)) and "the tests allow 1e-6" in picture


def test_a_copy_has_the_fault(tmp_path: Path) -> None:
    for file, name in FAULTS.values():
        copy = with_fault(tmp_path, file, name)
        changed = [path for path in (copy / "sft").rglob("*.py") if path.read_text() != original(copy, path)]
        assert len(changed) == 1


def original(copy: Path, path: Path) -> str:
    return (ROOT / path.relative_to(copy)).read_text()
