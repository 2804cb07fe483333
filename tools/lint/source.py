"""Reads a file for the checks: its lines, its syntax tree, and its prose."""

import ast
import io
import tokenize
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Fault:
    """A fault that a check found.  As text: `docs/start/data.md:12: limit: 130 columns; at most 120`."""

    path: str
    line: int
    kind: Literal["word", "reference", "limit"]
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {self.text}"


@dataclass(frozen=True)
class Source:
    """One file of the repository."""

    path: str
    text: str

    @classmethod
    def read(cls, root: Path, path: str) -> "Source":
        return cls(path, (root / path).read_text(encoding="utf-8"))

    @property
    def is_python(self) -> bool:
        return self.path.endswith(".py")

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text) if self.is_python else ast.Module(body=[], type_ignores=[])

    @cached_property
    def prose(self) -> list[tuple[int, str]]:
        """Line numbers and lines of the prose: a page without code blocks, or comments and docstrings of a module."""
        if self.is_python:
            return sorted([*self._comments(), *self._docstrings()])
        prose, is_code = [], False
        for number, line in enumerate(self.lines, 1):
            if line.lstrip().startswith("```"):
                is_code = not is_code
            elif not is_code:
                prose.append((number, line))
        return prose

    def _comments(self) -> list[tuple[int, str]]:
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]

    def _docstrings(self) -> list[tuple[int, str]]:
        """Line numbers and lines of strings that are statements: docstrings of modules, classes, functions, fields."""
        statements = (node.value for node in ast.walk(self.tree) if isinstance(node, ast.Expr))
        strings = [node for node in statements if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        return [
            (number, self.lines[number - 1])
            for node in strings
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        ]
