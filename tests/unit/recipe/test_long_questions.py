"""Questions of a run that cannot be made."""

import re
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sft.console import QUIET, Console
from sft.data.chat.tokenizer import ByteTokenizer, ChatTokenizer
from sft.errors import DataError
from sft.parallel.layout import Layout
from sft.recipe import long_questions
from sft.recipe.long_questions import make_in_run, open_in_run, prepare_questions
from sft.recipe.resolved import Recipe
from tests.builders import parsed
from tests.unit.fixtures.folder import load_folder

CORPUS: Any = SimpleNamespace(shapes=[900, 500])
NO_TEMPLATE = "has no chat template, so messages cannot be written as text.  Give one"
LONG = "train.num_steps=100000000"  # so that questions cost little


def recipe_in(folder: Path, *overrides: str) -> Recipe:
    return parsed(f"data.cache_dir={folder}/cache", LONG, "data.long.lengths=[0.5]", *overrides)


def made(recipe: Recipe, tokenizer: ChatTokenizer) -> Any:
    layout = Layout.resolve(recipe.config, 1)
    return make_in_run(recipe, layout, tokenizer, CORPUS, QUIET, lambda: recipe.config.train.num_steps or 0)


def test_no_chat_template(tmp_path: Path) -> None:
    """true is refused with one paragraph, auto asks none; both say why."""
    tokenizer = load_folder(tmp_path, None)
    with pytest.raises(DataError, match=NO_TEMPLATE) as refused:
        made(recipe_in(tmp_path, "data.long.in_run=true"), tokenizer)
    assert "\n" not in str(refused.value)
    found = made(recipe_in(tmp_path), tokenizer)
    assert found.settings is None and re.search(f"not in this run: .*{NO_TEMPLATE}", found.lines[0])
    stream = StringIO()
    prepare_questions(recipe_in(tmp_path), tokenizer, CORPUS, Console(0, stream))
    assert re.search(f"long-context questions: not in this run: .*{NO_TEMPLATE}", stream.getvalue())


def test_a_run_asks_what_was_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """auto goes on without questions that are missing, and says so."""
    for collective in ("broadcast_from_rank0", "all_gather_objects", "on_every_rank"):
        monkeypatch.setattr(long_questions, collective, lambda make, group: make())
    recipe, tokenizer = recipe_in(tmp_path, "data.long.tasks=[needle]"), ByteTokenizer()
    layout = Layout.resolve(recipe.config, 1)
    data: Any = SimpleNamespace(
        position=SimpleNamespace(control=None), train=SimpleNamespace(corpus=CORPUS), vocab_size=259, num_steps=10**8
    )

    def opened(recipe: Recipe) -> tuple[list[int], str]:
        stream = StringIO()
        suites = open_in_run(recipe, layout, tokenizer, data, Console(0, stream))
        return [suite.length for suite in suites], stream.getvalue()

    lengths, said = opened(recipe)
    assert lengths == [] and "the questions of 512 tokens are not in data.cache_dir" in said
    prepare_questions(recipe, tokenizer, CORPUS, QUIET)
    lengths, said = opened(recipe)
    assert lengths == [512] and "up to 20 questions of 512 tokens: predicted" in said and "not in" not in said
    assert opened(recipe_in(tmp_path, "data.long.in_run=false")) == ([], "")
    with pytest.raises(DataError, match="questions of 512 tokens are not in .*  Run `sft data prepare a.yaml"):
        opened(recipe_in(tmp_path, "data.long.in_run=true", "data.long.seed=5"))
