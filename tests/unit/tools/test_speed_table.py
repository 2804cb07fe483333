"""The table of predicted speeds of recipes: its ranges, and that every row has a recipe that loads."""

import pytest

from sft.estimate.attention_kernels import Assumed
from sft.layers.kernel_rates import FLASH3, FLASH4, Rate
from sft.parallel.layout import Layout
from sft.recipe.load import load_recipe
from tools.speed_table import ROOT, ROWS, at_best, predicted, table

pytestmark = pytest.mark.usefixtures("released_models")


def test_the_best_of_a_range() -> None:
    known, ranged = Assumed(FLASH4, Rate(700, 600, "a")), Assumed(FLASH3, Rate(600, 400, "b", (650, 500)))
    assert at_best({"full attention": ranged, "window attention": known, "latent attention": Assumed("c", None)}) == {
        "full attention": Assumed(FLASH3, Rate(650, 500, "b", (650, 500))),
        "window attention": known,
        "latent attention": Assumed("c", None),
    }


def test_a_range_of_rates_gives_a_range_of_speeds() -> None:
    """Qwen3.6 has heads of 256, whose backward pass by FlashAttention-3 nobody has published."""
    config = load_recipe(str(ROOT / "recipes" / "qwen36_27b_128k.yaml")).config
    low, high = (predicted(config, Layout.resolve(config, 16), "h100", is_best=best).mfu for best in (False, True))
    assert 0.3 < low < high < 0.45


def test_a_row_for_each_case() -> None:
    rows = [line for line in table().splitlines() if line.startswith("| ")][1:]
    assert [row.split()[1] for row in rows] == [row.recipe for row in ROWS]
