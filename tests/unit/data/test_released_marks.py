"""Compares our masks with those of {% generation %} in trl's training templates, as transformers reads them.

The differences are listed here.  Marked, but not supervised by us, because the model need not write it:

    "\\n" after the end of a turn          a server stops at the end; Qwen2.5's blocks begin with the header's, too
    "<think>\\n", "<|start|>assistant"     the block begins before the end of the prompt, which shows this text
    "<|end|>" of gpt-oss                  in last place, the turn ends with <|return|>
    "<|endoftext|>" of Phi-3              follows the last turn's own end, <|end|>

If a marked block ends with spaces that a tokenizer drops, transformers marks all text after it (transformers#47325);
these tokenizers drop none.
"""

from itertools import groupby
from pathlib import Path

import pytest

from sft.errors import DataError
from tests.unit.fixtures.model_folder import pieces_of
from tests.unit.released_chats import CHATS
from tests.unit.released_templates import FAMILIES, NAMES, Model, folder_of_templates

MARKED = [family for family in FAMILIES if (folder_of_templates() / f"{family.template}_training.jinja").exists()]
# Texts that are marked and not supervised, in all chats together.
NOT_OURS: dict[str, set[str]] = {
    "llama3": set(),
    "qwen2_5": {"\n"},
    "qwen2_5_vl": {"\n"},
    "qwen3": {"\n"},
    "qwen3_instruct_2507": {"\n"},
    "qwen3_vl": {"\n"},
    "qwen3_5_nothink": {"\n", "<think>\n", "<think>\n\n</think>\n\n"},
    "qwen3_5_think": {"\n", "<think>\n"},
    "qwen3_6": {"\n", "<think>\n"},
    "qwen3_8": {"\n", "<think>\n"},
    "phi3": {"<|endoftext|>"},
    "gemma": {"\n"},
    "gemma3": {"\n"},
    "gptoss": {"<|start|>assistant", "<|end|>"},
    "glm4moe": set(),
    "deepseekv3": {"<｜Assistant｜>", "<｜tool▁outputs▁end｜>"},
    "deepseek_r1_distill": {"<｜Assistant｜>", "<｜Assistant｜><think>\n"},
}


def test_all_training_templates_are_tried() -> None:
    assert {family.template for family in MARKED} == set(NOT_OURS)
    assert len(MARKED) == 17


@pytest.mark.parametrize("name", NOT_OURS)
def test_marks(name: str, tmp_path: Path) -> None:
    model = Model(tmp_path, f"{name}_training", FAMILIES[NAMES.index(name)])
    theirs, ours, accepted = set(), set(), 0
    for chat in CHATS:
        try:
            encoding = model.encoded(chat)
        except DataError:
            continue  # test_released_templates.py lists these
        accepted += 1
        ids, mask = model.generated(chat)
        assert encoding.tokens.tolist()[: len(ids)] == ids
        pieces = [piece.decode() for piece in pieces_of(ids, model.tokens)]
        labels = zip((encoding.weights > 0).tolist(), mask, pieces)
        for (is_ours, is_theirs), group in groupby(labels, key=lambda label: (label[0], bool(label[1]))):
            if is_ours != is_theirs:
                (ours if is_ours else theirs).add("".join(piece for _, _, piece in group))
    assert accepted >= 3
    assert not ours
    assert theirs == NOT_OURS[name]
