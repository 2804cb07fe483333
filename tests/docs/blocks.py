"""The code blocks of a page, and how each one is checked.

```bash ```python ```yaml ```json     run, or read as a recipe or JSON
<!-- not run: gpu -->                 on the line before a block: only parsed, for one of the REASONS
<!-- folder: tiny -->                 anywhere on a page: its folder holds models/tiny, chats.jsonl and recipe.yaml
```text                               what a program prints, or how a command is written: not checked
"""

import re
from dataclasses import dataclass

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
TINY = "<!-- folder: tiny -->"


@dataclass(frozen=True)
class Block:
    """A block of a page; `reason` says why it is not run, "" if it is run."""

    line: int
    language: str
    text: str
    reason: str


def blocks(page: str) -> list[Block]:
    """The blocks of LANGUAGES.  A mark with no block after it, or an unknown reason, is a ValueError."""
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
