"""Which lengths the long-context evaluation of a recipe asks."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest

from sft.config import Config
from sft.config.long import LongTask
from sft.data.long.tasks import TASKS
from sft.errors import ConfigError
from sft.recipe.long import asking, suite_settings
from tests.builders import QWEN3
from tests.builders import RECIPE as TEXT
from tests.builders import of_hf, parsed, refusal_lines


@pytest.fixture(autouse=True)
def folder(recipe_folder: Path) -> None:
    """A folder with a model m that was trained on 512 positions."""
    (recipe_folder / "m").mkdir()
    (recipe_folder / "m" / "config.json").write_text(json.dumps(QWEN3))


def test_the_defaults() -> None:
    settings = suite_settings(parsed())
    assert settings.tasks == get_args(LongTask) == TASKS
    assert settings.lengths == (256, 512, 1024, 2048, 4096)
    assert (settings.depths, settings.questions, settings.seed) == ((0, 0.25, 0.5, 0.75, 1), 4, 0)


def test_lengths_are_lengths_that_packs_may_have() -> None:
    long = ["data.long.lengths=[0.3, 0.01, 0.7, 1]", "data.long.tasks=[code]", "data.long.depths=1"]
    settings = suite_settings(parsed(*long, "data.doc_multiple=64"))
    assert settings.lengths == (256, 704, 1024) and settings.depths == (0.5,)  # 307, 10 and 716 rounded down
    assert suite_settings(parsed("data.long.lengths=[0.1]", "data.seq_length=3200")).lengths == (320,)
    dynamic = ["parallel.dynamic_cp=true", "parallel.cp=2", "data.long.lengths=[0.1]"]
    assert suite_settings(parsed(*dynamic)).lengths == (64,)  # 102, rounded down to a multiple of 2 x 32


def test_lengths_beyond_the_positions_are_left_out() -> None:
    def lengths(*overrides: str) -> tuple[int, ...]:
        return suite_settings(of_hf("m", "data.seq_length=512", *overrides)).lengths

    yarn = ["model.rope.scaling=yarn", "model.rope.original_max_position=512"]
    assert lengths() == (128, 256, 512)
    assert lengths(*yarn, "model.rope.factor=2.5") == (128, 256, 512, 1024)
    assert lengths("model.rope.base=2e6") == (128, 256, 512, 1024, 2048)  # the user accepts more positions


def test_too_few_positions() -> None:
    expected = (
        "data.long.lengths = [2.0, 4.0] with data.seq_length = 512 gives questions of 1,024, 2,048 tokens, but lengths "
        "must be at least 32, and model.hf = m has 512 positions.  Set data.long.lengths to multiples of "
        "data.seq_length in between, such as data.long.lengths=[0.0625], or scale the positions (model.rope.scaling)."
    )
    with pytest.raises(ConfigError, match=re.escape(expected)):
        suite_settings(of_hf("m", "data.seq_length=512", "data.long.lengths=[2.0, 4.0]"))


def test_packs_hold_the_longest_questions() -> None:
    """The changed recipe is a valid one, because rank 0 sends it as text."""
    best = ["checkpoint.keep_best=eval/lm loss", "checkpoint.export_hf=best"]
    teacher = ["data.teacher.k=8", "loss.distill.weight=0.5"]
    recipe = parsed("data.eval=a.jsonl", *best, *teacher)
    config = asking(recipe, suite_settings(recipe)).config
    assert (config.data.seq_length, config.data.eval, config.data.teacher.k) == (4096, None, None)
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_a_task_twice() -> None:
    assert "names code twice; name it once" in "\n".join(refusal_lines(TEXT, "data.long.tasks=[code, needle, code]"))
