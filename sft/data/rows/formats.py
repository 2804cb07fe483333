"""Reads a row of a data file, in any of the accepted formats, as a checked chat, as plain text or as tokens.

Decides which formats are accepted, and which keys of a row are read.  Refuses invalid rows and rows that fit two
formats.  `checked_messages.py` checks messages, `chat_keys.py` checks the keys beside them, and `document_keys.py`
reads the keys of packed tokens.  `encode_chat.py` applies tokenizer and template.  Errors name the message; the caller
adds file and line.

A key with the value null counts as absent, because many writers fill missing keys with null.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from sft.data.rows.chat_keys import (
    CHAT_KEYS,
    LABELS,
    Row,
    check_mask,
    check_media,
    check_values,
    is_unwanted,
    read_objects,
    read_system,
    read_variables,
    take_tools,
    with_loss_mask,
)
from sft.data.rows.checked_messages import MEDIA, CheckedMessage, check_calls, read_messages
from sft.data.rows.document_keys import DOCUMENT_KEYS
from sft.data.rows.messages import Message, Tools, shortened, type_name
from sft.data.rows.token_rows import MASKS, Tokenized, read_tokens
from sft.errors import DataError

_TEXT = ("text",)
_COMPLETIONS = ("prompt", "completions")
_FALLBACKS = (_TEXT, _COMPLETIONS)  # formats that apply only to rows that fit no other format


class Chat(NamedTuple):
    """A chat that has been checked.

    weights    the weight of each message's supervised tokens, 0 for an unsupervised message; None: 1 for all messages.
               `data.supervise` decides which roles can be supervised.
    variables  further variables for the chat template; they replace those of data.chat_template_kwargs
    documents  documents for the chat template
    others     a chat for each further completion of the same prompt

    Arguments of tool calls are as in the row (`messages.with_arguments`).  The content of an answer with thinking parts
    is a list of {"type": "thinking", "thinking": text} and {"type": "text", "text": text}; other contents are strings.
    """

    messages: list[Message]
    tools: Tools
    weights: tuple[float, ...] | None = None
    variables: dict[str, Any] = {}
    documents: list[dict[str, Any]] | None = None
    others: tuple["Chat", ...] = ()


class PlainText(NamedTuple):
    """A document or a file of code, without turns."""

    text: str


class UnwantedRow(DataError):
    """The error for a chat whose label marks its answer as bad.  Such a row is dropped, whatever data.on_bad_row is."""


def read_row(row: object) -> Chat | PlainText | Tokenized:
    """The chat, the text or the tokens of one row.

    The formats `text` and `prompt, completions` apply only to rows that fit no other format, because many chats have
    further keys `text` and `completions`.

    {"prompt": "Six?", "completion": "6"}
    -> Chat([{"role": "user", "content": "Six?"}, {"role": "assistant", "content": "6"}], None, (0.0, 1.0))

    Raises DataError: `message 3 has role "assitant"; expected one of system, user, assistant, tool.`
    Raises UnwantedRow for a chat with `label: false`.
    """
    if not isinstance(row, dict):
        raise DataError(f"a row must be an object; got {type_name(row)}.")
    present = _present(row)
    shape = _shape_of(row, present)
    if shape in _CHATS and is_unwanted(present):
        raise UnwantedRow("the row has label: false, so its answer is not trained.")
    check_media(present)
    return _SHAPES[shape](present)


def unused_keys(row: Row) -> list[str]:
    """The keys of a usable row that no part of the program reads, in the order of the row.

    {"text": "a", "id": 7, "url": null}  ->  ["id"]
    """
    present = _present(row)
    shape = _shape_of(row, present)
    used = {*shape, *MEDIA, *_FURTHER_KEYS.get(shape, ())}
    if shape in _CHATS:
        used |= {*CHAT_KEYS, *(key for key in LABELS if isinstance(present.get(key), bool))}
    return [key for key in present if key not in used]


_QUESTIONS = ("question", "query", "input", "instruction", "prompt")
_ANSWERS = ("answer", "response", "output", "completion")
_COLUMNS = "or give the dataset (a hub name, or a folder with this file) columns: "


def _advice(row: Row) -> str:
    """Advice for a row of a frequent form that is no format; empty if there is none."""
    if {"chosen", "rejected"} <= row.keys():
        name = "completion" if "prompt" in row else "messages"
        other = "prompt: prompt, " if "prompt" in row else ""
        return (
            f"  Preferences are not trained; the chosen answer alone can be: name it {name}, "
            f"{_COLUMNS}{{{other}{name}: chosen}}."
        )
    names = [next((key for key in keys if key in row), None) for keys in (_QUESTIONS, _ANSWERS)]
    if None not in names:
        return (
            f"  If {names[0]} is the prompt and {names[1]} its answer, name them prompt and completion, "
            f"{_COLUMNS}{{prompt: {names[0]}, completion: {names[1]}}}."
        )
    return ""


def _present(row: Row) -> Row:
    return {key: value for key, value in row.items() if value is not None}


def _shape_of(row: Row, present: Row) -> tuple[str, ...]:
    """The keys of the row's format, such as ("prompt", "completion").  Raises DataError for no format or for two.

    present: the row without keys whose value is null
    """
    shapes = [keys for keys in _SHAPES if all(key in present for key in keys)]
    fitting = [keys for keys in shapes if keys not in _FALLBACKS]
    if not fitting and shapes:
        return next(keys for keys in _FALLBACKS if keys in shapes)
    if not fitting:
        keys = ", ".join(f"{key}" if key in present else f"{key} (null)" for key in row) or "none"
        known = f"a row must have {_KNOWN}.  This row has the keys {shortened(keys, 200)}"
        raise DataError(f"unknown format: {known}.{_advice(present)}")
    if len(fitting) > 1:
        names = " as well as ".join(" and ".join(keys) for keys in fitting)
        raise DataError(f"the row has {names}, but a row must have one format.  Keep one of them.")
    return fitting[0]


# Chats


def _read_messages(row: Row, key: str) -> Chat:
    return _chat(row, with_loss_mask(row, read_messages(row[key], key)))


def _read_completion(row: Row) -> Chat:
    """Reads a prompt and its completion.  Only the completion is supervised, unless a prompt message has a weight."""
    _refuse_loss_mask(row)
    turns = []
    for key, role, weight in (("prompt", "user", 0.0), ("completion", "assistant", 1.0)):
        value = row[key]
        part = [_turn(role, value, key)] if isinstance(value, str) else read_messages(value, key)
        turns += [turn if turn.weight is not None else turn._replace(weight=weight) for turn in part]
    if not any(turn.message["role"] == "assistant" and turn.where.startswith("completion") for turn in turns):
        raise DataError("the completion has no assistant message, so no token is supervised.")
    return _chat(row, turns, system_weight=0.0)


def _read_completions(row: Row) -> Chat:
    """Reads a prompt and several completions.  The chat of the first has the chats of the others in `others`."""
    completions = row["completions"]
    if not isinstance(completions, list) or not completions:
        raise DataError(f"completions must be a list of at least one completion; got {type_name(completions)}.")
    for key in ("labels", "scores", "rewards"):
        if isinstance(row.get(key), list):
            raise DataError(
                f"the row has {key} beside completions, so not every completion is an answer to learn.  Keep the "
                f"completions that are whole answers, and remove {key}."
            )
    chats = []
    for number, completion in enumerate(completions, start=1):
        try:
            chats.append(_read_completion({**row, "completion": completion}))
        except DataError as error:
            raise DataError(f"completion {number} of {len(completions)}: {error}") from error
    return chats[0]._replace(others=tuple(chats[1:]))


def _read_instruction(row: Row) -> Chat:
    """Reads a row in Alpaca's format.  Answers in the history are also supervised, as in LLaMA-Factory."""
    _refuse_loss_mask(row)
    asked = [_string(row["instruction"], "instruction"), _string(row.get("input", ""), "input")]
    turns = []
    history = row.get("history", [])
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise DataError("history must be a list of pairs [instruction, output].")
    for number, (question, answer) in enumerate(history, start=1):
        where = f"history {number}"
        turns += [_turn("user", question, where), _turn("assistant", answer, where)]
    question = "\n".join(text for text in asked if text)
    return _chat(row, [*turns, _turn("user", question, "instruction"), _turn("assistant", row["output"], "output")])


def _turn(role: str, value: object, where: str) -> CheckedMessage:
    content = _string(value, where)
    if role == "assistant" and not content.strip():
        raise DataError(f"{where} is empty: the model would learn to end a turn without any text.")
    return CheckedMessage({"role": role, "content": content}, None, where)


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where} must be a string; got {type_name(value)}.")
    return value


def _refuse_loss_mask(row: Row) -> None:
    if "loss_mask" in row:
        raise DataError(
            "the row has loss_mask, which belongs to a row with messages, conversations, tokens or input_ids.  Write "
            "the row with messages, or remove loss_mask."
        )


def _chat(row: Row, turns: list[CheckedMessage], system_weight: float | None = None) -> Chat:
    check_mask(row)
    tools, turns = take_tools(row, turns)
    system = read_system(row)
    if system and turns[0].message != {"role": "system", "content": system}:
        if any(turn.message["role"] == "system" for turn in turns):
            raise DataError("the row has a system text and also a system message.  Keep one of them.")
        turns = [CheckedMessage({"role": "system", "content": system}, system_weight, "system"), *turns]
    check_calls(turns)
    variables, documents = read_variables(row), read_objects(row.get("documents"), "documents", "document")
    for turn in turns:
        check_values(turn.message, turn.where)
    for name, value in (("tools", tools), ("chat_template_kwargs", variables), ("documents", documents)):
        check_values(value, name)
    return Chat([turn.message for turn in turns], tools, _weights(turns), variables, documents)


def _weights(turns: list[CheckedMessage]) -> tuple[float, ...] | None:
    """The weights of the messages; None if no message has a weight.

    Raises DataError if there is no assistant turn, or if every message has weight 0.
    """
    written = [turn.weight for turn in turns if turn.message["role"] == "assistant"]
    if not written:
        roles = " and ".join(dict.fromkeys(turn.message["role"] for turn in turns))
        raise DataError(f"no assistant turn, only {roles}, so the row has no answer to learn.")
    if all(weight == 0 for weight in written) and not any(turn.weight for turn in turns):
        raise DataError("every assistant turn has weight 0, so no token is supervised.")
    if all(turn.weight is None for turn in turns):
        return None
    return tuple(1.0 if turn.weight is None else turn.weight for turn in turns)


# Texts


def _read_text(row: Row) -> PlainText:
    text = _string(row["text"], "text")
    if not text:
        raise DataError("text is empty.")
    return PlainText(text)


_SHAPES: dict[tuple[str, ...], Callable[[Row], Chat | PlainText | Tokenized]] = {
    ("messages",): partial(_read_messages, key="messages"),
    ("conversations",): partial(_read_messages, key="conversations"),
    ("prompt", "completion"): _read_completion,
    _COMPLETIONS: _read_completions,
    ("instruction", "output"): _read_instruction,
    ("tokens",): partial(read_tokens, key="tokens"),
    ("input_ids",): partial(read_tokens, key="input_ids"),
    _TEXT: _read_text,
}
_KNOWN = ", or ".join(" and ".join(keys) for keys in _SHAPES if keys != _COMPLETIONS)  # data.turns = chat refuses it
_CHATS = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("prompt", "completions"),
    ("instruction", "output"),
)
# Further keys that are read, by format.  Chats also have CHAT_KEYS.
_FURTHER_KEYS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("instruction", "output"): ("input", "history"),
    ("tokens",): (*MASKS, "labels", *DOCUMENT_KEYS),
    ("input_ids",): (*MASKS, "labels", *DOCUMENT_KEYS),
}
