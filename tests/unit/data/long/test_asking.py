"""Models that think are asked without thinking, or refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sft.data.chat.tokenizer import FolderTokenizer
from sft.data.long.asking import ask, without_thinking
from sft.errors import DataError
from tests.unit.fixtures.folder import load_folder, load_letters, template
from tests.unit.released_templates import Models, made_once

Tokenizers = Callable[[str], FolderTokenizer]
OFF = {"enable_thinking": False}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return made_once(tmp_path_factory.mktemp)


@pytest.mark.parametrize(
    ("name", "switches", "header", "answer"),
    [
        ("qwen2_5", {}, "<|im_start|>assistant\n", "27"),
        ("qwen3", OFF, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "27"),
        ("qwen3_5_think", OFF, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "27"),
        ("gemma4", OFF, "<|turn>model\n", "27"),
        ("glm4moe", OFF, "/nothink<|assistant|>\n<think></think>", "\n27"),
    ],
)
def test_a_switch_of_the_template_turns_thinking_off(
    models: Models, name: str, switches: dict[str, bool], header: str, answer: str
) -> None:
    asking = without_thinking(models(name).ours)
    assert isinstance(asking, FolderTokenizer) and asking.template.switches == switches
    asked = ask("How many?", "27", ("many",), asking)
    assert asking.decode(asked.tokens[: asked.answer]).endswith(header)
    assert asking.decode(asked.tokens[asked.answer :]) == answer
    assert asking.decode(asked.tokens[asked.positions[0] :]).lstrip().startswith("many")


def test_the_prompt_is_that_of_transformers(models: Models) -> None:
    """apply_chat_template with thinking off gives the tokens before the answer."""
    for name in ("qwen3", "glm4moe"):
        model = models(name)
        messages = [{"role": "user", "content": "How many?"}]
        theirs = model.theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **OFF)
        asked = ask("How many?", "27", (), without_thinking(model.ours))
        assert asked.tokens[: asked.answer].tolist() == theirs


def test_a_switch_that_the_recipe_turns_on_is_turned_off(tmp_path: Path) -> None:
    text = template("qwen3").replace("add_generation_prompt %}", "add_generation_prompt and enable_thinking %}")
    assert text != template("qwen3")
    tokenizer = load_folder(tmp_path, text, chat_template_kwargs={"enable_thinking": True})
    with pytest.raises(DataError, match="cannot ask for an answer without thinking"):
        without_thinking(tokenizer)  # this template writes no header with the switch off


@pytest.mark.parametrize("name", ["gptoss", "deepseekv3"])
def test_a_template_without_such_a_switch_is_refused(models: Models, name: str) -> None:
    with pytest.raises(DataError, match="cannot ask for an answer without thinking: its prompt ends with .* reads one"):
        without_thinking(models(name).ours)


def test_no_chat_template(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no chat template, so messages cannot be written as text.  Give one"):
        without_thinking(load_folder(tmp_path, None))


def test_characters_that_a_tokenizer_lacks(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot write abcghjlop.* and the questions .* are English text"):
        without_thinking(load_letters(tmp_path))
