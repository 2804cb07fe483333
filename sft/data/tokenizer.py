"""Which tokenizer and which chat template a run uses.

Decides where they come from, the padding id, the true number of ids, the text that ends an assistant's turn,
and the digest that cache keys are made of.  Does not decide what is supervised (`chat.py`).

Two kinds: the built-in byte tokenizer, which needs no file, and any Hugging Face tokenizer folder.  Nothing
is downloaded and no code of a folder is run; its template is rendered by transformers in Jinja's sandbox.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sft.config import DataConfig
from sft.errors import DataError

BYTE_CONTROL = {"<|im_start|>": 256, "<|im_end|>": 257, "<|pad|>": 258}
_BYTE_DIGEST = hashlib.sha256(b"sft byte tokenizer 1").hexdigest()
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TOKENIZER_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None


@dataclass(frozen=True, kw_only=True)
class ByteTokenizer:
    """UTF-8 bytes and three control ids.  Control strings typed inside a message stay bytes.

    "hé" -> 104 195 169        <|im_start|> 256        <|im_end|> 257        <|pad|> 258
    """

    name: str = "byte"
    vocab_size: int = 256 + len(BYTE_CONTROL)
    pad_id: int = BYTE_CONTROL["<|pad|>"]
    end_of_turn: str = "<|im_end|>"
    digest: str = _BYTE_DIGEST

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`, control ids by their names; broken UTF-8 becomes U+FFFD."""
        control = {i: name.encode() for name, i in BYTE_CONTROL.items()}
        return b"".join(control.get(int(i)) or bytes([int(i)]) for i in ids).decode("utf-8", errors="replace")


class Encoded(NamedTuple):
    """Tokens of a text and the characters each covers: text[starts[k]:ends[k]]."""

    ids: np.ndarray  # int32 [n]
    starts: np.ndarray  # int64 [n]
    ends: np.ndarray  # int64 [n]


@dataclass(frozen=True, kw_only=True)
class FolderTokenizer:
    """A Hugging Face tokenizer folder with a chat template."""

    name: str
    vocab_size: int
    pad_id: int
    end_of_turn: str
    digest: str
    template: str
    template_name: str  # as a user would call it, for errors
    control: re.Pattern[str]  # texts that the tokenizer turns into control tokens wherever they stand
    hf: Any

    @property
    def has_markers(self) -> bool:
        """Whether the template says itself what the assistant wrote, by {% generation %} blocks."""
        return bool(_GENERATION.search(self.template))

    def render(self, messages: list[Message], tools: Tools, *, add_generation_prompt: bool = False) -> str:
        """The chat as text, as the template writes it.  Raises DataError where the template refuses it."""
        return _render(self.hf, self.template, self.template_name, messages, tools, add_generation_prompt)

    def marked_spans(self, messages: list[Message], tools: Tools) -> tuple[str, list[tuple[int, int]]]:
        """The chat as text, and the characters inside each {% generation %} block.

        transformers also offers a token mask made from these spans; it supervises the rest of the sequence
        when a span ends at token 0 (transformers#47325), so spans are mapped to tokens in `chat.py`.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        texts, spans = render_jinja_template(
            conversations=[present],
            tools=tools,
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            **self.hf.special_tokens_map,
        )
        return texts[0], [(int(start), int(end)) for start, end in spans[0]]

    def encode(self, text: str) -> Encoded:
        """Ids of `text` as they stand: no special tokens added, nothing truncated."""
        encoding = self.hf.backend_tokenizer.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int32)
        flat = np.fromiter(chain.from_iterable(encoding.offsets), dtype=np.int64, count=2 * len(ids))
        return Encoded(ids, flat[::2], flat[1::2])

    def normalize(self, text: str) -> str:
        """`text` after the tokenizer's own normaliser (Qwen's composes accents, for instance)."""
        normalizer = self.hf.backend_tokenizer.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`, control tokens included, spaces untouched."""
        return str(self.hf.backend_tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False))


ChatTokenizer = ByteTokenizer | FolderTokenizer


def load_tokenizer(data: DataConfig) -> ChatTokenizer:
    """The tokenizer of `data.tokenizer` with the template of `data.chat_template`, or its own.

    Raises DataError: folder missing, not a tokenizer folder, no chat template, or one that cannot be used.
    """
    if data.tokenizer == "byte":
        if data.chat_template is not None:
            raise DataError(
                f"data.chat_template = {data.chat_template} has no effect with data.tokenizer = byte, which "
                "has a template of its own.  Remove it, or name a tokenizer folder."
            )
        return ByteTokenizer()
    return _load_folder(data.tokenizer, data.chat_template)


def _load_folder(name: str, template_file: str | None) -> FolderTokenizer:
    hf = _read_folder(name)
    template, template_name = _choose_template(hf, name, template_file)
    backend = hf.backend_tokenizer
    # We place control tokens by the template alone, and a post-processor would shorten the character spans
    # of tokens by their spaces (ByteLevel's trim_offsets).  A length limit saved in the folder would cut.
    backend.post_processor = None
    backend.no_truncation()
    backend.no_padding()
    vocabulary = hf.get_vocab()
    control = [str(token) for token in hf.added_tokens_decoder.values() if token.special]
    pad = hf.pad_token_id if hf.pad_token_id is not None else hf.eos_token_id
    return FolderTokenizer(
        name=name,
        vocab_size=max(vocabulary.values()) + 1,  # len() is too small where ids have holes
        pad_id=0 if pad is None else int(pad),
        end_of_turn=_find_end_of_turn(hf, template, template_name),
        digest=_folder_digest(Path(name), template),
        template=template,
        template_name=template_name,
        control=re.compile("|".join(re.escape(token) for token in control) or "(?!)"),  # (?!) never matches
        hf=hf,
    )


def _read_folder(name: str) -> Any:
    folder = Path(name)
    expected = "data.tokenizer is byte (built in, no file) or a folder with tokenizer.json"
    if not folder.is_dir():
        raise DataError(f"tokenizer folder {name} does not exist.  {expected}; nothing is downloaded.")
    from transformers import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its many tokenizer classes raise
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:6]) or "nothing"
        reason = str(error).strip().splitlines()
        raise DataError(
            f"{name} is not a tokenizer folder that can be used (it holds {found}): "
            f"{reason[0].strip() if reason else type(error).__name__}  {expected}."
        ) from error
    if not hf.is_fast:
        raise DataError(
            f"the tokenizer of {name} has no character offsets, so what it supervises cannot be proven.  "
            "Save it in the fast format (a tokenizer.json)."
        )
    return hf


def _choose_template(hf: Any, name: str, template_file: str | None) -> tuple[str, str]:
    if template_file is not None:
        try:
            return Path(template_file).read_text(encoding="utf-8"), template_file
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"chat template data.chat_template = {template_file} cannot be read: {error}.") from error
    template = hf.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise DataError(
            f"the tokenizer of {name} has no chat template, so messages cannot be written as text.  "
            "Give one with data.chat_template: a Jinja file, for instance the chat_template.jinja of the "
            "chat model that you want to train towards."
        )
    return template, f"of {name}"


def _find_end_of_turn(hf: Any, template: str, template_name: str) -> str:
    """The token that the template writes after an assistant's content, found by rendering a small chat.

    ChatML "...assistant\\nANSWER<|im_end|>\\n" -> "<|im_end|>"        Llama 3 -> "<|eot_id|>"
    """
    probe = "ANSWER"
    chat: list[Message] = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": probe}]
    text = _render(hf, template, template_name, chat, None, False)
    if probe not in text:
        raise DataError(f"chat template {template_name} leaves out what the assistant said; it wrote {text!r}.")
    tail = text[text.rindex(probe) + len(probe) :].strip()
    tokens = [token for token in hf.get_added_vocab() if tail.startswith(token)]
    if not tokens:
        wrote = f"{tail!r}, which is not a control token of the tokenizer" if tail else "nothing"
        raise DataError(
            f"chat template {template_name} ends an assistant's turn with {wrote}: the model would not "
            "learn to stop.  Give a template (data.chat_template) that ends turns with a control token of "
            "this tokenizer."
        )
    return max(tokens, key=len)


def _render(
    hf: Any,
    template: str,
    template_name: str,
    messages: list[Message],
    tools: Tools,
    add_generation_prompt: bool,
) -> str:
    try:
        return str(
            hf.apply_chat_template(
                messages,
                tools=tools,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        )
    except Exception as error:  # the template is the user's code and may raise anything
        reason = str(error).strip().splitlines()
        raise DataError(
            f"chat template {template_name} refused the chat: {reason[0] if reason else type(error).__name__}"
        ) from error


def _folder_digest(folder: Path, template: str) -> str:
    """Changes with every byte of the template and of the folder's tokenizer files (weights are not read)."""
    digest = hashlib.sha256(template.encode())
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in _TOKENIZER_SUFFIXES:
            digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
