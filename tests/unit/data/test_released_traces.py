"""Traces of tool calls under released templates: each turn is trained as the last one of `apply_chat_template`."""

import pytest

from sft.data.chat.encode_chat import Encoding, encode_chat, encode_turns
from sft.data.chat.tree import Grown, texts_of
from sft.data.rows.formats import Chat, read_row
from tests.unit.data.traces import TOOLS, as_row, trace
from tests.unit.fixtures.model_folder import pieces_of
from tests.unit.released_chats import Message, for_transformers
from tests.unit.released_templates import Model, Models, at_the_default_date, made_once

TRACES = {"one": trace(1, 6), "many": trace(3)}
# Tokens of all texts, of the tree, and documents.  A token is a byte, or a control token.
STORED = {
    "qwen3": {"one": (23065, 5248, 1), "many": (40467, 10564, 3)},
    "qwen3_5_think": {"one": (27026, 5840, 1), "many": (47496, 11275, 3)},
    "qwen3_6": {"one": (27026, 5840, 1), "many": (47496, 11275, 3)},
    "qwen3_8": {"one": (28489, 6049, 1), "many": (68964, 9557, 1)},
    "qwen2_5": {"one": (12416, 2690, 1), "many": (29553, 4120, 1)},
    "glm4moe": {"one": (21758, 4934, 1), "many": (37431, 9793, 3)},
    "gptoss": {"one": (20944, 7136, 2), "many": (37365, 11367, 6)},
    "deepseekv3": {"one": (6912, 1741, 1), "many": (18902, 2967, 1)},
    "gemma4": {"one": (19510, 4486, 1), "many": (33468, 9081, 3)},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return made_once(tmp_path_factory.mktemp)


def rendered(model: Model, messages: list[Message], *, prompt: bool = False) -> list[int]:
    theirs = for_transformers(messages, as_text=model.family.as_text)
    with at_the_default_date():
        return list(model.theirs.apply_chat_template(theirs, TOOLS, add_generation_prompt=prompt, return_dict=False))


def encoded(model: Model, messages: list[Message]) -> tuple[Chat, Encoding]:
    row = read_row(as_row(messages))
    assert isinstance(row, Chat)
    return row, encode_turns(row, model.ours)


@pytest.mark.parametrize("which", TRACES)
@pytest.mark.parametrize("name", STORED)
def test_each_turn_is_trained_as_the_last_one(models: Models, name: str, which: str) -> None:
    model, messages = models(name), TRACES[which]
    row, encoding = encoded(model, messages)
    assert encoding.tree is not None
    texts = texts_of(Grown(encoding.tokens, encoding.weights, encoding.tree))
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(texts) == len(turns)
    ends = {model.theirs.convert_tokens_to_ids(end) for end in model.tokens.stops}
    for text, turn in zip(texts, turns, strict=True):
        whole, prompt = rendered(model, messages[: turn + 1]), rendered(model, messages[:turn], prompt=True)
        if model.family.tokens == "glm":  # nothing ends a last turn; the model writes the start of the next message
            follows = "<|observation|>" if "tool_calls" in messages[turn] else "<|user|>"
            whole = [*whole, model.theirs.convert_tokens_to_ids(follows)]
        assert text.tokens.tolist() == whole
        start = next((k for k, (a, b) in enumerate(zip(whole, prompt)) if a != b), len(prompt))
        if name == "gptoss" and "tool_calls" not in messages[turn]:  # the answer hides the thinking before it
            letters = "".join(piece.decode("latin1")[0] for piece in pieces_of(whole, model.tokens))
            start = letters.index("assistant", letters.rindex("it says")) + len("assistant")
        else:
            assert start == len(prompt) or name == "deepseekv3"  # its prompt has a token that its history does not have
        last = max(k for k, token in enumerate(whole) if token in ends)
        assert text.weights.tolist() == [float(start <= k <= last) for k in range(len(whole))]
        # The same turn by itself, as with data.supervise = last.
        alone = encode_chat(row._replace(messages=row.messages[: turn + 1]), model.ours, "last")
        assert alone.tokens.tolist() == whole and alone.weights.tolist() == text.weights.tolist()
    tree = encoding.tree
    assert (tree.num_rendered, len(encoding.tokens), len(tree.branches)) == STORED[name][which]


@pytest.mark.parametrize("name", STORED)
def test_text_is_given_to_the_tokenizer_once(models: Models, name: str) -> None:
    """At most 1.1 times the text of the tree, as the tokenizer also gets the header before a branch."""
    model = models(name)
    plain, handed = model.ours.encode, []

    def counting(text: str) -> object:
        handed.append(len(text))
        return plain(text)

    model.ours.__dict__["encode"] = counting
    try:
        _, encoding = encoded(model, TRACES["many"])
    finally:
        model.ours.__dict__["encode"] = plain
    pieces = len(model.ours.decode(encoding.tokens))
    assert len(handed) == 12
    assert sum(handed) <= 1.1 * pieces
    assert len(encoding.tokens) <= sum(handed)


def test_thinking_that_is_trained_is_not_left_out(models: Models) -> None:
    """Qwen3 drops the thinking of the first question.  Only a turn without loss loses its thinking."""
    model, messages = models("qwen3"), trace(2, 1)
    row, encoding = encoded(model, messages)
    assert encoding.omitted == []
    untrained = [{**message, "train": False} if i == 3 else message for i, message in enumerate(messages)]
    _, encoding = encoded(model, untrained)
    assert encoding.omitted is not None
    assert [text[:3] for text in encoding.omitted] == [(4, "assistant", "reasoning")]
    assert encoding.tree is not None and len(encoding.tree.ends) == 3
