"""Counts the work of tokenising rows: the template's apart from the tokenizer's.

Decides what counts as the template's work: all renderings of chats and of prompts.  Results that are written again
(`template/replay.py`) take time, but their characters count once.  Masks and trees are the work of neither.
Seconds are processor time of the process that makes a part, so other programs on the machine hardly change them.
`cache/workers.py` counts the work of a part, and `cache/prepare.py` adds up parts.
"""

import time
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of tokenising some rows, summed over processes.

    template_s   seconds in which the chat template rendered texts
    tokenizer_s  seconds in which the tokenizer made tokens of texts
    characters   characters that statements of the template wrote
    """

    template_s: float = 0.0
    tokenizer_s: float = 0.0
    characters: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            template_s=self.template_s + other.template_s,
            tokenizer_s=self.tokenizer_s + other.tokenizer_s,
            characters=self.characters + other.characters,
        )

    def since(self, before: "Work") -> "Work":
        """The work that was added to `before`."""
        negative = Work(template_s=-before.template_s, tokenizer_s=-before.tokenizer_s, characters=-before.characters)
        return self + negative

    def __str__(self) -> str:
        """template 1.2 s for 1,840,201 characters, tokenizer 0.9 s, summed over processes"""
        return (
            f"template {self.template_s:.1f} s for {self.characters:,} characters, tokenizer {self.tokenizer_s:.1f} s, "
            "summed over processes"
        )


class Meter:
    """Adds up the seconds and the characters of calls: `with meter: ...`."""

    def __init__(self) -> None:
        self.seconds, self.characters = 0.0, 0

    def __enter__(self) -> "Meter":
        self._started = time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.process_time() - self._started
