"""Converts a row to tokens and the weight of each token in the loss.

`encode_chat` renders a chat (`render.py`) and tokenises the rendered text as a whole (`tokens.py`).  Then it finds the
assistant's turns in the text (`turns.py`) and their tokens (`tokens.py`).  `data.supervise` and the weights of messages
determine the weights of tokens.  `supervised.py` says of which messages.

With data.turns = each, each supervised assistant turn has a rendering of the chat that ends with this turn.  `tree.py`
stores the common beginnings of these texts once.

If it cannot be proven which tokens are supervised, an error is raised.  The error names the message; the caller adds
file and line.  `cache/truncation.py` handles samples that are too long, and `omitted.py` finds text that the template
left out.
"""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from sft.batch import Tree
from sft.config import DataConfig
from sft.data.chat.omitted import OmittedText, find_omitted, in_no_rendering, lost_texts
from sft.data.chat.render import RenderedChat, render_chat, render_turns
from sft.data.chat.supervised import Supervise, no_loss, weights_of_turns
from sft.data.chat.tokenizer import BYTE_CONTROL, ByteTokenizer, ChatTokenizer, FolderTokenizer
from sft.data.chat.tokens import Tokenised, TokenSpan, find_token_spans, tokenise
from sft.data.chat.tree import TreeText, grow
from sft.data.chat.turns import Turn, find_turns
from sft.data.rows.formats import Chat, PlainText
from sft.data.rows.messages import THINKING, with_arguments, with_reasoning_keys
from sft.data.rows.token_rows import Tokenized
from sft.errors import DataError


class Encoding(NamedTuple):
    """The tokens of a row, int32 [n], their weights in the loss, float32 [n], and how they were made.

    rendered     the rendered chat; with a tree, the rendering with the most messages.  None: the row is no chat, or the
                 tokenizer is the byte tokenizer
    num_before   number of tokens that the tokenizer puts before a plain text; None for other rows
    spelled      control tokens that stayed text: (token, role of the message with this text)
    starts       index of the first token of each document; a packed row of tokens has several documents
    num_padding  number of padding tokens of the row, which are not among `tokens`
    tree         the texts of the row; None: it is one text
    omitted      texts that the template leaves out; with data.turns = each, those that no rendering contains.  None:
                 nobody looked for them
    """

    tokens: np.ndarray
    weights: np.ndarray
    rendered: RenderedChat | None
    num_before: int | None = None
    spelled: tuple[tuple[str, str], ...] = ()
    starts: tuple[int, ...] = (0,)
    num_padding: int = 0
    tree: Tree | None = None
    omitted: list[OmittedText] | None = None

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
    """Tokens and weights of a row of any length.

    Raises DataError if a turn cannot be located, if no token is supervised, if the row has several completions and
    data.turns = chat, or if the tokenizer lacks an id of a row of token ids.
    """
    if isinstance(row, Chat) and data.turns == "each":
        return encode_turns(row, tokenizer, inserted=data.supervise_inserted)
    if isinstance(row, Chat) and row.others:
        raise DataError(
            f"the row has {len(row.others) + 1} completions, but data.turns = chat renders one chat of a row.  Set "
            "data.turns = each, or write a row for each completion."
        )
    if isinstance(row, Chat):
        encoding = encode_chat(row, tokenizer, data.supervise, inserted=data.supervise_inserted)
        return (
            encoding
            if encoding.rendered is None
            else encoding._replace(omitted=lost_texts(encoding.rendered, data.supervise))
        )
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
    with _without_gc():
        return _encode_chat(chat, tokenizer, supervise, inserted)


def encode_turns(chat: Chat, tokenizer: ChatTokenizer, *, inserted: bool = True) -> Encoding:
    """Tokens and weights of a tree of texts.  Each text is a rendering of the chat up to a supervised turn.

    A text supervises its last turn only.  Each completion of a row makes a chat with texts of its own.  If there is
    only one text, the result has no tree.  Raises the errors of `encode_chat`.
    """
    encoded: list[Encoding] = []
    earlier: Tokenised | None = None
    with _without_gc():
        for answered in (chat, *chat.others):
            texts, earlier = _encode_texts(answered, tokenizer, inserted, earlier)
            encoded += texts
    if not encoded:
        raise no_loss("turn")
    if len(encoded) == 1:
        return encoded[0]
    grown = grow([TreeText(text.tokens, text.weights) for text in encoded])
    spelled = tuple(dict.fromkeys(token for text in encoded for token in text.spelled))
    omitted = {lost[:3]: lost for text in encoded for lost in text.omitted or ()}
    longest = max(encoded, key=lambda text: 0 if text.rendered is None else len(text.rendered.chat.messages))
    return longest._replace(
        tokens=grown.tokens, weights=grown.weights, spelled=spelled, tree=grown.tree, omitted=[*omitted.values()]
    )


def _encode_texts(
    chat: Chat, tokenizer: ChatTokenizer, inserted: bool, earlier: Tokenised | None
) -> tuple[list[Encoding], Tokenised | None]:
    """Encodes the chat up to each supervised turn.  Returns the encodings, and the tokens of the last rendering.

    Only the last encoding has `rendered` and `omitted`.
    earlier: the tokens of another rendering with the same beginning, which are used again
    """
    turns = list(weights_of_turns(chat, "assistant"))
    if isinstance(tokenizer, ByteTokenizer):
        parts = [chat._replace(messages=chat.messages[: turn + 1]) for turn in turns]
        return [_encode_chat(part, tokenizer, "turn", inserted) for part in parts], None
    encoded: list[Encoding] = []
    omitted: list[list[OmittedText]] = []
    for rendered in render_turns(chat, tokenizer, turns):
        text, earlier = _encode_rendered(rendered, "turn", inserted, earlier)
        encoded[-1:] = [other._replace(rendered=None) for other in encoded[-1:]]  # only the last rendering is used
        encoded.append(text)
        omitted.append(find_omitted(rendered))
    encoded[-1:] = [text._replace(omitted=in_no_rendering(omitted, turns)) for text in encoded[-1:]]
    return encoded, earlier


@contextmanager
def _without_gc() -> Iterator[None]:
    """A context without garbage collector: a long chat makes a million small objects, and no reference cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _encode_chat(chat: Chat, tokenizer: ChatTokenizer, supervise: Supervise, inserted: bool) -> Encoding:
    if isinstance(tokenizer, FolderTokenizer):
        return _encode_rendered(render_chat(chat, tokenizer), supervise, inserted)[0]
    ids, spans = _encode_bytes(chat)
    return Encoding(ids, _weights(chat, supervise, len(ids), spans), None)  # the byte template leaves no text out


def _encode_rendered(
    rendered: RenderedChat, supervise: Supervise, inserted: bool, earlier: Tokenised | None = None
) -> tuple[Encoding, Tokenised]:
    """Encodes a rendering.  earlier: the tokens of another rendering with the same beginning, which are used again"""
    chat, tokenizer = rendered.chat, rendered.tokenizer
    tokenised = tokenise(rendered.reading, tokenizer, earlier)
    # If a turn has the same weight as the tokens outside of turns, its position does not matter.
    unlike = [i for i, weight in weights_of_turns(chat, supervise).items() if weight != (supervise == "all")]
    last = len(chat.messages) - 1
    if supervise == "all" and chat.messages[last]["role"] == "assistant" and tokenizer.appends_end:
        unlike = sorted({*unlike, last})
    turns = find_turns(rendered, unlike)
    spans = find_token_spans(turns, rendered.reading.text, tokenised.encoded, tokenizer, inserted=inserted)
    ids, spans = _with_final_end(tokenised.encoded.ids, spans, rendered, turns)
    weights = _weights(chat, supervise, len(ids), spans)
    return Encoding(ids, weights, rendered, spelled=tuple(tokenised.spelled)), tokenised


def _weights(chat: Chat, supervise: Supervise, num_tokens: int, spans: list[TokenSpan]) -> np.ndarray:
    """The weights of the tokens of a chat, float32 [num_tokens].  spans: the tokens of its turns"""
    by_message = weights_of_turns(chat, supervise)
    weights = (np.ones if supervise == "all" else np.zeros)(num_tokens, dtype=np.float32)
    for span in spans:
        if span.message in by_message:
            weights[span.start : span.end] = by_message[span.message]
            if not span.is_end_usual and supervise != "all":
                weights[span.end_start : span.end] = 0
    weights[:1] = 0  # no token precedes and predicts the first token
    if not weights.any():
        raise no_loss(supervise)
    return weights


def _with_final_end(
    ids: np.ndarray, spans: list[TokenSpan], rendered: RenderedChat, turns: list[Turn]
) -> tuple[np.ndarray, list[TokenSpan]]:
    """Appends the end token by data.final_end if the template writes none after the last turn of the chat."""
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


def _encode_bytes(chat: Chat) -> tuple[np.ndarray, list[TokenSpan]]:
    """Encodes a chat with the byte tokenizer's template: ChatML, with tools as JSON in a first system block.

    Returns the tokens, int32 [n], and a span per message.  A span covers the text of a message; that of an assistant's
    message also covers its end-of-turn token.
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
