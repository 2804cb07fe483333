"""Compares the tokenizer of sft with the tokenizer that transformers loads from the same folder, and notes differences.

Servers load a folder with AutoTokenizer, which may build another tokenizer than tokenizer.json describes: the class for
the model_type of config.json can replace the normaliser, the pre-tokenizer or the post-processor.  sft uses
tokenizer.json.  This module tokenises 500 texts (`probe_texts.py`) and texts of the data with both.  This takes a
second, so a command does it once, and its workers do not.  `losses` uses the 500 texts to find letters that a
vocabulary lacks.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unicodedata import is_normalized

from sft.data.rows.messages import quoted
from sft.data.tokenizer.files import TokenizerFiles, around_text, encode, plain
from sft.data.tokenizer.probe_texts import NUM_TEXTS, probe_texts
from sft.data.tokenizer.reading import load
from sft.data.tokenizer.special_tokens import reason
from sft.errors import DataError

_CHARACTERS = 2000  # number of characters of each text that are compared
_IDS = 12  # number of ids of an example that a note shows


def compare_with_transformers(
    name: str, folder: Path, files: TokenizerFiles, more_texts: Sequence[str] = ()
) -> str | None:
    """A note if AutoTokenizer makes other tokens than tokenizer.json, names other special tokens, or fails; else None.

    name: the name of the tokenizer in the note; more_texts: texts of the data
    """
    if not files.is_of_file:
        return None
    try:
        hf = load(folder, fix_mistral_regex=files.has_mended_regex)
        other, special = hf.backend_tokenizer, dict(hf.special_tokens_map)
        around = around_text(name, other)
        plain(other)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizer classes of transformers may raise any error; the note has it
        return (
            f"transformers cannot load the tokenizer of {name} ({reason(error)}); sft reads tokenizer.json alone.  "
            "A server that uses transformers cannot load it either."
        )
    parts = [*_differences(files, other, more_texts), *_variables(files, special)]
    if around != files.around_text:
        parts.append(f"the ids around a text are {files.around_text}, and {around} by transformers")
    if not parts:
        return None
    return (
        f"transformers reads the tokenizer of {name} otherwise ({type(hf).__name__}) than tokenizer.json says, which "
        f"sft uses: {'; '.join(parts)}.  A server that uses transformers would prompt the model otherwise than it is "
        "trained.  If transformers is right, save the tokenizer with its save_pretrained, and give that folder to "
        "data.tokenizer."
    )


def losses(name: str, files: TokenizerFiles) -> str | None:
    """A note if the tokenizer fails at some of the 500 texts, or loses letters or digits of them; else None."""
    unknown = getattr(files.backend.model, "unk_token", None) or files.special_tokens.get("unk_token")
    by_loss: dict[str, list[str]] = {}
    for text in probe_texts(list(files.added_ids)):
        if (loss := _loss(files, text, unknown)) is not None:
            by_loss.setdefault(loss, []).append(text)
    parts = [f"{len(texts)} {loss}, such as {quoted(min(texts, key=len))}" for loss, texts in by_loss.items()]
    return (
        f"the tokenizer of {name} cannot write every text: of {NUM_TEXTS} probe texts, {'; '.join(parts)}."
        if parts
        else None
    )


def _loss(files: TokenizerFiles, text: str, unknown: str | None) -> str | None:
    letters = {i for i, character in enumerate(text) if character.isalnum()}
    if not letters or not is_normalized("NFC", text):  # a normaliser may join letters
        return None
    try:
        encoding = encode(files.backend, text, offsets=True)
    except DataError:
        return "make it fail"
    if unknown is not None and unknown not in text and files.backend.token_to_id(unknown) in encoding.ids:
        return f"get the unknown token {unknown}"
    if not encoding.ids:
        return "get no token"
    if letters - {i for start, end in encoding.offsets for i in range(start, end)}:
        return "lose letters or digits"
    return None


def _differences(files: TokenizerFiles, other: Any, more_texts: Sequence[str]) -> Iterator[str]:
    """Yields a phrase for each kind of text that differs: "3 of 500 probe texts get other tokens, such as ..."."""
    for kind, texts in (("probe texts", probe_texts(list(files.added_ids))), ("texts of the data", more_texts)):
        pairs = [(text, _ids(files.backend, text), _ids(other, text)) for text in (t[:_CHARACTERS] for t in texts)]
        unlike = [pair for pair in pairs if pair[1] != pair[2]]
        if unlike:
            text, ours, their_ids = min(unlike, key=lambda pair: len(pair[0]))
            yield (
                f"{len(unlike)} of {len(texts)} {kind} get other tokens, such as {quoted(text)}: {_shown(ours)} by "
                f"tokenizer.json, {_shown(their_ids)} by transformers"
            )


def _variables(files: TokenizerFiles, their_ids: dict[str, Any]) -> Iterator[str]:
    """Yields differences of EOS, which ends a text, and of special tokens that a chat template uses."""
    ours, templates = files.special_tokens, "".join(files.templates.values())
    unlike = [key for key in {**ours, **their_ids} if ours.get(key) != their_ids.get(key)]
    for key in (key for key in unlike if key == "eos_token" or key in templates):
        yield f"{key} is {ours.get(key) or 'not set'}, and {their_ids.get(key) or 'not set'} by transformers"


def _ids(backend: Any, text: str) -> list[int] | str:
    """The ids of a text, or the error if the tokenizer fails at it."""
    try:
        return list(encode(backend, text).ids)
    except DataError as error:
        return str(error)


def _shown(ids: list[int] | str) -> str:
    if isinstance(ids, str):
        return "an error"
    return f"{ids[:_IDS]} and {len(ids) - _IDS:,} more" if len(ids) > _IDS else str(ids)
