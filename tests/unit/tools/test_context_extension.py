"""The data and the recipes of the picture of an extended context."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from sft.metrics.long import LongScores, scores_of
from sft.recipe.load import load_recipe
from sft.recipe.long import suite_settings
from tools import context_extension


def test_training_data_ask_for_a_number_of_their_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context_extension.make_data(tmp_path, share=0.02)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert len(tokenizer) == context_extension.VOCABULARY
    for name, most in (("short", 512), ("base", 2048), ("yarn", 8192)):
        for line in (tmp_path / f"{name}.jsonl").read_text().splitlines():
            user, assistant = json.loads(line)["messages"]
            assert user["content"].count(assistant["content"]) == 1
            assert len(tokenizer.encode(assistant["content"])) == 6  # each digit is a token
            assert len(tokenizer.apply_chat_template([user, assistant], tokenize=True)["input_ids"]) <= most
    monkeypatch.chdir(tmp_path)
    for run in (context_extension.SHORT, context_extension.BASE):
        (tmp_path / run.weights()).mkdir(parents=True)
    asked = [suite_settings(load_recipe(f"{name}.yaml")) for name in ("short", "base", "yarn")]
    assert asked[0] == asked[1] == asked[2] and asked[0].lengths == (256, 512, 1024, 2048, 4096, 8192)


def test_the_picture(tmp_path: Path) -> None:
    def result(right: bool) -> LongScores:
        facts = [
            {"task": "needle", "length": n, "depth": depth, "number": 0, "token_depth": depth, "prompt": 9, "tokens": 1}
            for n in (128, 256)
            for depth in (0.0, 1.0)
        ]
        return scores_of("a", facts, [0.5] * 4, [int(not right)] * 4)

    context_extension.draw({"before": result(False), "after": result(True)}, tmp_path / "a.png")
    assert plt.imread(tmp_path / "a.png").shape[:2] == (360, 744)  # 3 by 6.2 inches at 120 dots
