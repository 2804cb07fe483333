"""Keys of a row beside its messages: their effects, their refusals, and keys that nothing reads."""

import json
from typing import Any

import pytest

from sft.data.rows.formats import Chat, UnwantedRow, read_row, unused_keys
from sft.errors import DataError

USER, ANSWER = {"role": "user", "content": "Six?"}, {"role": "assistant", "content": "6"}
SYSTEM = {"role": "system", "content": "Be brief."}
HI = {"messages": [USER, ANSWER]}
F, G = {"name": "f", "parameters": {"x": None}}, {"name": "g"}
WRAPPED_F = {"type": "function", "function": F}
DOCUMENT = {"title": "t", "text": "fact"}


USED: dict[str, tuple[dict[str, Any], Chat]] = {
    "chat_template_kwargs": (
        {**HI, "chat_template_kwargs": {"enable_thinking": False, "date_string": "26 Jul 2024", "levels": [1]}},
        Chat([USER, ANSWER], None, variables={"enable_thinking": False, "date_string": "26 Jul 2024", "levels": [1]}),
    ),
    "chat_template_kwargs as JSON text": (
        {**HI, "chat_template_kwargs": '{"enable_thinking": false}'},
        Chat([USER, ANSWER], None, variables={"enable_thinking": False}),
    ),
    "no chat_template_kwargs": ({**HI, "chat_template_kwargs": ""}, Chat([USER, ANSWER], None)),
    "documents": ({**HI, "documents": [DOCUMENT]}, Chat([USER, ANSWER], None, documents=[DOCUMENT])),
    "documents as JSON text": (
        {**HI, "documents": json.dumps([DOCUMENT])},
        Chat([USER, ANSWER], None, documents=[DOCUMENT]),
    ),
    "no documents": ({**HI, "documents": []}, Chat([USER, ANSWER], None)),
    "system_prompt": (
        {"conversations": [{"from": "human", "value": "Six?"}, ANSWER], "system_prompt": "Be brief.", "system": ""},
        Chat([SYSTEM, USER, ANSWER], None),
    ),
    "system_prompt of a prompt": (
        {"prompt": "Six?", "completion": "6", "system_prompt": "Be brief."},
        Chat([SYSTEM, USER, ANSWER], None, (0.0, 0.0, 1.0)),
    ),
    "loss_mask": (
        {"messages": [USER, ANSWER, USER, ANSWER], "loss_mask": [0, 0, True, 0.5]},
        Chat([USER, ANSWER, USER, ANSWER], None, (0.0, 0.0, 1.0, 0.5)),
    ),
    "loss_mask does not count the system text of the row": (
        {"conversations": [USER, ANSWER, USER, ANSWER], "loss_mask": [1, False, 1, 1], "system": "Be brief."},
        Chat([SYSTEM, USER, ANSWER, USER, ANSWER], None, (1.0, 1.0, 0.0, 1.0, 1.0)),
    ),
    "functions": ({**HI, "functions": [F]}, Chat([USER, ANSWER], [WRAPPED_F])),
    "functions that are tools": (
        {**HI, "functions": json.dumps([WRAPPED_F, G])},
        Chat([USER, ANSWER], [WRAPPED_F, {"type": "function", "function": G}]),
    ),
    "no functions beside tools": ({**HI, "functions": [], "tools": [WRAPPED_F]}, Chat([USER, ANSWER], [WRAPPED_F])),
    "tools in a system message": (
        {"messages": [{**SYSTEM, "tools": [G]}, USER, ANSWER]},
        Chat([SYSTEM, USER, ANSWER], [G]),
    ),
    "tools in a developer's message, as JSON text": (
        {"messages": [{"role": "developer", "content": "Be brief.", "tools": json.dumps([G])}, USER, ANSWER]},
        Chat([SYSTEM, USER, ANSWER], [G]),
    ),
    "no tools in a system message": (
        {"messages": [{**SYSTEM, "tools": []}, USER, ANSWER], "tools": [G]},
        Chat([SYSTEM, USER, ANSWER], [G]),
    ),
    "label: true": ({**HI, "label": True, "kto_tag": True}, Chat([USER, ANSWER], None)),
    "no images": ({**HI, "images": [], "video": "", "audio": {"path": None}}, Chat([USER, ANSWER], None)),
    "mask User": ({**HI, "mask": "User"}, Chat([USER, ANSWER], None)),
}


@pytest.mark.parametrize("name", USED)
def test_keys_that_are_used(name: str) -> None:
    row, expected = USED[name]
    before = json.dumps(row)
    assert read_row(row) == expected
    assert unused_keys(row) == []
    assert json.dumps(row) == before, "the row itself is left as it was"


SAME = "which have the same meaning.  Keep one of them."
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**HI, "chat_template_kwargs": [1]}, "chat_template_kwargs must be an object of variables; got a list."),
    ({**HI, "chat_template_kwargs": "{"}, "chat_template_kwargs: not JSON: Expecting property name"),
    ({**HI, "chat_template_kwargs": {"a b": 1}},
     'chat_template_kwargs has the variable "a b", which is no name in a template.'),
    *(({**HI, "chat_template_kwargs": {name: 1}},
       f"chat_template_kwargs sets {name}, but a template gets this from the chat or the tokenizer.  Remove it from "
       "chat_template_kwargs.")
      for name in ("messages", "tools", "documents", "add_generation_prompt", "eos_token", "extra_special_tokens")),
    ({**HI, "chat_template_kwargs": {"x": float("nan")}}, "chat_template_kwargs holds NaN or infinity, which JSON"),
    ({**HI, "documents": DOCUMENT}, "documents must be a list of objects; got an object."),
    ({**HI, "documents": ["fact"]}, "document 1: not JSON: Expecting value"),
    ({**HI, "documents": [DOCUMENT, 7]}, "documents must be a list of objects; document 2 is 7."),
    ({**HI, "documents": [{"at": float("inf")}]}, "documents holds NaN or infinity, which JSON"),
    ({**HI, "system_prompt": 7}, "system_prompt must be a string; got 7."),
    ({**HI, "system": "A", "system_prompt": "A"}, f"the row has system and system_prompt, {SAME}"),
    ({"messages": [SYSTEM, USER, ANSWER], "system_prompt": "A"}, "the row has a system text and also a system"),
    ({**HI, "loss_mask": [1]}, "loss_mask has 1 numbers, but the row has 2 messages."),
    ({**HI, "loss_mask": 1}, "loss_mask must be a list with a number for each message; got 1."),
    ({**HI, "loss_mask": [0, "1"]}, "loss_mask of message 2 is a string; expected a number of at least 0."),
    ({**HI, "loss_mask": [0, 0]}, "every assistant turn has weight 0, so no token is supervised."),
    ({"messages": [USER, {**ANSWER, "weight": 1}], "loss_mask": [0, 1]},
     "the row has loss_mask, and message 2 has a weight of its own.  Keep one of them."),
    ({"prompt": "a", "completion": "b", "loss_mask": [0, 1]},
     "the row has loss_mask, which belongs to a row with messages, conversations, tokens or input_ids.  Write the row "
     "with messages, or remove loss_mask."),
    ({"instruction": "a", "output": "b", "loss_mask": [0, 1]}, "the row has loss_mask, which belongs to a row with"),
    ({**HI, "functions": [F], "tools": [G]}, f"the row has tools and functions, {SAME}"),
    ({**HI, "functions": [{"parameters": {}}]}, "function 1 has no name."),
    ({"messages": [{**SYSTEM, "tools": [F]}, USER, ANSWER], "tools": [G]},
     f"the row has tools and tools in message 1, {SAME}"),
    ({"messages": [{**SYSTEM, "tools": [F]}, {**SYSTEM, "tools": [G]}, USER, ANSWER]},
     f"the row has tools in message 1 and tools in message 2, {SAME}"),
    ({"messages": [{**SYSTEM, "tools": [{}]}, USER, ANSWER]}, "message 1: tool 1 has no name."),
    ({"messages": [{**USER, "tools": [F]}, ANSWER]},
     "message 1 (user) has tools; only the row or a system message may have tools."),
    *(({**row, name: value},
       f"the row has {name}, but only text is trained: the model would learn to describe what it does not see.  Remove "
       f"the row, or {name} and the texts about them.")
      for row in (HI, {"text": "A cat."}, {"tokens": [1, 2], "loss_mask": [0, 1]})
      for name, value in (("images", ["cat.png"]), ("image", {"bytes": "x"}), ("videos", [" "]), ("video", 7),
                          ("audios", ["a.wav"]), ("audio", "a.wav"))),
    ({**HI, "mask": "gpt"}, 'the row has mask "gpt"; only mask User is supported, whose meaning is clear.'),
    ({**HI, "mask": [0, 1]}, "the row has mask [0, 1]; only mask User is supported, whose meaning is clear."),
]  # fmt: skip


@pytest.mark.parametrize(("row", "complaint"), REFUSED, ids=range(len(REFUSED)))
def test_keys_that_are_refused(row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DataError) as error:
        read_row(row)
    assert str(error.value).startswith(complaint) and not isinstance(error.value, UnwantedRow)


@pytest.mark.parametrize("name", ["label", "kto_tag"])
def test_a_chat_with_the_label_false_is_unwanted(name: str) -> None:
    for row in (
        HI,
        {"conversations": []},
        {"prompt": "q", "completion": "a rejected answer"},
        {"instruction": "a", "output": "b"},
    ):
        with pytest.raises(UnwantedRow):
            read_row({**row, name: False})
    # A label that is a number is a class; a text may also have a label.
    for row in ({**HI, name: 0}, {"text": "a", name: False}, {"tokens": [1, 2], "loss_mask": [0, 1], name: False}):
        read_row(row)
        assert unused_keys(row) == [name]


UNUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"source": "x", **HI, "id": 7, "url": None, "text": "Six? 6", "prompt": "?"}, ["source", "id", "text", "prompt"]),
    ({**HI, "input": "a", "history": [], "labels": [1], "attention_mask": [1], "chosen": []},
     ["input", "history", "labels", "attention_mask", "chosen"]),
    ({"prompt": "a", "completion": "b", "prompt_id": "c", "input": ""}, ["prompt_id", "input"]),
    ({"instruction": "a", "output": "b", "input": "", "history": [], "prompt": "c"}, ["prompt"]),
    ({"tokens": [1, 2], "loss_mask": [0, 1], "system": "a", "length": 2, "position_ids": [0, 1]}, ["system", "length"]),
    ({"input_ids": [1, 2], "labels": [1, 2], "tools": [], "documents": {}}, ["tools", "documents"]),
    ({"text": "a", "system": "b", "documents": [], "prompt": "c", "": 1}, ["system", "documents", "prompt", ""]),
]  # fmt: skip


@pytest.mark.parametrize(("row", "names"), UNUSED, ids=range(len(UNUSED)))
def test_keys_that_nothing_reads(row: dict[str, Any], names: list[str]) -> None:
    read_row(row)
    assert unused_keys(row) == names
