"""Collects the names in our code, with which the names in prose are compared.

`Names.uses` has every name that occurs.  A `Scope` has the names that one module, package or class defines, so that a
dotted name in prose is looked for only in the module or class that it names.
"""

import ast
import builtins
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tools.lint.source import Source

# Names from other software and from files of users.
FOREIGN = """GraceTime KillWait PreemptMode JobRequeue PreemptParameters TransformerConfig ParallelDims
HybridDeviceOptimizer _extra_state _communicate_shapes lm_head.weight Dataset.save_to_disk""".split()
_OURS = {"", "sft", "tests", "tools"}
# Base classes that give a class no attribute that prose names.
_PLAIN_BASES = "object ABC Enum Generic NamedTuple Protocol Exception RuntimeError ValueError".split()


@dataclass
class Scope:
    """The names that a module, a package or a class defines.

    inner  the scopes of the modules and classes among these names
    bases  the names of the base classes, if the scope is a class; a name of a base class is also one of the class
    """

    names: set[str] = field(default_factory=set)
    inner: dict[str, "Scope"] = field(default_factory=dict)
    bases: list[str] = field(default_factory=list)


@dataclass
class Names:
    """Names in our code: `uses` holds all of them, `scopes` the modules, packages and classes of each name."""

    uses: set[str] = field(default_factory=lambda: {*dir(builtins), *FOREIGN})
    imported: set[str] = field(default_factory=set)  # imported names and packages
    foreign: set[str] = field(default_factory=set)  # packages of other software
    scopes: dict[str, list[Scope]] = field(default_factory=dict)
    tests: dict[str, list[Scope]] = field(default_factory=dict)  # scopes of tests/; only prose of tests may name them
    local: dict[str, set[str]] = field(default_factory=dict)  # path of a module -> its parameters and variables
    _modules: dict[str, Scope] = field(default_factory=dict)  # path of a module or package, without .py -> its scope

    @classmethod
    def of(cls, files: list[Source]) -> "Names":
        names = cls()
        for file in files:
            if file.is_python:
                names._add_module(file)
        return names

    def has(self, dotted: str, *, in_tests: bool) -> bool:
        """Whether each part of `dotted` is defined in the scope that the parts before it name.

        `batch.Microbatch.tokens`: the module batch defines a class Microbatch, which defines a field tokens.  A class
        with a base class of other software may have any name.
        """
        first, *rest = dotted.split(".")
        return any(self._has(scope, rest) for scope in self._scopes_of(first, in_tests=in_tests))

    def has_scope(self, name: str, *, in_tests: bool) -> bool:
        return bool(self._scopes_of(name, in_tests=in_tests))

    def _scopes_of(self, name: str, *, in_tests: bool) -> list[Scope]:
        return [*self.scopes.get(name, ()), *(self.tests.get(name, ()) if in_tests else ())]

    def _has(self, scope: Scope, rest: list[str]) -> bool:
        if not rest:
            return True
        name, *further = rest
        if name in scope.inner:
            return self._has(scope.inner[name], further)
        if name in scope.names:
            return True  # attributes of a value have no scope
        named = [base for base in scope.bases if base not in _PLAIN_BASES]
        bases = [[other for other in self._scopes_of(base, in_tests=True) if other is not scope] for base in named]
        return any(not known or any(self._has(other, rest) for other in known) for known in bases)

    def _add_module(self, file: Source) -> None:
        path = file.path.removesuffix(".py").removesuffix("/__init__")
        is_package = file.path.endswith("/__init__.py")
        module = self._module(path)
        _fill(module, file.tree.body, with_imports=is_package)
        self.local[file.path] = set(_variables(file.tree))
        self.uses |= {*_identifiers(file.tree), path.rpartition("/")[2]}
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ClassDef):
                self._register(node.name, _class(node), file.path)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self.imported |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [n.name for n in node.names]
                self.foreign |= {name.split(".")[0] for name in modules} - _OURS

    def _module(self, path: str) -> Scope:
        """The scope of a module or package.  Makes it, and the scopes of the packages around it, if they are new."""
        if path not in self._modules:
            self._modules[path] = scope = Scope()
            parent, _, name = path.rpartition("/")
            self._register(name, scope, path)
            if parent:
                self._module(parent).inner[name] = scope
        return self._modules[path]

    def _register(self, name: str, scope: Scope, path: str) -> None:
        (self.tests if path.startswith("tests") else self.scopes).setdefault(name, []).append(scope)


def _class(node: ast.ClassDef) -> Scope:
    scope = Scope(bases=[ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases])
    _fill(scope, node.body, with_imports=False)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and ast.unparse(inner.value) in ("self", "cls", "ctx"):
            scope.names.add(inner.attr)
    return scope


def _fill(scope: Scope, body: Iterable[ast.stmt], *, with_imports: bool) -> None:
    """Adds the names that the statements define, also those inside of if, try and with."""
    for node in body:
        match node:
            case ast.ClassDef(name=name):
                scope.inner[name] = _class(node)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                scope.names.add(name)
            case ast.Import() | ast.ImportFrom():
                scope.names |= {alias.asname or alias.name for alias in node.names} if with_imports else set()
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                scope.names |= {
                    inner.id
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
                }
            case ast.If() | ast.Try() | ast.With() | ast.For():
                inner = [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
                _fill(scope, inner, with_imports=with_imports)


def _variables(tree: ast.AST) -> Iterator[str]:
    """The names of parameters and variables.  Prose of the module may name their attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name


def _identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.alias(name=name, asname=short):
                yield from (short or name).split(".")
