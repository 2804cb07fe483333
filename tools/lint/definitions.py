"""Finds docstrings of sft/ that do not say what they describe, and class names of sft/ that stand for two classes.

A docstring begins with a verb or with a noun phrase that names the thing: "The gradient of x, [t, h]" and not "Of x".
"""

import ast
import re
from collections.abc import Iterator

from tools.lint.source import Fault, Source

_ELLIPSIS = re.compile(r"(Of|Those|That of|The same|As|What|By|With|Without|Also|Both of)\b")


def check(files: list[Source]) -> list[Fault]:
    modules = [file for file in files if file.is_python and file.path.startswith("sft/")]
    faults = []
    first: dict[str, str] = {}
    for file in modules:
        faults += [Fault(file.path, line, "word", text) for line, text in _ellipses(file.tree)]
        for line, name in _classes(file.tree):
            other = first.setdefault(name, file.path)
            if other != file.path:
                faults.append(Fault(file.path, line, "word", f"class {name} is also in {other}; say what it is of"))
    return faults


def _ellipses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if match := _ELLIPSIS.match(ast.get_docstring(node) or ""):
                text = f'docstring begins with "{match[0]}"; begin with a verb, or with a noun for the thing'
                yield node.body[0].lineno, text


def _classes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each class that is not private; a private name means something in its own module only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.lineno, node.name
