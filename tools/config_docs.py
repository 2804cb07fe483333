"""Makes docs/reference/config.md, the page of all keys, from the models in sft/config/; tools/pages.py writes it."""

import re
import textwrap
from collections.abc import Iterator

from sft.config import Config
from sft.config.keys import NAMED, OPEN, RENAMED, expected, leaves, named, sections
from sft.config.megatron_fields import ALLOWED, VERSIONS, in_words
from sft.config.yaml import write

# Phrases of `expected`, which is for error messages, and their short forms on the page.
_SHORT = (
    (r"a whole number(?= of| above| below| or|$)", "integer"),
    (r"a number(?= of| above| below| or|$)", "number"),
    (r" of at least (\S+?)(?:\.0)?(?=[ ,]|$)", r" >= \1"),
    (r" of at most ([\d,]*\d)(?:\.0)?", r" <= \1"),
    (r" above (\S+?)(?:\.0)?(?=[ ,]|$)", r" > \1"),
    (r" below (\S+?)(?:\.0)?(?=[ ,]|$)", r" < \1"),
    (r"a list of such", "list"),
    (r"a list of (name|path)s", "list"),
    (r"a (name|path)\b", r"\1"),
    (r"non-empty text", "text"),
    (r"one of ", ""),
)

# Keys of `model` that a recipe with `model.hf` may set; the others describe the layers of the model.
BESIDE_HF = """model.hf model.hf_read_once model.base_dtype model.init_from model.megatron model.init_std
model.rope.base model.rope.scaling model.rope.factor model.rope.original_max_position model.moe.aux_loss_coef
model.moe.z_loss_coef model.moe.capacity_factor model.moe.bias_update_rate""".split()

INTRODUCTION = """# Recipe keys

A recipe is a YAML file with the groups of keys below.  The command line overrides the file: `parallel.cp=4`,
`data.train=[a.jsonl, b.jsonl]`, `optim.warmup_steps=null`.  Unknown keys, wrong types and conflicting values are
errors, reported all at once.  `null` means no value.  `no`, `on` and `010` are text.  Duplicate keys, anchors and tags
are errors.  Paths are relative to the current directory.

`sft check RECIPE --explain KEY` shows the meaning of a key and where its value came from.  An editor completes keys
with a JSON Schema: `sft schema > recipe.schema.json`, and the first line of a recipe is
`# yaml-language-server: $schema=recipe.schema.json`.  An assistant writes a recipe with
[the skill](../../skills/sft/SKILL.md).  recipe.yaml in the run folder contains every value of the run.

`sft check RECIPE` refuses the recipes that training would refuse.  These errors show only when the run starts: a folder
that another run has locked, a full disk, missing GPUs or packages, nodes with other versions or data than the first,
damaged files, and a tracker that does not start.

tools/config_docs.py generates this page.  An item has the key, its values, its default and its meaning.  A key whose
only values are true and false has the default only.
"""


def page(before: str) -> str:
    """The whole page; `before` is not read."""
    parts = [INTRODUCTION]
    for group in sections():
        keys = [key for key in leaves() if _group(key) == group]
        parts.append(f"\n## {group}\n\n{_purpose(group)}\n\n")
        parts += [_item(key) for key in keys if not _is_of_architecture(key)]
        parts += _names([key for key in keys if _is_of_architecture(key)])
    return "".join([*parts, _renamed()])


def _group(key: str) -> str:
    """The heading under which the page lists a key: data.train.NAME.weight -> data"""
    name = named(key)
    return (key if name is None else NAMED).rpartition(".")[0]


def _is_of_architecture(key: str) -> bool:
    """Whether the key describes the layers of a model, so that `model.hf` sets it."""
    return key.startswith("model.") and key not in BESIDE_HF


def _names(keys: list[str]) -> Iterator[str]:
    """One item for keys whose meaning only `sft explain` prints."""
    if keys:
        shown = ", ".join(f"`{key.rpartition('.')[2]}`" for key in keys)
        yield _folded(f"Set by `model.hf` (`sft explain {keys[0]}` says what a key means): {shown}.", "- ")


def _purpose(group: str) -> str:
    fields = Config.model_fields
    *above, name = group.split(".")
    for part in above:
        fields = sections()[part].model_fields
    return fields[name].description or ""


def _item(key: str) -> str:
    """A list item: key, values, default and meaning."""
    info, values = leaves()[key], short(expected(key))
    default = "required" if info.is_required() else f"default `{'{}' if key == OPEN else write(info.default)}`"
    if info.default is None and values.endswith(" or null"):
        values = f"{values} (default)"
    elif not isinstance(info.default, bool):
        values = f"{values}; {default}"
    else:
        values = default
    lines = [(f"`{key}`: {values}.  {info.description or ''}", "- ")]
    if key == OPEN:
        lines += [(text, "  - ") for text in _megatron_fields()]
    return "".join(_folded(text, indent) for text, indent in lines)


def _folded(text: str, indent: str) -> str:
    wide = textwrap.TextWrapper(120, indent, " " * len(indent), break_on_hyphens=False, break_long_words=False)
    return wide.fill(text.replace(".  ", ". ")) + "\n"


def short(words: str) -> str:
    """The values of a key in fewer words: `a whole number of at least 1 or null` -> `integer >= 1 or null`."""
    for pattern, replacement in _SHORT:
        words = re.sub(pattern, replacement, words)
    return words


def _megatron_fields() -> list[str]:
    """One sentence for each field that model.megatron may set, with the supported versions of megatron-core."""
    versions = " and ".join(VERSIONS)
    return [
        f"`{name}`: {in_words(entry)}; megatron-core {versions}.  {entry.meaning}" for name, entry in ALLOWED.items()
    ]


def _renamed() -> str:
    names = "".join(f"- `{old}` is now `{new}`\n" for old, new in RENAMED.items())
    rule = "Old names still work, with a warning.  The old and the new name together are refused."
    return f"\n## Old names\n\n{rule}\n\n{names}"
