"""Makes mutants: copies of a file of sft/ with one small change of the syntax tree.

    compare     <  becomes <=, ==  becomes !=, in becomes not in ...
    arithmetic  +  becomes -, *  becomes +, // becomes * ...
    condition   if test becomes if not test; and becomes or
    constant    a number becomes one more; True becomes False
    statement   a call, a raise or an augmented assignment is left out
    result      return value becomes return None

When the changed function of a mutant is called, the mutant writes a line into a file.  If a test passes without this
line, the test did not execute the change, so its result says nothing about the mutant.
"""

import ast
import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
_REACHED = "open({path!r}, 'a').write('called\\n')"
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """One change.  `number` counts the changes of a file in the order of its syntax tree."""

    file: str
    number: int
    line: int
    function: str
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.before}  ->  {self.after}"


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All mutants of a file."""
    return [
        Mutant(file, number, getattr(node, "lineno", 0), function.name, _short(node), _short(changed))
        for number, (function, node, changed) in enumerate(_changes(ast.parse(source)))
    ]


def apply(mutant: Mutant, source: str, reached: Path) -> str:
    """The source of a mutant, which appends a line to the file `reached` when the changed function is called."""
    tree = ast.parse(source)
    function, node, changed = list(_changes(tree))[mutant.number]
    _Replace(node, changed).visit(function)
    start = 1 if ast.get_docstring(function, clean=False) is not None else 0
    function.body.insert(start, ast.parse(_REACHED.format(path=str(reached))).body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


def draw(sources: dict[str, str], seed: str) -> Iterator[Mutant]:
    """Mutants of random files, without end while any is left.  Every file is as likely, however long it is."""
    generator = random.Random(seed)
    left = {file: mutants_of(file, source) for file, source in sorted(sources.items())}
    while left := {file: mutants for file, mutants in left.items() if mutants}:
        mutants = left[generator.choice(list(left))]
        yield mutants.pop(generator.randrange(len(mutants)))


class _Replace(ast.NodeTransformer):
    def __init__(self, node: ast.AST, changed: ast.AST) -> None:
        self.node, self.changed = node, changed

    def visit(self, node: ast.AST) -> ast.AST:
        return self.changed if node is self.node else self.generic_visit(node)


def _changes(tree: ast.AST) -> Iterator[tuple[_Function, ast.AST, ast.AST]]:
    """Each change: the innermost function around it, the node, and what takes its position."""
    for function in ast.walk(tree):
        if isinstance(function, _Function):
            for statement in function.body[1 if ast.get_docstring(function) is not None else 0 :]:
                for node in _own_nodes(statement):
                    for changed in _changed(node):
                        yield function, node, changed


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """A node and the nodes below it, without functions, annotations and what only writes a message."""
    if isinstance(node, _Function | ast.ClassDef | ast.JoinedStr | ast.Assert):
        return
    yield node
    if isinstance(node, ast.Raise):  # its message is no behaviour that every test must hold
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "format_spec"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _own_nodes(child)


def _changed(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARE:
            yield _with(node, ops=[_COMPARE[type(operator)]()])
        case ast.BinOp(op=operator, left=left, right=right) if type(operator) in _ARITHMETIC:
            if not any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (left, right)):
                yield _with(node, op=_ARITHMETIC[type(operator)]())
        case ast.BoolOp(op=ast.And()):
            yield _with(node, op=ast.Or())
        case ast.BoolOp(op=ast.Or()):
            yield _with(node, op=ast.And())
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield _with(node, test=ast.UnaryOp(op=ast.Not(), operand=test))
        case ast.Constant(value=bool(value)):
            yield ast.Constant(value=not value)
        case ast.Constant(value=int(value)) if abs(value) <= 1024:
            yield ast.Constant(value=value + 1)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
            yield ast.Pass()
        case ast.Return(value=value) if value is not None and not _is_none(value):
            yield ast.Return(value=ast.Constant(value=None))


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _short(node: ast.AST) -> str:
    """The first line of a node's text, at most 60 characters."""
    text = ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).splitlines()[0]
    return text if len(text) <= 60 else f"{text[:57]}..."


def nearest_tests(file: str, imports: dict[str, set[str]], tests: Sequence[str]) -> list[str]:
    """Test files that import a file of sft/, the nearest first: directly, then by one more file, and so on.

    imports  for each file, the files of the repository that it imports
    """
    distance, near = {file: 0}, [file]
    while near:
        near = [other for other, imported in imports.items() if other not in distance and imported & {*near}]
        distance |= {other: max(distance.values()) + 1 for other in near}
    stem = Path(file).stem
    reaching = [test for test in tests if test in distance]
    return sorted(reaching, key=lambda test: (distance[test], stem not in test, len(imports[test]), test))
