"""Decides which tokenizer, chat templates and end tokens a server needs to give a model the prompts of its training.

`served_of` decides this for a run.  `served_template.py` makes templates that servers can render without our settings.
`served_files.py` writes the files, and `flags.py` describes them for users.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sft.config import Config
from sft.data.chat.tokenizer import ByteTokenizer, ChatTokenizer
from sft.hf.pretrained import tokenizer_folder

DEFAULT = "default"  # transformers' name of the template for chats without tools


@dataclass(frozen=True, kw_only=True)
class Served:
    """The tokenizer and the templates of a run, before anything is written."""

    tokenizer_folder: Path  # has all files of the tokenizer
    own_templates: Mapping[str, str]  # the templates in the files of this folder, by transformers' names
    templates: Mapping[str, str]  # the templates of the training, by transformers' names; {}: the run has none
    special_tokens: Mapping[str, Any] = field(default_factory=dict)  # for the templates: {"eos_token": "<|endoftext|>"}
    switches: Mapping[str, Any] = field(default_factory=dict)  # data.chat_template_kwargs
    date: str | None = None  # the date for a template that asks for today's date
    ends: tuple[str, ...] = ()  # tokens at which a server must stop, the usual one first
    end_ids: tuple[int, ...] = ()
    eos_token: str | None = None  # replaces eos_token of the tokenizer; None: eos_token stays as it is
    row_switches: tuple[str, ...] = ()  # names of template variables that rows give themselves
    is_other: bool = False  # whether the tokenizer is not that of model.hf
    new_ids: Mapping[str, int] = field(default_factory=dict)  # ids of data.add_tokens and data.add_special_tokens
    new_special: tuple[str, ...] = ()  # those of data.add_special_tokens


@dataclass(frozen=True, kw_only=True)
class Record:
    """The names of the written template files and the settings in the files, as source.json stores them."""

    templates: tuple[str, ...]  # names of the template files
    defaults: Mapping[str, Any]  # switches that the templates set by default
    requests: Mapping[str, Any]  # switches that each request must give, because a default would change the text
    date: str | None  # the date in the templates; None: they contain no date of the training
    ends: tuple[str, ...]
    end_ids: tuple[int, ...]
    row_switches: tuple[str, ...]
    is_other: bool
    asks_for_today: bool = False  # whether a template still asks the server for today's date
    has_marks: bool = False  # whether a template still has {% generation %} marks


def read_record(values: dict[str, Any] | None) -> Record | None:
    """The record that `asdict` turned into `values`; None for None.  Raises TypeError for unknown or missing keys."""
    if values is None:
        return None
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return Record(**fields)


def served_of(config: Config, tokenizer: ChatTokenizer, row_switches: Sequence[str] = ()) -> Served | None:
    """The files and settings of a run that a server needs; None for the byte tokenizer, which has no files.

    row_switches: names of template variables that rows give themselves
    """
    if isinstance(tokenizer, ByteTokenizer):
        return None
    folder, own = tokenizer_folder(config), dict(tokenizer.files.templates)
    assert folder is not None
    template = tokenizer.chat_template
    templates = {} if template is None else own if config.data.chat_template is None else {DEFAULT: template.source}
    ends = tokenizer.habits.stops if template else ()
    turn_ends = [end for end in ends if end in tokenizer.habits.last_ends.values()]
    eos = tokenizer.files.special_tokens.get("eos_token")
    if eos is not None and eos not in ends and not _writes_eos(templates, eos):
        ends += (eos,)  # the end of plain texts
    replaces_eos = bool(turn_ends) and eos not in turn_ends and not _writes_eos(templates, eos)
    return Served(
        tokenizer_folder=folder,
        own_templates=own,
        templates=templates,
        special_tokens={} if template is None else template.special_tokens,
        switches=config.data.chat_template_kwargs,
        date=config.data.date,
        ends=ends,
        end_ids=tuple(tokenizer.files.added_ids[end] for end in ends if end in tokenizer.files.added_ids),
        eos_token=turn_ends[0] if replaces_eos else None,
        row_switches=tuple(row_switches),
        is_other=config.tokenizer != config.model.hf,
        new_ids=tokenizer.files.new_ids,
        new_special=tuple(config.data.add_special_tokens),
    )


def _writes_eos(templates: Mapping[str, str], eos: str | None) -> bool:
    """Whether a template mentions the tokenizer's end token `eos`, so that it may write the token inside of a chat."""
    return any("eos_token" in source or (eos or "eos_token") in source for source in templates.values())
