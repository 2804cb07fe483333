"""The picture of the README: its layouts are possible, and it shows the differences that there are."""

from pathlib import Path

import numpy as np
import pytest

from sft.parallel.layout import Layout
from sft.recipe.load import parse_recipe
from tools.plot_layouts import LAYOUTS, RECIPE, differences, draw


def test_each_layout_takes_all_its_processes() -> None:
    resolved = []
    for world_size, settings in LAYOUTS.values():
        config = parse_recipe(RECIPE, "recipe.yaml", ["run.dir=a", "data.train=a.jsonl", *settings]).config
        layout = Layout.resolve(config, world_size)
        resolved.append((layout.tp, layout.cp, layout.pp, layout.dp))
    assert resolved == [
        (1, 1, 1, 1),
        (1, 1, 1, 2),
        (2, 1, 1, 1),
        (1, 1, 2, 1),
        (1, 4, 1, 1),
        (1, 4, 1, 1),
        (2, 2, 1, 1),
        (1, 2, 2, 1),
    ]


def test_differences_are_relative_to_the_first() -> None:
    curves = {"a": np.array([4.0, 2.0]), "b": np.array([4.0, 2.5]), "c": np.array([3.0, 2.0])}
    told = differences(curves)
    assert list(told) == ["b", "c"]
    assert told["b"].tolist() == [0.0, 0.25] and told["c"].tolist() == [0.25, 0.0]


def test_the_picture_names_every_layout(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw({name: np.array([5.0, 4.0 + 1e-8 * number]) for number, name in enumerate(LAYOUTS)}, tmp_path / "a.svg")
    picture = (tmp_path / "a.svg").read_text()
    assert all(f">{name}<" in picture for name in LAYOUTS) and "promised: 1e-6" in picture
