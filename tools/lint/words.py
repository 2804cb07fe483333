"""Finds retired words, and names the words of docs/glossary.md to use instead.

In sft/, this module also finds docstrings that do not name the thing, and class names that two classes share.

A retired word is found alone and as a part of a name, in upper and lower case.  Names of files on disk and keys of a
recipe are allowed (KEPT).  Words in IN_NAMES are retired in names only; prose may use them.

A docstring begins with a verb or with a noun phrase that names the thing: "The gradient of x, [t, h]" and not "Of x".
"""

import ast
import re
from collections.abc import Iterator

from tools.lint.source import Fault, Source

EVERYWHERE = {
    **dict.fromkeys(("tell", "tells", "told", "telling"), "message, report, say, print, describe or distinguish"),
    **dict.fromkeys(("tally", "tallies"), "accumulator, count"),
    **dict.fromkeys(("ledger", "ledgers"), "row report"),
    **dict.fromkeys(("settle", "settles", "settled"), "what is done: save, wait for, decide"),
    **dict.fromkeys(("ears", "mouth"), "receiving socket, sending socket"),
    "lots": "head groups",
    "slopes": "loss gradients",
    "spared": "best effort",
    "adams": "Adam instances, optimizer offload",
    "verbs": "commands",
    "durable": "atomic",
}
PHRASES = {
    r"(?<!loss )(?<!loss_)(?<!Loss)\bspikes?\b": "loss spike",
    r"\b[Bb]ad (step|loss|gradient|norm|number)s?\b": "non-finite",
    r"\bcopied to the host\b": "copied to pinned host memory, offloaded",
}
IN_NAMES = {
    **dict.fromkeys(("agree", "agreed", "exchange"), "broadcast_from_rank0, all_gather_objects"),
    **dict.fromkeys(("bad",), "nonfinite"),
    **dict.fromkeys(("seen",), "sample_log, or what was visited"),
    **dict.fromkeys(("place", "places"), "position, offset, slice, source or path"),
    **dict.fromkeys(("spares", "spare"), "best_effort"),
    "again": "recompute",
    "ahead": "prefetch",
    "surprise": "entropy coefficient",
    "room": "allocate",
    "feed": "data pipeline",
    "cover": "token spans",
    "said": "assistant text",
    "boxes": "chunks, slices",
}
WHOLE_NAMES = "one found here every some done how what mine theirs given told twice".split()
KEPT = (  # names on disk and keys of a recipe
    r"ledger\.json",
    r"seen\.jsonl",
    r"on_bad_row",
    r"bad_steps/",
    r'"bad_steps"',
    r"\bnum_bad\b",  # in the state in checkpoints
    r"\bbad_in_a_row\b",
    r"feed[-_]forward",
    r"(\.|def )tell\(",  # a method of Python's files
)
KEPT_NAMES = {
    ("sft/config/run.py", "every"),  # log.every
    ("sft/data/cache/omissions.py", "said"),  # in ledger.json and in the JSON of `sft data inspect`
    ("sft/data/inspect/findings.py", "what"),  # in the JSON of `sft data inspect`
}
_ELLIPSIS = re.compile(r"(Of|Those|That of|The same|As|What|By|With|Without|Also|Both of)\b")
_KEPT = re.compile("|".join(KEPT))
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def check(files: list[Source]) -> list[Fault]:
    faults = []
    for file in files:
        is_ours = file.path.startswith(("sft/", "tools/")) or not file.is_python  # tests may keep their own style
        if is_ours:
            faults += [Fault(file.path, number, "word", text) for number, text in [*_in_text(file), *_in_names(file)]]
    return [*faults, *_definitions([file for file in files if file.is_python and file.path.startswith("sft/")])]


def _definitions(modules: list[Source]) -> Iterator[Fault]:
    first: dict[str, str] = {}
    for file in modules:
        for line, text in _ellipses(file.tree):
            yield Fault(file.path, line, "word", text)
        for line, name in _classes(file.tree):
            other = first.setdefault(name, file.path)
            if other != file.path:
                yield Fault(file.path, line, "word", f"class {name} is also in {other}; say what it is of")


def _in_text(file: Source) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(file.lines, 1):
        line = _KEPT.sub(" ", line)
        for word in _WORD.findall(line):
            if instead := EVERYWHERE.get(word.lower()):
                yield number, f'"{word}"; write {instead}'
        for phrase, instead in PHRASES.items():
            if match := re.search(phrase, line):
                yield number, f'"{match[0]}"; write {instead}'


def _in_names(file: Source) -> Iterator[tuple[int, str]]:
    for number, name in _bound(file.tree):
        if (file.path, name) in KEPT_NAMES:
            continue
        if name in WHOLE_NAMES:
            yield number, f"`{name}`; a name is a noun that says what it holds"
        if _KEPT.search(f'"{name}"') or "row" in name:  # rows of data may be called bad
            continue
        for word in _WORD.findall(name):
            if instead := IN_NAMES.get(word.lower()):
                yield number, f"`{name}`; write {instead}"


def _bound(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and name of each definition of a module: functions, classes, parameters, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def _ellipses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if match := _ELLIPSIS.match(ast.get_docstring(node) or ""):
                text = f'docstring begins with "{match[0]}"; begin with a verb, or with a noun for the thing'
                yield node.body[0].lineno, text


def _classes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the name of each public class.  Private classes of two modules may share a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.lineno, node.name
