"""A stopped and resumed run of every family equals an uninterrupted one, bit for bit.

test_resume.py has the layouts, test_resume_layouts.py the change of layout.
"""

from pathlib import Path

import pytest

from sft.hf.families import FAMILIES
from tests.ranks import scenarios
from tests.ranks.hf_models import recipe_of
from tests.ranks.layouts import CP
from tests.ranks.pool import Ranks
from tests.unit.fixtures import families

QUICK = ("nemotron_h", "step3p7")  # kinds of layers that test_resume.py lacks


@pytest.mark.card("resume")
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.grid) for name in FAMILIES]
)
def test_a_resumed_run_of_the_family_is_bitwise_equal(ranks: Ranks, tmp_path: Path, family: str) -> None:
    source = families.save(tmp_path / "source", family)
    (tmp_path / "checkpoint").mkdir()
    scenarios.check_bitwise(ranks(2), tmp_path / "checkpoint", [*recipe_of(source), *CP])
