"""Writes the tokenizer, the chat templates and the end tokens of a run into a folder with the files of its model.

The folder then has the tokenizer files of the run in place of the model's, and the end tokens in
generation_config.json.  If a template has to change, each template is written as one Jinja file.  Files that need no
change are copied byte for byte.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sft.data.limited import call
from sft.data.tokenizer.comparison import compare_with_transformers
from sft.data.tokenizer.mistral_regex import is_of_a_converter, mend
from sft.data.tokenizer.new_tokens import write_new_tokens
from sft.data.tokenizer.reading import read_tokenizer
from sft.errors import CheckpointError, DataError
from sft.weights.atomic_folder import COMPANIONS, copy_companions
from sft.weights.serving.served import DEFAULT, Record, Served
from sft.weights.serving.served_template import ForServers, for_servers

GENERATION, TEMPLATE = "generation_config.json", "chat_template.jinja"
_EOS, _TEXT = "eos_token_id", "text_config"
_OF_TOKENIZER = tuple(name for name in COMPANIONS if name != GENERATION)
_WITH_TEMPLATE = ("chat_template.json", TEMPLATE, "additional_chat_templates/*.jinja")
_NAME = re.compile(r"\w[\w.-]*")


def write(folder: Path, served: Served | None) -> Record | None:
    """Replace the tokenizer files of the model in `folder` by those of the run.  Returns the record of the files.

    served: None leaves the files of the model, and returns None
    Raises DataError if the name of a template cannot be a file name, and CheckpointError if a JSON file is not valid.
    """
    if served is None:
        return None
    _remove(folder, _OF_TOKENIZER)
    copy_companions(served.tokenizer_folder, folder, _OF_TOKENIZER)
    _mend(served.tokenizer_folder, folder)
    write_new_tokens(folder, served.new_ids, served.new_special)
    made = _made(served)
    texts = {name: template.source for name, template in made.items()}
    if texts != served.own_templates:
        _write_templates(folder, texts)
    if served.eos_token is not None:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            _change(folder / name, eos_token=served.eos_token)
    if served.end_ids:
        _write_generation(folder / GENERATION, served.end_ids)
    return _record(served, made)


def check_tokenizer(folder: Path, name: str, record: Record | None) -> None:
    """Raise CheckpointError if transformers tokenises texts with the files in `folder` differently from the run.

    name: name of the checkpoint in the error; record: None for files of the model, which are not checked
    """
    if record is None or not (folder / "tokenizer.json").is_file():
        return
    difference = compare_with_transformers(name, folder, read_tokenizer(name, folder))
    if difference is not None:
        raise CheckpointError(f"{name} is not exported: {difference}")


def _mend(source: Path, folder: Path) -> None:
    """Correct the known wrong regex in the tokenizer file of a Mistral model, as the run did when it tokenised."""
    if is_of_a_converter(source) and (folder / "tokenizer.json").is_file():
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        if mend(str(source), source, backend) is not None:
            backend.save(str(folder / "tokenizer.json"))


def record_of(served: Served) -> Record:
    """The record that `write` would return, without writing files."""
    return _record(served, _made(served))


def _made(served: Served) -> dict[str, ForServers]:
    return {
        name: call(
            f"chat template {name}", for_servers, source, dict(served.special_tokens), served.switches, served.date
        )
        for name, source in served.templates.items()
    }


def _record(served: Served, made: Mapping[str, ForServers]) -> Record:
    must_give = {name for template in made.values() for name in template.requests}
    return Record(
        templates=tuple(file_of(name) for name in made),
        defaults={name: value for name, value in served.switches.items() if name not in must_give},
        requests={name: value for name, value in served.switches.items() if name in must_give},
        date=served.date if any(template.has_date for template in made.values()) else None,
        ends=served.ends,
        end_ids=served.end_ids,
        row_switches=served.row_switches,
        is_other=served.is_other,
        asks_for_today=any(template.asks_for_today for template in made.values()),
        has_marks=any(template.has_marks for template in made.values()),
    )


def with_ends(config: Mapping[str, Any], end_ids: Iterable[int]) -> dict[str, Any]:
    """The content of config.json with `end_ids` as eos_token_id, wherever the top level or text_config has this key."""
    ids = list(end_ids)
    changed = dict(config)
    if ids and _EOS in config and _listed(config[_EOS]) != sorted(ids):
        changed[_EOS] = _one_or_all(ids)
    if isinstance(config.get(_TEXT), Mapping):
        changed[_TEXT] = with_ends(config[_TEXT], ids)
    return changed


def file_of(name: str) -> str:
    """The file of a template: default -> chat_template.jinja"""
    if not _NAME.fullmatch(name):
        raise DataError(f"a chat template of the tokenizer is called {name!r}, which cannot be the name of a file.")
    return TEMPLATE if name == DEFAULT else f"additional_chat_templates/{name}.jinja"


def _write_templates(folder: Path, texts: Mapping[str, str]) -> None:
    _remove(folder, _WITH_TEMPLATE)
    _change(folder / "tokenizer_config.json", chat_template=None)
    for name, text in texts.items():
        path = folder / file_of(name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode())  # keeps the line ends of the template on every system


def _write_generation(path: Path, end_ids: tuple[int, ...]) -> None:
    content = _read(path) if path.is_file() else {}
    if _listed(content.get(_EOS)) != sorted(end_ids):
        _write(path, {**content, _EOS: _one_or_all(end_ids)})


def _change(path: Path, **values: Any) -> None:
    """Change keys of a JSON file if the file exists.  The value None removes a key."""
    if not path.is_file():
        return
    before = _read(path)
    kept = {key: value for key, value in before.items() if values.get(key, ...) is not None}
    after = kept | {key: value for key, value in values.items() if value is not None}
    if after != before:
        _write(path, after)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} of the model cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name} of the model holds no JSON object.")
    return content


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _remove(folder: Path, patterns: Iterable[str]) -> None:
    for pattern in patterns:
        for path in list(folder.glob(pattern)):
            path.unlink()


def _listed(ids: object) -> list[int]:
    return sorted(ids) if isinstance(ids, list) else [ids] if isinstance(ids, int) else []


def _one_or_all(ids: Iterable[int]) -> int | list[int]:
    several = list(ids)
    return several[0] if len(several) == 1 else several
