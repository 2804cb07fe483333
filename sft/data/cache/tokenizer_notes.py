"""Prints notes about the tokenizer once in a preparation, e.g. if transformers tokenises some texts differently.

Decides which texts of the data are tokenised both ways and compared: those of the first 100 rows of the first file.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from sft.console import Console
from sft.data.chat.tokenizer import ByteTokenizer, ChatTokenizer, FolderTokenizer
from sft.data.read.rows import DataFile, read_rows
from sft.data.read.strict_json import parse
from sft.errors import DataError

NUM_ROWS = 100
_CHARACTERS = 2000  # number of characters of each row that are compared


def say_notes(tokenizer: ChatTokenizer, files: Sequence[DataFile], console: Console) -> None:
    """Prints a line for each note.  Prints nothing for the byte tokenizer, and for most folders."""
    if isinstance(tokenizer, ByteTokenizer):
        return
    from sft.data.tokenizer.comparison import compare_with_transformers, losses
    from sft.data.tokenizer.reading import read_tokenizer

    name, own = tokenizer.name, tokenizer.files
    if own.new_ids:  # the files do not have these tokens
        own = read_tokenizer(name, own.folder)
    compared = compare_with_transformers(name, own.folder, own, first_texts(files[0]))
    for note in (*own.notes, compared, losses(name, own), _appended(tokenizer)):
        if note:
            console.say(f"tokenizer: {note}")


def _appended(tokenizer: FolderTokenizer) -> str | None:
    if tokenizer.chat_template is None or not tokenizer.appends_end:
        return None
    ends = {calls: tokenizer.final_end_of(calls=calls) for calls in (False, True)}
    ends = {calls: end for calls, end in ends.items() if end and not tokenizer.habits.last_ends[calls]}
    after = {False: "an answer", True: "a call"}
    where = " and ".join(f"{end} after {after[calls]}" for calls, end in ends.items())
    return where and (
        f"chat template {tokenizer.template.name} writes no token after the last turn of a chat, so data.final_end = "
        f"{tokenizer.final_end} appends {where}."
    )


def first_texts(file: DataFile) -> list[str]:
    """For each of the first 100 rows, all its texts as one text of at most 2,000 characters; each different text once.

    Rows that cannot be read are left out.

    {"messages": [{"role": "user", "content": "Hi"}]}  ->  "user\\nHi"
    """
    texts = []
    try:
        for _, content in islice(read_rows(file), NUM_ROWS):
            try:
                text = "\n".join(_strings(parse(content)))[:_CHARACTERS]
            except DataError:  # the preparation reports the row
                continue
            if text:
                texts.append(text)
    except (DataError, OSError):
        pass
    return list(dict.fromkeys(texts))


def _strings(value: Any) -> Iterator[str]:
    """All texts within a value, without keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, list) and not (value and isinstance(value[0], int)):  # a list of token ids may be long
        for part in value:
            yield from _strings(part)
