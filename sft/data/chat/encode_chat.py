"""Converts a row to tokens and the weight of each token in the loss.

`encode_chat` renders a chat (`render.py`) and tokenises the rendered text as a whole (`tokens.py`).  Then it finds the
assistant's turns in the text (`turns.py`) and their tokens (`tokens.py`).  `data.supervise` and the weights of messages
determine the weights of tokens.  Supervised tokens by `data.supervise`:

    assistant  the assistant's text and the token that ends each turn, once per turn; neither the role header nor the
               newline after the turn
    last       as for assistant, but only in the last assistant turn
    all        every token except the first

If it cannot be proven which tokens are supervised, an error is raised.  Errors name the message; the caller adds file
and line.
`cache/truncation.py` handles samples that are too long, and `omitted.py` finds text that the template left out.
"""

import gc
import json
from typing import Literal, NamedTuple

import numpy as np

from sft.config import DataConfig
from sft.data.chat.render import RenderedChat, render_chat
from sft.data.chat.tokenizer import BYTE_CONTROL, ByteTokenizer, ChatTokenizer
from sft.data.chat.tokens import TokenSpan, find_token_spans, tokenise
from sft.data.chat.turns import Turn, find_turns
from sft.data.rows.formats import Chat, PlainText, Tokenized
from sft.data.rows.messages import THINKING, with_arguments, with_reasoning_keys
from sft.errors import DataError

Supervise = Literal["assistant", "last", "all"]


class Encoding(NamedTuple):
    """The tokens of a row, int32 [n], their weights in the loss, float32 [n], and the rendered chat.

    rendered     the rendered chat; None for rows that are no chats, and with the byte tokenizer
    num_before   number of tokens that the tokenizer puts before a plain text; None for other rows
    spelled      control tokens that stayed text, each with the role of its text
    starts       index of the first token of each document; a packed row of tokens has several documents
    num_padding  number of padding tokens of the row, which are not among `tokens`
    """

    tokens: np.ndarray
    weights: np.ndarray
    rendered: RenderedChat | None
    num_before: int | None = None
    spelled: tuple[tuple[str, str], ...] = ()
    starts: tuple[int, ...] = (0,)
    num_padding: int = 0

    def documents(self) -> "list[Encoding]":
        """The documents of the row, each as the encoding of a separate row."""
        if len(self.starts) == 1:
            return [self]
        ends = [*self.starts[1:], len(self.tokens)]
        return [
            self._replace(tokens=self.tokens[start:end], weights=self.weights[start:end], starts=(0,), num_padding=0)
            for start, end in zip(self.starts, ends, strict=True)
        ]


def encode_row(row: Chat | PlainText | Tokenized, tokenizer: ChatTokenizer, data: DataConfig) -> Encoding:
    """Tokens and weights of a row of any length.  Raises DataError, also for an id that the tokenizer lacks:

    token ids 3 259, a tokenizer with 259 ids  ->  token 2 is 259, but the tokenizer has only ids 0 to 258.
    """
    if isinstance(row, Chat):
        return encode_chat(row, tokenizer, data.supervise, inserted=data.supervise_inserted)
    if isinstance(row, PlainText):
        return _encode_text(row.text, tokenizer)
    outside = np.flatnonzero(row.tokens >= tokenizer.vocab_size)
    if len(outside):
        first = int(outside[0])
        raise DataError(
            f"token {first + 1} is {row.tokens[first]:,}, but the tokenizer has only ids 0 to "
            f"{tokenizer.vocab_size - 1:,}."
        )
    return Encoding(row.tokens, row.weights, None, starts=row.starts, num_padding=row.num_padding)


def _encode_text(text: str, tokenizer: ChatTokenizer) -> Encoding:
    """Encodes a document or a file of code.  The whole text is supervised, whatever data.supervise is.

    A text gets the tokens of `tokenizer(text)` in transformers, as in pretraining: no chat template is used, control
    strings in the text become control tokens, and a BOS token comes first if the tokenizer adds one.  The tokenizer's
    EOS token ends the document; it is added unless the text already ends with it.

    "hé", byte tokenizer                          104 195 169               no BOS, no EOS
    "Hi", Llama 3      <|begin_of_text|> Hi <|end_of_text|>                 supervised: Hi <|end_of_text|>
    "Hi", Qwen                           Hi <|endoftext|>                   supervised: <|endoftext|>

    The tokens before the text have weight 0, and so has the first token, which no token predicts.  Raises DataError if
    no token is left to supervise.
    """
    if isinstance(tokenizer, ByteTokenizer):
        ids, num_before = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32), 0
    else:
        before, after = tokenizer.files.around_text
        num_before = len(before)
        content = tokenizer.encode(text).ids
        last = after[-1] if after else content[-1] if len(content) else None
        end = [] if tokenizer.files.eos_id in (None, last) else [tokenizer.files.eos_id]
        ids = np.concatenate([before, content, after, end]).astype(np.int32)
    weights = np.ones(len(ids), dtype=np.float32)
    weights[: max(1, num_before)] = 0
    if not weights.any():
        raise DataError("the text has only one token, so no token is supervised.")
    return Encoding(ids, weights, None, num_before)


def encode_chat(
    chat: Chat, tokenizer: ChatTokenizer, supervise: Supervise = "assistant", *, inserted: bool = True
) -> Encoding:
    """Tokens and weights of a chat.  Raises DataError if a turn cannot be located, or if no token is supervised.

    inserted: data.supervise_inserted

    user "a", assistant "b", byte tokenizer:
    <|im_start|>user\\na<|im_end|>\\n<|im_start|>assistant\\nb<|im_end|>\\n      1: b <|im_end|>      0: all others
    """
    enabled = gc.isenabled()
    gc.disable()  # a long chat makes a million small objects without a reference cycle
    try:
        return _encode_chat(chat, tokenizer, supervise, inserted)
    finally:
        if enabled:
            gc.enable()


def _encode_chat(chat: Chat, tokenizer: ChatTokenizer, supervise: Supervise, inserted: bool) -> Encoding:
    by_message = weights_of_turns(chat, supervise)
    spelled: tuple[tuple[str, str], ...] = ()
    rendered = None  # the byte tokenizer's own template leaves nothing out
    if isinstance(tokenizer, ByteTokenizer):
        ids, spans = _encode_bytes(chat)
    else:
        rendered = render_chat(chat, tokenizer)
        reading = rendered.reading
        encoded, counts = tokenise(reading, tokenizer)
        spelled = tuple(counts)
        # If a turn has the same weight as all other tokens, its position does not matter.
        unlike = [i for i, weight in by_message.items() if weight != (supervise == "all")]
        last = len(chat.messages) - 1
        if supervise == "all" and chat.messages[last]["role"] == "assistant" and tokenizer.appends_end:
            unlike = sorted({*unlike, last})
        turns = find_turns(rendered, unlike)
        spans = find_token_spans(turns, reading.text, encoded, tokenizer, inserted=inserted)
        ids, spans = _with_final_end(encoded.ids, spans, rendered, turns)
    weights = (np.ones if supervise == "all" else np.zeros)(len(ids), dtype=np.float32)
    for span in spans:
        if span.message in by_message:
            weights[span.start : span.end] = by_message[span.message]
            if not span.is_end_usual and supervise != "all":
                weights[span.end_start : span.end] = 0
    weights[:1] = 0  # no token precedes and predicts the first token
    if not weights.any():
        raise DataError(
            f"every token has weight 0 with data.supervise = {supervise}, so the chat has no loss.  Give an "
            "assistant message a weight above 0, or remove the chat."
        )
    return Encoding(ids, weights, rendered, spelled=spelled)


def _with_final_end(
    ids: np.ndarray, spans: list[TokenSpan], rendered: RenderedChat, turns: list[Turn]
) -> tuple[np.ndarray, list[TokenSpan]]:
    """Appends data.final_end if the template writes no end after the last turn of the chat."""
    last = turns[-1] if turns else None
    tokenizer = rendered.tokenizer
    if last is None or last.text_end < last.end or last.end < len(rendered.reading.text):
        return ids, spans
    end = tokenizer.final_end_of(calls=bool(rendered.chat.messages[last.message].get("tool_calls")))
    if end is None:
        if tokenizer.final_end is None:
            return ids, spans
        ends = ", ".join(tokenizer.habits.ends) or "none"
        raise DataError(
            f"chat template {tokenizer.template.name} writes no token after the last answer, so the model would not "
            "learn to stop, and generation_config.json names no token with which its turns end.  Set data.final_end "
            f"to a control token, or to null for none.  Tokens that end turns of this template: {ends}."
        )
    ids = np.concatenate([ids, np.array([tokenizer.files.added_ids[end]], np.int32)])
    span = next(span for span in reversed(spans) if span.message == last.message)
    whole = span._replace(end=len(ids), end_start=len(ids) - 1, is_end_usual=True)
    return ids, [whole if other is span else other for other in spans]


def weights_of_turns(chat: Chat, supervise: Supervise) -> dict[int, float]:
    """The weight of the tokens of each supervised assistant message: {index of the message: weight}.

    Messages of weight 0 are included for `all` only.
    """
    answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    weights = chat.weights or (1.0,) * len(chat.messages)
    by_message = {i: weights[i] for i in (answers[-1:] if supervise == "last" else answers)}
    return by_message if supervise == "all" else {i: weight for i, weight in by_message.items() if weight != 0}


def _encode_bytes(chat: Chat) -> tuple[np.ndarray, list[TokenSpan]]:
    """Encodes a chat with the byte tokenizer's template: ChatML, with tools as JSON in a first system block.

    Spans cover contents; the span of an assistant's message includes its end of turn.
    """
    text, controls, spans = bytearray(), [], []

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
    for i, message in enumerate(with_arguments(with_reasoning_keys(chat.messages), as_text=False)):
        calls = [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls") or []]
        thinking = next((f"<think>\n{message[key]}\n</think>" for key in THINKING if message.get(key)), "")
        body = [thinking, message.get("content") or "", *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
        first, last = block(message["role"], "\n".join(part for part in body if part))
        spans.append(TokenSpan(i, first, last + (message["role"] == "assistant")))
    ids = np.frombuffer(bytes(text), dtype=np.uint8).astype(np.int32)
    for position, control in controls:
        ids[position] = control
    return ids, spans
