"""From messages to tokens and what each of them weighs in the loss.

Decides, with `data.supervise` and the weights of a chat's messages, which tokens are learned:

    assistant  what the assistant wrote and the token that ends each of its turns, once per turn: not the role
               header, not the newline after the turn
    last       the same of the last assistant turn only
    all        every token after the first

Where the turns stand is proven by `turns.py`, that their tokens decode to them by `cover.py`.  A mask that cannot be
proven is an error, never a guess.  The whole chat is rendered and tokenised once, so ids are the template's own.
Errors name the message; the caller adds file and line.  Does not decide what happens to a sample that is too long
(`encode.py`).
"""

import json
from typing import Literal, NamedTuple

import numpy as np

from sft.data.chat.escaping import Typed, encode_typed, without_typed
from sft.data.chat.formats import Chat
from sft.data.chat.keeps import reason
from sft.data.chat.omitted import Missing, omitted
from sft.data.chat.template import THINKING, plain, prepared
from sft.data.chat.token_spans import tokens_of
from sft.data.chat.tokenizer import BYTE_CONTROL, ByteTokenizer, ChatTokenizer, Encoded, FolderTokenizer
from sft.data.chat.turns import Rendered, find_turns
from sft.errors import DataError

Supervise = Literal["assistant", "last", "all"]


class Encoding(NamedTuple):
    """A chat as tokens int32 [n], what each weighs, float32 [n], and what its template leaves out."""

    tokens: np.ndarray
    weights: np.ndarray
    omitted: list[Missing]


class Span(NamedTuple):
    """Tokens [start, end) that come from one message."""

    message: int
    start: int
    end: int


def encode_chat(
    chat: Chat, tokenizer: ChatTokenizer, supervise: Supervise = "assistant"
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and weights of `encode`."""
    tokens, weights, _ = encode(chat, tokenizer, supervise)
    return tokens, weights


def encode(chat: Chat, tokenizer: ChatTokenizer, supervise: Supervise = "assistant") -> Encoding:
    """Tokens, what each weighs, 0 where it is not learned, and what the template leaves out.

    Raises DataError where a mask cannot be proven, and where nothing would be learned.

    user "a", assistant "b", byte tokenizer:
    <|im_start|>user\\na<|im_end|>\\n<|im_start|>assistant\\nb<|im_end|>\\n      1: b <|im_end|>      0: all others
    """
    weigh = _weights_of_turns(chat, supervise)
    if isinstance(tokenizer, ByteTokenizer):
        ids, turns = _encode_bytes(chat)
        turns = [turn for turn in turns if turn.message in weigh]
        missing = []  # this template writes all
    else:
        encoded, typed, rendered = _render(chat, tokenizer)
        # A turn that weighs what the tokens around it weigh need not be told apart.
        needed = [i for i, weight in weigh.items() if weight != (supervise == "all")]
        ids, turns = encoded.ids, _prove(encoded, typed, rendered, needed)
        missing = [one._replace(said=typed.restore(one.said)) for one in omitted(rendered)]
    return Encoding(ids, _spread(len(ids), turns, weigh, supervise), missing)


def why_omitted(chat: Chat, tokenizer: ChatTokenizer, missing: Missing) -> str:
    """Why the template leaves out a text of a chat that `encode` took, and what would keep it."""
    assert isinstance(tokenizer, FolderTokenizer)
    return reason(_render(chat, tokenizer)[2], missing)


def _weights_of_turns(chat: Chat, supervise: Supervise) -> dict[int, float]:
    """What the tokens of each assistant turn weigh, by message; turns that weigh 0 are left out but for `all`."""
    written = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    weights = chat.weights or (1.0,) * len(chat.messages)
    weigh = {i: weights[i] for i in (written[-1:] if supervise == "last" else written)}
    return weigh if supervise == "all" else {i: weight for i, weight in weigh.items() if weight != 0}


def _spread(num_tokens: int, turns: list[Span], weigh: dict[int, float], supervise: Supervise) -> np.ndarray:
    """Weights of the tokens.  Raises DataError where all are 0."""
    weights = np.full(num_tokens, float(supervise == "all"), dtype=np.float32)
    for turn in turns:
        weights[turn.start : turn.end] = weigh[turn.message]
    weights[:1] = 0  # nothing stands before the first token to predict it from
    if not weights.any():
        raise DataError(
            f"every token weighs 0 with data.supervise = {supervise}, so there is nothing to learn from.  Leave an "
            "assistant message on, or remove the chat."
        )
    return weights


def _encode_bytes(chat: Chat) -> tuple[np.ndarray, list[Span]]:
    """The byte tokenizer's template: ChatML; tools are JSON in a first system block.

    Spans are of contents, for an assistant with its end of turn.
    """
    text, controls, turns = bytearray(), [], []

    def block(role: str, body: str) -> tuple[int, int]:
        controls.append((len(text), BYTE_CONTROL["<|im_start|>"]))
        text.extend(b"\0" + role.encode() + b"\n")
        first = len(text)
        text.extend(body.encode())
        controls.append((len(text), BYTE_CONTROL["<|im_end|>"]))
        text.extend(b"\0\n")
        return first, len(text) - 2

    if chat.tools:
        block("system", "# Tools\n" + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in chat.tools))
    for i, message in enumerate(chat.messages):
        calls = [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls") or []]
        thinking = next((f"<think>\n{message[key]}\n</think>" for key in THINKING if message.get(key)), "")
        body = [thinking, message.get("content") or "", *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
        first, last = block(message["role"], "\n".join(part for part in body if part))
        turns.append(Span(i, first, last + (message["role"] == "assistant")))
    ids = np.frombuffer(bytes(text), dtype=np.uint8).astype(np.int32)
    for position, control in controls:
        ids[position] = control
    return ids, turns


def _render(chat: Chat, tokenizer: FolderTokenizer) -> tuple[Encoded, Typed, Rendered]:
    """The chat rendered and tokenised, once; the text still has stand-ins for control strings that were typed."""
    messages, tools = prepared(chat.messages), plain(chat.tools)
    typed = without_typed(messages, tools, tokenizer)
    template = tokenizer.template
    text, marks = template.marked(typed.messages, typed.tools)
    if typed.tokens and typed.restore(text) != template.render(messages, tools):
        raise DataError(
            f"the chat contains the text {next(iter(typed.tokens.values()))}, a control token of the tokenizer of "
            f"{tokenizer.name}, and chat template {template.name} treats it as more than text.  Remove it or "
            "write it differently."
        )
    rendered = Rendered(text, marks, typed.messages, typed.tools, typed.everything, tokenizer)
    return encode_typed(text, typed, tokenizer), typed, rendered


def _prove(encoded: Encoded, typed: Typed, chat: Rendered, wanted: list[int]) -> list[Span]:
    """The tokens of the turns `wanted`, which decode to the text of the turns and to nothing else."""
    turns = find_turns(chat, wanted)
    spans = tokens_of(turns, chat.text, encoded, typed, chat.tokenizer)
    return [Span(turn.message, first, last) for turn, (first, last) in zip(turns, spans, strict=True)]
