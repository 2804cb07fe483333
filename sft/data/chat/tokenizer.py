"""Loads the tokenizer and the chat template of a run.

Decides which template is used, and the digest of both, which is part of the names of stores.  `tokenizer/files.py`
reads the tokenizer's files, `chat_template.py` renders chats, and `habits.py` learns the behaviour of a template.

There are two kinds of tokenizers: the built-in byte tokenizer, which needs no file, and any Hugging Face tokenizer
folder.  No code of a folder runs.  A sandbox renders the folder's template (`sandbox.py`), only in a child process with
limits of memory and time (`sft/data/limited.py`), so a template cannot end the run's process.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from sft.config import DataConfig
from sft.data import limited
from sft.data.chat.habits import Habits, Vocabulary, learn
from sft.data.chat.prompts import Prompts
from sft.data.template.chat_template import ChatTemplate
from sft.data.tokenizer.files import TokenizerFiles
from sft.data.tokenizer.new_tokens import with_new_tokens
from sft.data.tokenizer.reading import read_tokenizer
from sft.data.tokenizer.text_tokenizer import TextTokenizer
from sft.data.work import Meter, Work
from sft.errors import DataError
from sft.files.folder_files import CONFIG_BYTES, UnsafeFileError, read_file

BYTE_CONTROL = {"<|im_start|>": 256, "<|im_end|>": 257, "<|pad|>": 258}


@dataclass(frozen=True, kw_only=True)
class ByteTokenizer:
    """UTF-8 bytes and three control ids.  Control strings typed inside a message stay bytes.

    "hé" -> 104 195 169        <|im_start|> 256        <|im_end|> 257        <|pad|> 258
    """

    name: str = "byte"
    vocab_size: int = 256 + len(BYTE_CONTROL)
    pad_id: int = BYTE_CONTROL["<|pad|>"]
    end_of_turn: str = "<|im_end|>"
    digest: str = hashlib.sha256(b"sft byte tokenizer 1").hexdigest()

    @property
    def work(self) -> Work:
        """Nothing: its template is built in, and its tokens are bytes."""
        return Work()

    @property
    def ids_digest(self) -> str:
        """The digest of everything that determines the ids of a text."""
        return self.digest

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`, with control ids as their names.  Invalid UTF-8 becomes U+FFFD."""
        control = {i: name.encode() for name, i in BYTE_CONTROL.items()}
        return b"".join(control.get(int(i)) or bytes([int(i)]) for i in ids).decode("utf-8", errors="replace")


@dataclass(frozen=True, kw_only=True)
class FolderTokenizer(TextTokenizer):
    """A Hugging Face tokenizer folder, with or without a chat template.

    assistant_control  further control tokens that the text of an assistant may contain
    final_end          token to append to a last answer that the template does not end; "auto": the token that hands
                       turns over; None: no token
    """

    chat_template: ChatTemplate | None = None
    assistant_control: frozenset[str] = frozenset()
    final_end: str | None = "auto"

    @property
    def template(self) -> ChatTemplate:
        """The chat template.  Raises DataError if there is none, because only chats need one."""
        if self.chat_template is None:
            raise DataError(
                f"the tokenizer of {self.name} has no chat template, so messages cannot be written as text.  Give one "
                "with data.chat_template: a Jinja file, such as chat_template.jinja of a chat model."
            )
        return self.chat_template

    @property
    def work(self) -> Work:
        """The work of this object so far."""
        rendering = Meter() if self.chat_template is None else self.chat_template.meter
        return Work(template_s=rendering.seconds, tokenizer_s=self.meter.seconds, characters=rendering.characters)

    @cached_property
    def habits(self) -> Habits:
        """The behaviour of the template around an assistant's turns.  Raises DataError if there is no chat template."""
        added, special = frozenset(self.files.added_ids), frozenset(self.files.special_ids)
        eos = self.control_names.get(-1 if self.files.eos_id is None else self.files.eos_id)
        ends = tuple(end for end in self.files.generation_ends if end in self.ids)
        vocabulary = Vocabulary(self.control, added, special, ends, eos)
        return limited.call(f"chat template {self.template.name}", learn, self.template, vocabulary)

    @property
    def end_of_turn(self) -> str | None:
        """The token that ends an assistant's turn.  A turn with a tool call may end with another token."""
        habits = self.habits
        return habits.last_ends[False] or self.final_end_of(calls=False)

    @property
    def appends_end(self) -> bool:
        """Whether the template may write no token after a last answer, and data.final_end is not null."""
        return self.final_end is not None and None in self.habits.last_ends.values()

    def final_end_of(self, *, calls: bool) -> str | None:
        """The token to append after a last turn that the template does not end; None: no token."""
        if self.final_end != "auto":
            return self.final_end
        following = self.habits.following[calls] or self.habits.following[False]
        return following if following in self.files.generation_ends else None

    @cached_property
    def prompts(self) -> Prompts:
        """The cache of the template's prompts.  Raises DataError if there is no chat template."""
        return Prompts(self.template, self.habits)

    @cached_property
    def digest(self) -> str:
        """The digest of everything that determines the tokens of a row.

        These are the tokenizer as it was loaded, its special tokens and the chat template.  Other files, such as
        config.json, do not change the digest.
        """
        template, further = self.chat_template, {}
        if template is not None:
            further = {
                "with_tools": template.with_tools,
                "date": template.date if template.asks_for_date else None,
                "final_end": None if self.final_end == "auto" else [self.final_end],
                "assistant_control": sorted(self.assistant_control) or None,
                "generation_ends": list(self.files.generation_ends) or None,
            }
        facts = {
            "backend": self.files.backend.to_str(),
            "special": self.files.special_tokens,
            "text": [self.files.around_text, self.files.eos_id],
            "template": template and [template.source, template.switches],
            **{name: value for name, value in further.items() if value is not None},
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    @cached_property
    def ids_digest(self) -> str:
        """The digest of everything that determines the ids of a text, without a chat template.

        Whether an added token is special changes no ids.
        """
        content = json.loads(self.files.backend.to_str())
        added = [{key: value for key, value in token.items() if key != "special"} for token in content["added_tokens"]]
        facts = {**{part: content[part] for part in ("model", "normalizer", "pre_tokenizer")}, "added_tokens": added}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each control token: the special tokens, and all added tokens that the template's code contains."""
        code = self.chat_template.code if self.chat_template else ""
        written = {token: i for token, i in self.files.added_ids.items() if token in code}
        return {**super().ids, **written}


ChatTokenizer = ByteTokenizer | FolderTokenizer


def template_name(tokenizer: ChatTokenizer) -> str:
    """The name of the tokenizer's chat template, for messages.  Raises DataError if there is no chat template."""
    return "of data.tokenizer = byte" if isinstance(tokenizer, ByteTokenizer) else tokenizer.template.name


def load_tokenizer(data: DataConfig, name: str | None = None, folder: Path | None = None) -> ChatTokenizer:
    """The tokenizer `name`, with the template of `data.chat_template` or the tokenizer's own template.

    name    the tokenizer's name in messages; None: `data.tokenizer`, or "byte" if that is null
    folder  the folder with the tokenizer's files; None: the folder `name`
    Raises DataError if the folder is missing, if it has no tokenizer, if the template cannot be used, or if a key of
    `data` names a token or a variable that the tokenizer or the template lacks.  A tokenizer without a template is no
    error.
    """
    name = name or data.tokenizer or "byte"
    if name == "byte":
        if data.chat_template is not None:
            raise DataError(
                f"data.chat_template = {data.chat_template} has no effect with data.tokenizer = byte, which has its "
                "own template.  Remove data.chat_template, or name a tokenizer folder."
            )
        if data.chat_template_kwargs:
            raise DataError(
                f"data.chat_template_kwargs gives {', '.join(data.chat_template_kwargs)}, which has no effect with "
                "data.tokenizer = byte, whose template reads no variables.  Remove data.chat_template_kwargs, or "
                "name a tokenizer folder."
            )
        return ByteTokenizer()
    return _load_folder(name, folder or Path(name), data)


def _load_folder(name: str, folder: Path, data: DataConfig) -> FolderTokenizer:
    files = with_new_tokens(name, read_tokenizer(name, folder), data)
    tokenizer = FolderTokenizer(
        name=name,
        files=files,
        chat_template=_choose_template(files, name, data),
        assistant_control=frozenset(data.assistant_control_tokens),
        final_end=data.final_end,
    )
    named = [*data.assistant_control_tokens, *([data.final_end] if data.final_end not in ("auto", None) else [])]
    if unknown := [token for token in named if token not in files.added_ids]:
        key = "assistant_control_tokens" if unknown[0] in data.assistant_control_tokens else "final_end"
        raise DataError(
            f"data.{key} names {unknown[0]}, which is no control token of the tokenizer of {name}.  Its control "
            f"tokens: {', '.join(list(files.added_ids)[:20]) or 'none'}."
        )
    return tokenizer


def _choose_template(files: TokenizerFiles, name: str, data: DataConfig) -> ChatTemplate | None:
    """The template of data.chat_template or of the tokenizer; None if there is none.  Only chats need a template."""
    switches, template_file = data.chat_template_kwargs, data.chat_template
    source, template_name = files.templates.get("default"), f"of {name}"
    with_tools = files.templates.get("tool_use", source)  # as transformers chooses the template of a chat with tools
    if template_file is not None:
        try:
            source, template_name = read_file(Path(template_file), CONFIG_BYTES).decode(), template_file
        except (OSError, UnsafeFileError, UnicodeDecodeError) as error:
            raise DataError(f"chat template data.chat_template = {template_file} cannot be read: {error}.") from error
        with_tools = source
    source = source or with_tools
    if not source:
        if switches:
            raise DataError(
                f"data.chat_template_kwargs gives {', '.join(switches)}, but the tokenizer of {name} has no chat "
                "template.  Give one with data.chat_template, or remove data.chat_template_kwargs."
            )
        return None
    other = None if with_tools == source else with_tools
    template = ChatTemplate(source, template_name, dict(files.special_tokens), switches, other, data.date)
    _check_switches(template)
    return template


def _check_switches(template: ChatTemplate) -> None:
    """Raises DataError for variables that the template does not read, or that are special tokens of the tokenizer."""
    taken = [name for name in template.switches if name in template.special_tokens]
    unread = [name for name in template.switches if name not in template.variables]
    if taken or unread:
        readable = ", ".join(ChatTemplate(template.source, template.name, template.special_tokens).free_switches)
        why = "the tokenizer gives itself" if taken else "the template does not read"
        raise DataError(
            f"data.chat_template_kwargs gives {', '.join(taken or unread)}, which {why}.  Variables that chat template "
            f"{template.name} reads: {readable or 'none'}."
        )
