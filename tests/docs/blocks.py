"""Finds the code blocks of a page, and checks each block.

```bash ```python ```yaml ```json     run, or read as a recipe or JSON
<!-- not run: gpu -->                 on the line before a block: only parsed, for one of the REASONS
<!-- folder: tiny -->                 anywhere on a page: its folder holds models/tiny, chats.jsonl and recipe.yaml
```text                               what a program prints, or how a command is written: not checked
"""

import ast
import importlib.util
import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sft.cli import _parse
from sft.config.keys import OPEN, in_schema, is_source, leaves, sections

ROOT = Path(__file__).resolve().parents[2]
REASONS = {
    "gpu": "needs GPUs",
    "cluster": "needs SLURM or several machines",
    "hub": "needs the Hugging Face hub",
    "packages": "installs packages",
    "minutes": "takes minutes",
    "files": "needs files or runs of the reader",
    "part": "a part of a recipe or of a program",
}
LANGUAGES = ("bash", "python", "yaml", "json")
_FENCE = re.compile(r"^( *)```(\w*)(.*)$")
_MARK = re.compile(r"^ *<!-- not run: (\w+) -->$")
FOREIGN = """git cd source export mkdir tar docker apt python3 pip hf vllm lm-eval enroot apptainer rsync cat pip squeue
scontrol scancel pytest env ls head tail shuf grep cp kubectl sky bash""".split()
_HERE = re.compile(r"<<'?(\w+)'?\n.*?^\1$", re.MULTILINE | re.DOTALL)
TINY = "<!-- folder: tiny -->"


@dataclass(frozen=True)
class Block:
    """A block of a page; `reason` says why the block is not run, and is "" if it is run."""

    line: int
    language: str
    text: str
    reason: str


def blocks(page: str) -> list[Block]:
    """The blocks in the languages of LANGUAGES.  Raises ValueError for a mark without a block after it, and for an
    unknown reason."""
    found: list[Block] = []
    lines = page.split("\n")
    number = 0
    while number < len(lines):
        mark, fence = _MARK.match(lines[number]), _FENCE.match(lines[number])
        if mark and (mark[1] not in REASONS or not _FENCE.match(lines[number + 1])):
            raise ValueError(f"line {number + 1}: {mark[0]} names none of {', '.join(REASONS)}, or no block follows")
        if fence:
            end = next(n for n in range(number + 1, len(lines)) if lines[n].strip() == "```")
            before = _MARK.match(lines[number - 1]) if number else None
            text = "\n".join(line.removeprefix(fence[1]) for line in lines[number + 1 : end])
            if fence[2] in LANGUAGES:
                found.append(Block(number + 2, fence[2], text, before[1] if before else ""))
            elif fence[2] != "text":
                raise ValueError(
                    f"line {number + 1}: a block of {fence[2] or 'no language'}; of text, if nobody runs it"
                )
            number = end
        number += 1
    return found


def check(block: Block) -> None:
    """Raises ValueError, ConfigError or SyntaxError if a reader could not run the block."""
    if block.language == "python":
        ast.parse(block.text)
    elif block.language == "json":
        json.loads(block.text)
    elif block.language == "yaml":
        for key in _keys(yaml.safe_load(block.text), ""):
            check_key(key)
    else:
        syntax = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
        if syntax.returncode:
            raise ValueError(syntax.stderr)
        for words in commands(block.text):
            check_command(words)


def commands(script: str) -> Iterator[list[str]]:
    """The commands of a script, without comments, here documents, leading assignments and pipes."""
    for line in _substituted(_HERE.sub("", script)).replace("\\\n", "").split("\n"):
        words = shlex.split(line, comments=True)
        for part in " ".join(map(shlex.quote, words)).split(" '&&' "):
            command = shlex.split(part)
            while command and re.match(r"\w+=", command[0]):
                command = command[1:]
            if command:
                yield command


def _substituted(script: str) -> str:
    """`a=$(b (c) d)/e` -> `a=X/e`"""
    while (start := script.find("$(")) >= 0:
        depth, end = 1, start + 2
        while depth:
            depth += {"(": 1, ")": -1}.get(script[end], 0)
            end += 1
        script = f"{script[:start]}X{script[end:]}"
    return script


def check_command(words: list[str]) -> None:
    name, *rest = words
    name = name.removeprefix("env/bin/")
    if name in ("srun", "sbatch", "torchrun") or name == "python":
        words = rest
        if "sft" in rest and rest[rest.index("sft") - 1] == "-m":
            check_sft(rest[rest.index("sft") + 1 :])
        elif name == "python" and rest[:1] == ["-m"] and rest[1] != "pip":
            if importlib.util.find_spec(rest[1]) is None:
                raise ValueError(f"python -m {rest[1]}: there is no such module")
        elif name == "torchrun":
            raise ValueError(f"{' '.join(words)}: no -m sft")
        elif name in ("srun", "sbatch") and not any(word.startswith("launch/") for word in rest):
            raise ValueError(f"{' '.join(words)}: nothing of launch/")
    elif name == "sft":
        check_sft(rest)
    elif name == "make":
        for target in (word for word in rest if "=" not in word):
            if not re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE):
                raise ValueError(f"make {target}: there is no such target")
    elif name not in FOREIGN and not name.startswith("launch/"):
        raise ValueError(f"unknown command {name}")
    for word in words:
        if word.startswith(("recipes/", "launch/", "tools/")) and "NAME" not in word and not (ROOT / word).exists():
            raise ValueError(f"{word} does not exist")


def check_sft(words: list[str]) -> None:
    """Checks the arguments of one sft command, and the keys of its overrides."""
    arguments = _parse(words)
    for override in getattr(arguments, "overrides", []):
        check_key(override.partition("=")[0])


def check_key(key: str) -> None:
    is_group = key in sections() or is_source(key) or key.startswith((f"{OPEN}.", "data."))
    if in_schema(key) not in leaves() and not is_group:
        raise ValueError(f"{key} is no key of a recipe")


def _keys(tree: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """The dotted names of the leaves of a recipe, and of the groups that contain these leaves."""
    for name, value in tree.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict) and f"{prefix}{name}" not in leaves():
            yield from _keys(value, f"{prefix}{name}.")
