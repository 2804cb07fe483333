"""Reads the keys of a row that stand beside its messages: tools, system text, documents, template variables, masks.

Decides which values of these keys are valid, and refuses chats with keys of other trainers that have no equivalent
here.  `formats.py` decides which rows are chats.
"""

import re
from math import isfinite
from typing import Any

from sft.data.rows.checked_messages import MEDIA, CheckedMessage, is_empty
from sft.data.rows.messages import Tools, read_json, read_weight, shortened, to_json, type_name
from sft.errors import DataError

Row = dict[str, Any]

CHAT_KEYS = ("tools", "functions", "system", "system_prompt", "documents", "chat_template_kwargs", "loss_mask", "mask")
LABELS = ("label", "kto_tag")  # keys of trl and LLaMA-Factory: false marks a bad answer
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Variables that every template gets.  Others come from special tokens, data.chat_template_kwargs and rows.
GIVEN = ("messages", "tools", "documents", "add_generation_prompt")
_USERS = ("user", "human")


def check_media(row: Row) -> None:
    """Raises DataError if a row has images, videos or sounds."""
    for key in MEDIA:
        if not is_empty(row.get(key)):
            raise DataError(
                f"the row has {key}, but only text is trained: the model would learn to describe what it does not see."
                f"  Remove the row, or {key} and the texts about them."
            )


def check_mask(row: Row) -> None:
    """Raises DataError if a row has the key mask, unless it names the user, as in NeMo's files.

    Then mask has no effect, because users' messages are never supervised.
    """
    mask = row.get("mask")
    if mask is not None and not (isinstance(mask, str) and mask.lower() in _USERS):
        raise DataError(
            f"the row has mask {shortened(to_json(mask))}; only mask User is supported, whose meaning is clear.  Give "
            "each message weight 0 or 1 instead, or use loss_mask."
        )


def is_unwanted(row: Row) -> bool:
    """Whether the row has label: false, which marks the answer of a chat as bad."""
    return any(row.get(key) is False for key in LABELS)


def read_system(row: Row) -> str:
    """The system text of a row, from system or system_prompt; "" if it has none.  Raises DataError if it has both."""
    texts = {key: row[key] for key in ("system", "system_prompt") if key in row}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise DataError(f"{key} must be a string; got {type_name(text)}.")
    written = [text for text in texts.values() if text]
    if len(written) > 1:
        raise DataError("the row has system and system_prompt, which have the same meaning.  Keep one of them.")
    return written[0] if written else ""


def read_variables(row: Row) -> dict[str, Any]:
    """The variables that a row gives to the chat template, {} if none.  Raises DataError for an invalid variable.

    {"chat_template_kwargs": '{"enable_thinking": false}'}  ->  {"enable_thinking": False}
    """
    name = "chat_template_kwargs"
    variables = _parsed(row.get(name), name)
    if variables is None:
        return {}
    if not isinstance(variables, dict):
        raise DataError(f"{name} must be an object of variables; got {type_name(variables)}.")
    for key in variables:
        if not _VARIABLE.fullmatch(key):
            raise DataError(f"{name} has the variable {shortened(to_json(key))}, which is no name in a template.")
        if key in GIVEN or key.endswith(("_token", "_tokens")):
            raise DataError(
                f"{name} sets {key}, but a template gets this from the chat or the tokenizer.  Remove it from {name}."
            )
    return variables


def take_tools(row: Row, turns: list[CheckedMessage]) -> tuple[Tools, list[CheckedMessage]]:
    """The tools of a row in OpenAI's form, and its messages without tools.

    Tools come from one of: tools, functions, or tools of a system message.  Raises DataError for two of these, or for
    invalid tools.

    {"functions": [{"name": "f"}]}  ->  [{"type": "function", "function": {"name": "f"}}]
    """
    sources = {"tools": _read_tools(row.get("tools"), "tools", "tool")}
    functions = _read_tools(row.get("functions"), "functions", "function") or []
    sources["functions"] = [
        schema if "function" in schema else {"type": "function", "function": schema} for schema in functions
    ]
    rest = []
    for turn in turns:
        message, where = turn.message, turn.where
        if "tools" in message and message["role"] == "system":
            sources[f"tools in {where}"] = _read_tools(message["tools"], f"{where}: tools", f"{where}: tool")
            message = {key: value for key, value in message.items() if key != "tools"}
        elif not is_empty(message.get("tools")):
            raise DataError(f"{where} ({message['role']}) has tools; only the row or a system message may have tools.")
        rest.append(turn._replace(message=message))
    sources = {name: tools for name, tools in sources.items() if tools}
    if len(sources) > 1:
        raise DataError(f"the row has {' and '.join(sources)}, which have the same meaning.  Keep one of them.")
    return next(iter(sources.values()), None), rest


def with_loss_mask(row: Row, turns: list[CheckedMessage]) -> list[CheckedMessage]:
    """The messages with the weights of the row's loss_mask, which has a number, true or false for each message.

    Raises DataError if the mask is invalid, or if a message also has a weight.
    """
    mask = row.get("loss_mask")
    if mask is None:
        return turns
    if not isinstance(mask, list):
        raise DataError(f"loss_mask must be a list with a number for each message; got {type_name(mask)}.")
    if len(mask) != len(turns):
        raise DataError(f"loss_mask has {len(mask):,} numbers, but the row has {len(turns):,} messages.")
    if weighted := next((turn.where for turn in turns if turn.weight is not None), None):
        raise DataError(f"the row has loss_mask, and {weighted} has a weight of its own.  Keep one of them.")
    return [
        turn._replace(weight=read_weight(value, f"loss_mask of {turn.where}"))
        for turn, value in zip(turns, mask, strict=True)
    ]


def check_values(value: object, where: str) -> None:
    """Raises DataError for values that JSON lacks, such as times and NaN in a table.

    Such a value has no single text: the text would depend on the template.
    """
    if isinstance(value, dict):
        for item in value.values():
            check_values(item, where)
    elif isinstance(value, list):
        for item in value:
            check_values(item, where)
    elif value is not None and not (isinstance(value, str | int) or (isinstance(value, float) and isfinite(value))):
        type_ = "NaN or infinity" if isinstance(value, float) else f"a {type(value).__name__}"
        raise DataError(f"{where} holds {type_}, which JSON does not have.  Store the column as text.")


def _read_tools(value: object, name: str, item: str) -> Tools:
    tools = read_objects(value, name, item)
    for number, tool in enumerate(tools or [], start=1):
        schema = tool.get("function", tool)
        if not isinstance(schema, dict) or not isinstance(schema.get("name"), str) or not schema["name"]:
            raise DataError(f"{item} {number} has no name.")
    return tools


def read_objects(value: object, name: str, item: str) -> list[dict[str, Any]] | None:
    """The objects of a list; the list or each object may be JSON text.  None if there are none.

    Raises DataError if `value` is not such a list.  name, item: names of the list and of an object in the error
    """
    objects = _parsed(value, name)
    if objects is None:
        return None
    if not isinstance(objects, list):
        raise DataError(f"{name} must be a list of objects; got {type_name(objects)}.")
    numbered = [(f"{item} {number}", part) for number, part in enumerate(objects, start=1)]
    objects = [read_json(part, label) if isinstance(part, str) else part for label, part in numbered]
    for number, part in enumerate(objects, start=1):
        if not isinstance(part, dict):
            raise DataError(f"{name} must be a list of objects; {item} {number} is {type_name(part)}.")
    return objects or None


def _parsed(value: object, name: str) -> Any:
    """The value itself; for a text, the value of the JSON in it, or None if the text is blank."""
    if not isinstance(value, str):
        return value
    return read_json(value, name) if value.strip() else None
