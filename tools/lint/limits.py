"""Checks limits of length.  A function that exceeds its limit should be split by concepts, not compressed."""

import ast
from collections.abc import Iterator

from tools.lint.source import Fault, Source

FUNCTION_LINES = 60
PARAMETERS = 8  # of a function, without self and cls; Triton kernels may have more
FILE_LINES = 320  # of a file in sft/; other files have no limit
METHODS = 16
COLUMNS = 120
TOP_ENTRIES = 27  # files and folders directly in sft/


def check(files: list[Source]) -> list[Fault]:
    faults = []
    for file in files:
        is_ours = file.path.startswith(("sft/", "tools/"))
        checks = [*_columns(file), *(_definitions(file) if is_ours else ()), *_length(file)]
        faults += [Fault(file.path, line, "limit", text) for line, text in checks]
    entries = {file.path.split("/")[1] for file in files if file.path.startswith("sft/")}
    if len(entries) > TOP_ENTRIES:
        faults.append(Fault("sft/__init__.py", 1, "limit", f"{len(entries)} entries in sft/; at most {TOP_ENTRIES}"))
    return faults


def _columns(file: Source) -> Iterator[tuple[int, str]]:
    """Lines of Markdown pages that are too long; flake8 checks Python files."""
    for number, line in enumerate(file.lines, 1):
        if not file.is_python and len(line) > COLUMNS:
            yield number, f"{len(line)} columns; at most {COLUMNS}"


def _length(file: Source) -> Iterator[tuple[int, str]]:
    if file.path.startswith("sft/") and len(file.lines) > FILE_LINES:
        yield 1, f"{len(file.lines)} lines; at most {FILE_LINES}"


def _definitions(file: Source) -> Iterator[tuple[int, str]]:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(child, ast.FunctionDef) for child in node.body)
            if methods > METHODS:
                yield node.lineno, f"class {node.name} has {methods} methods; at most {METHODS}"
        elif isinstance(node, ast.FunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield node.lineno, f"{node.name}() has {lines} lines; at most {FUNCTION_LINES}"
            parameters = _parameters(node)
            if len(parameters) > PARAMETERS and not _is_kernel(node):
                yield node.lineno, f"{node.name}() has {len(parameters)} parameters; at most {PARAMETERS}"


def _parameters(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for i, name in enumerate(names) if i > 0 or name not in ("self", "cls")]


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)
