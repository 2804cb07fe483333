"""Makes a Config from a YAML file and dotted overrides.  One error lists every mistake with file and line (draft.py).

sft/config/yaml.py defines the syntax of values, sft/config/ the keys and their allowed values, and resolved.py the
validated recipe.

Overrides replace values of the file, and later overrides replace earlier ones.  Mappings are merged key by key.
Relative paths are relative to the current directory, not to the folder of the recipe.
"""

import difflib
from collections.abc import Sequence
from pathlib import Path

from sft.config import keys, yaml
from sft.config.keys import leaves, named
from sft.config.yaml import Pairs
from sft.errors import ConfigError, first_few
from sft.files.folder_files import UnsafeFileError, read_file
from sft.recipe.draft import Draft
from sft.recipe.resolved import Origin, Recipe, derived

_MAX_BYTES = 1 << 20  # a larger file is probably a data file given by mistake


def load_recipe(path: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in the file `path` with overrides such as `parallel.cp=4`, `data.train=[a.jsonl, b.jsonl]`.

    Raises ConfigError that lists all mistakes in the file and the overrides.
    """
    return parse_recipe(_read(path), path, overrides)


def parse_recipe(text: str, path: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in `text`.  Errors and origins name its file as `path`.

    parse_recipe("optim: {lr: 1e-5} ...", "a.yaml", ["parallel.cp=4"])
    .config.optim.lr -> 1e-05           .origins["optim.lr"]    -> a.yaml, line 1
    .config.parallel.cp -> 4            .origins["parallel.cp"] -> command line: parallel.cp=4
    """
    document = yaml.read(text, path)
    if not isinstance(document, Pairs):
        raise ConfigError(f"{path}, line 1: not a recipe.  {keys.keys_of('')}")
    draft = Draft(path)
    draft.take("", document, lambda line: Origin("file", file=path, line=line))
    for override in overrides:
        draft.take_override(override)
    draft.take_architecture()
    draft.take_mtp()
    config = draft.validate()
    if config.data.new_tokens:
        from sft.recipe.new_tokens import with_new_rows  # needs the tokenizer

        num_rows, config = config.model.vocab_size, with_new_rows(config)
        if config.model.vocab_size != num_rows:
            draft.origins["model.vocab_size"] = Origin("derived", text="data.add_tokens")
    origins = {key: Origin("default") for key in leaves() if not named(key)} | draft.origins
    for key, (_, source) in derived(config).items():
        if origins[key].kind == "default":
            origins[key] = Origin("derived", text=source)
    return Recipe(config=config, origins=origins, path=path, warnings=tuple(draft.warnings()))


def _read(path: str) -> str:
    file = Path(path)
    try:
        return read_file(file, _MAX_BYTES).decode()
    except UnsafeFileError as error:
        raise ConfigError(
            f"recipe {error}.  A recipe is a file of at most 1 MiB; if the file holds data, name it with "
            "data.train=FILE."
        ) from None
    except FileNotFoundError:
        neighbours = sorted(str(f) for f in file.parent.glob("*.yaml"))
        close = difflib.get_close_matches(path, neighbours, n=1, cutoff=0.5)
        beside = ", ".join(first_few(neighbours)) or "none"
        advice = f"Did you mean {close[0]}?" if close else f"Recipes beside it: {beside}."
        raise ConfigError(f"recipe {path} does not exist.  {advice}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"recipe {path} is not UTF-8 from byte {error.start} on.  Save it as UTF-8.") from None
    except OSError as error:
        raise ConfigError(f"recipe {path} cannot be read: {error.strerror}.") from None
