"""Asks a model of a tokenizer's chat template for an answer without thinking, or says why this is impossible.

A question's prompt must be the text that the template writes when it asks for an answer.  Otherwise a score would be
that of a text that no inference server sends.  So the text before a rendered answer is compared with the prompt, once
for each suite.
"""

import string
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sft.data import limited
from sft.data.chat.encode_chat import encode_chat
from sft.data.chat.reading import Reading
from sft.data.chat.render import prepared, render_chat
from sft.data.chat.tokenizer import ByteTokenizer, ChatTokenizer, FolderTokenizer
from sft.data.chat.tokens import find_token_spans, tokenise
from sft.data.chat.turns import find_turns
from sft.data.rows.formats import Chat
from sft.data.rows.messages import quoted
from sft.data.template.rendering import Rendering, trace_inputs
from sft.errors import DataError

# Variables of released templates that turn thinking off, with the value that does.  A template gets the first one that
# it reads.
SWITCHES = {"enable_thinking": False, "thinking": False, "thinking_budget": 0}
_SHORT = "How many?"  # a question
CHARACTERS = string.ascii_letters + string.digits + '.,:?()[]{}"_='


class Asked(NamedTuple):
    """A question as tokens.

    tokens     int32 [n]; the last ones are those of the answer, without the token that ends the turn.  If the template
               writes white space between its prompt and an answer, the model must write it, and it is in the answer
    answer     index of the answer's first token
    positions  for each text that was searched, the index of its first token
    """

    tokens: np.ndarray
    answer: int
    positions: list[int]


def without_thinking(tokenizer: ChatTokenizer) -> ChatTokenizer:
    """The tokenizer, with a template whose variables turn thinking off.

    Raises DataError if there is no chat template, if a prompt asks for thinking all the same, or if the tokenizer
    cannot write the characters of the questions.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return tokenizer
    name = next((name for name in SWITCHES if name in tokenizer.template.variables), None)
    switches = {} if name is None else {name: SWITCHES[name]}
    template = replace(tokenizer.template, switches={**tokenizer.template.switches, **switches})
    asking = replace(tokenizer, chat_template=template)
    limited.call(f"chat template {template.name}", _check, asking)
    return asking


def ask(question: str, answer: str, searched: tuple[str, ...], tokenizer: ChatTokenizer) -> Asked:
    """The tokens of a prompt as an inference server makes them, and those of the answer.

    searched: texts of the question, each of which occurs once in it
    Raises DataError if the template refuses the chat, or if the answer's tokens cannot be located.
    """
    chat = _chat(question, answer)
    if isinstance(tokenizer, ByteTokenizer):
        encoding = encode_chat(chat, tokenizer)
        first = int(np.flatnonzero(encoding.weights)[0])
        end = first + len(answer.encode())
        content = bytes(np.where(encoding.tokens < 256, encoding.tokens, 0).astype(np.uint8))
        return Asked(encoding.tokens[:end], first, [content.index(text.encode()) for text in searched])
    reading = Reading(_prompt(chat, tokenizer))
    encoded = tokenise(reading, tokenizer).encoded
    starts = [reading.text.index(text) for text in searched]
    positions = [first for first, _, _ in encoded.token_spans(starts, [start + 1 for start in starts])]
    return Asked(np.concatenate([encoded.ids, _answer_ids(answer, tokenizer)]), len(encoded.ids), positions)


def _prompt(chat: Chat, tokenizer: FolderTokenizer) -> Rendering:
    """The rendering of the first message with the header that asks for an answer."""
    messages = prepared(chat.messages[:1], tokenizer.habits)
    return tokenizer.template.rendered(trace_inputs(messages, None, None, {}), prompt=True)


def _answer_ids(answer: str, tokenizer: FolderTokenizer) -> np.ndarray:
    """int32 [n]: the tokens that a model writes for an answer, without the token that ends the turn."""
    rendered = render_chat(_chat(_SHORT, answer), tokenizer)
    text, encoded = rendered.reading.text, tokenise(rendered.reading, tokenizer).encoded
    (span,) = find_token_spans(find_turns(rendered, [1]), text, encoded, tokenizer, inserted=True)
    return encoded.ids[span.start : span.end_start]


def _chat(question: str, answer: str) -> Chat:
    return Chat([{"role": "user", "content": question}, {"role": "assistant", "content": answer}], None)


def _check(tokenizer: FolderTokenizer) -> None:
    """Raises the errors of `without_thinking`.  Called in a process with limits, because it runs the template."""
    _check_characters(tokenizer)
    _check_prompt(tokenizer)


def _check_prompt(tokenizer: FolderTokenizer) -> None:
    """Raises DataError if the template does not write an answer directly after the prompt that asks for it."""
    rendered = render_chat(_chat(_SHORT, "27"), tokenizer)
    (turn,) = find_turns(rendered, [1])
    text = rendered.reading.text
    prompt = _prompt(rendered.chat, tokenizer).text
    if text[: turn.start] == prompt and text[turn.start :].lstrip().startswith("27"):
        return
    raise DataError(
        f"chat template {tokenizer.template.name} cannot ask for an answer without thinking: its prompt ends with "
        f"{quoted(prompt[-40:])}, but a chat has {quoted(text[: text.rindex('27')][-40:])} before the answer, so a "
        f"model would be scored on a text that it never gets.  Give a template that writes no thinking, or that reads "
        f"one of {', '.join(SWITCHES)}, with data.chat_template."
    )


def _check_characters(tokenizer: FolderTokenizer) -> None:
    """Raises DataError if the tokenizer loses a character of the questions."""
    lost = [c for c in CHARACTERS if c not in tokenizer.decode(tokenizer.encode(f"a {c}{c} a").ids)]
    if lost:
        raise DataError(
            f"the tokenizer of {tokenizer.name} cannot write {''.join(lost)}, and the questions of the long-context "
            "suites are English text with numbers, code and JSON.  Use a tokenizer that has these characters."
        )
