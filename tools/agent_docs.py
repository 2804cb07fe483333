"""Makes docs/llms.txt, an index of the site, and skills/sft/SKILL.md, from the pages, the recipes and the keys.

llms.txt has the form of llmstxt.org; an assistant loads SKILL.md before it writes a recipe.  tools/pages.py writes
both.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sft import cli
from sft.config.keys import expected, leaves, named
from sft.config.yaml import write
from tools import cli_docs, config_docs

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SUMMARY = "Megatron-native supervised fine-tuning of language models on documents of 32K to 1M tokens."


class Example(NamedTuple):
    """A recipe of the skill.  It fits on `gpus` GPUs; `page`: the page whose first YAML block is merged into it."""

    title: str
    recipe: str
    gpus: int
    page: str = ""


EXAMPLES = (
    Example("All weights", "qwen3_8b_64k", 8),
    Example("Adapters (LoRA)", "qwen3_8b_128k_lora", 8),
    Example("Experts", "qwen3_30b_a3b_64k", 16),
    Example("Packs on the number of ranks that they need", "llama31_8b_128k_dynamic_cp", 16),
    Example("On a CPU, without a model of the hub", "demo", 2),
    Example("Several sources with shares", "qwen3_8b_64k", 8, "concepts/mixtures.md"),
    Example("Datasets by name", "qwen3_8b_64k", 8, "start/data.md"),
    Example("Learning from a teacher's distributions", "qwen3_8b_64k", 8, "concepts/distill.md"),
    Example("Memory and time of chosen steps", "qwen3_8b_64k", 8, "how-to/profiling.md"),
)
# Keys of the model that a recipe with model.hf may need; config.json gives all others.
_OF_MODEL = """model.hf model.init_from model.base_dtype model.moe.aux_loss_coef model.rope.scaling model.rope.factor
model.rope.original_max_position""".split()

_SKILL = """\
---
name: sft
description: >-
  Writes, checks and launches recipes of sft, which fine-tunes language models on long documents with Megatron and
  context parallelism. Use it for every YAML recipe of sft, and for every command that begins with sft.
---

# Recipes of sft

tools/agent_docs.py made this file from the documentation, the recipes and the code of one version of sft.

## Work in this order

1. Take the nearest example below. For another model, length or number of GPUs, let the planner write the recipe:
   `sft plan --model org/name --gpus 16 --gpu h100 --seq-length 131072 --write recipe.yaml`.
2. Run `sft check recipe.yaml --world-size 16 --gpu h100 --no-data` until the exit code is 0. An error lists every
   mistake with its line and a value that would work. Then run it without `--no-data`.
3. Run `sft data prepare recipe.yaml`, then `sft train recipe.yaml --processes 8`, or on several machines
   what `sft launch kubernetes recipe.yaml --gpus 16` prints; also for `skypilot`, `ssh` and `slurm`.
4. `sft status recipe.yaml` says how the run ended: exit code 0 done, 75 start it again, 2 find the cause first.

## Rules

- `model.hf` gives sizes, weights, tokenizer and chat template. Do not write keys of the model that its config.json has.
- The number of processes is `parallel.tp * cp * pp * dp`; `dp` has no key. `train.global_batch_size` counts packs and
  is a multiple of dp. `data.doc_multiple` is divisible by 2 * cp.
- A document is at most `data.seq_length` tokens. Beyond the length of the model, set `model.rope`.
- YAML 1.2: `1e-5` is a number; `no`, `on` and `010` are text. There are no anchors and no tags.
- Any key can be set after the recipe on the command line: `parallel.cp=4 data.train=[a.jsonl,b.jsonl]`.
- Do not guess a key. `sft check recipe.yaml --explain optim.lr` explains one, `sft schema` prints all as JSON Schema.

## Rows of data

A row is one JSON object per line, in one of these formats; the first is the usual one:

"""


def llms_text(before: str) -> str:
    """docs/llms.txt: the pages of the site by group, each with its first sentence.  `before` is not read."""
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=_Loader)["nav"]
    lines = ["# sft", "", f"> {SUMMARY}", ""]
    lines += [_entry("Skill", "../skills/sft/SKILL.md", "Everything that an assistant needs to write a right recipe.")]
    own: list[str] = []
    for group in nav:
        for title, pages in group.items() if isinstance(group, dict) else ():
            if isinstance(pages, str):
                own.append(_page_entry(title, pages))
                continue
            lines += ["", f"## {title}", ""]
            lines += [_page_entry(*_named(page)) for page in _flat(pages)]
    return "\n".join([*lines, "", "## Optional", "", *own, ""])


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name functions of Python, which are left out."""


_Loader.add_multi_constructor("", lambda loader, suffix, node: None)


def _flat(pages: list[Any]) -> Iterator[Any]:
    """The pages of a group, also those of the groups in it."""
    for page in pages:
        inner = next(iter(page.values())) if isinstance(page, dict) else page
        yield from _flat(inner) if isinstance(inner, list) else (page,)


def _named(page: Any) -> tuple[str, str]:
    return next(iter(page.items())) if isinstance(page, dict) else ("Overview", page)


def _page_entry(title: str, page: str) -> str:
    return _entry(title, page, _first_sentence((DOCS / page).read_text(encoding="utf-8")))


def _entry(title: str, page: str, about: str) -> str:
    return f"- [{title}]({page}): {about}"


def _first_sentence(page: str) -> str:
    """The first sentence below the heading, without links: "See [a](b.md). More." -> See a."""
    text = re.sub(r"```.*?```|<!--.*?-->|^[#!|].*?$", "", page, flags=re.DOTALL | re.MULTILINE)
    paragraph = " ".join(_unlinked(text).replace("**", "").strip().split("\n\n")[0].split())
    sentence = re.split(r"(?<=[a-z`)][.?:]) (?=[A-Z`])", paragraph)[0]
    return f"{sentence[:-1]}." if sentence.endswith(":") else sentence


def _unlinked(text: str) -> str:
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def skill(before: str) -> str:
    """skills/sft/SKILL.md.  `before` is not read."""
    formats = (DOCS / "start/data.md").read_text(encoding="utf-8").partition("\n## Row formats\n")[2]
    rows = formats.strip().partition("\n\n")[0]
    parts = [_SKILL, _unlinked(rows), "\n\n## Examples\n"]
    parts += [text for example in EXAMPLES for text in _example(example)]
    parts += ["\n## Keys\n\nWithout keys of the model, which `model.hf` gives.\n\n```text\n", *_keys(), "```\n"]
    parts += ["\n## Commands\n\n```text\n", *_commands(), "```\n"]
    return "".join(parts)


def _example(example: Example) -> Iterator[str]:
    path = ROOT / "recipes" / f"{example.recipe}.yaml"
    yield f"\n### {example.title}\n\n"
    if example.page:
        yield f"Merge these keys into recipes/{path.name}:\n\n```yaml\n{first_block(example.page)}```\n"
    else:
        text = re.sub(r"\A(#.*\n)+\n*", "", path.read_text(encoding="utf-8"))
        ranks = f"{example.gpus} {'processes' if 'device: cpu' in text else 'GPUs'}"
        yield f"recipes/{path.name}, for {ranks}:\n\n```yaml\n{text}```\n"


def first_block(page: str) -> str:
    """The first YAML block of a page."""
    return re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)[0]


def _keys() -> Iterator[str]:
    for key, info in leaves().items():
        if (not key.startswith("model.") or key in _OF_MODEL) and not named(key):
            default = "required" if info.is_required() else f"default {write(info.default)}"
            line = f"{key}: {config_docs.short(expected(key))}; {default}"
            yield textwrap.fill(line, 118, subsequent_indent="  ", break_on_hyphens=False) + "\n"


def _commands() -> Iterator[str]:
    for name, about, _ in cli_docs.commands(cli.whole_parser()):
        yield f"sft {name}: {about}\n"
