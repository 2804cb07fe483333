"""Collects the names in our code, with which the names in prose are compared."""

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass, field

from tools.lint.source import Source

# Names from other software and from files of users.
FOREIGN = """GraceTime KillWait PreemptMode JobRequeue PreemptParameters TransformerConfig ParallelDims
HybridDeviceOptimizer _extra_state _communicate_shapes lm_head.weight Dataset.save_to_disk""".split()


@dataclass
class Names:
    """Names in our code: `uses` holds all names, `attributes` the names inside each module, package and class."""

    uses: set[str] = field(default_factory=lambda: {*dir(builtins), *FOREIGN})
    imported: set[str] = field(default_factory=set)  # imported names and packages
    attributes: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, files: list[Source]) -> "Names":
        names = cls()
        for file in files:
            if file.is_python:
                names._add_module(file)
        return names

    def _add_module(self, file: Source) -> None:
        *packages, name = file.path.removesuffix(".py").split("/")
        for package, child in zip(packages, [*packages[1:], name], strict=True):
            self.attributes.setdefault(package, set()).add(child)
        module = self.attributes.setdefault(packages[-1] if name == "__init__" and packages else name, set())
        module |= set(_identifiers(file.tree))
        self.uses |= module | {name}
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ClassDef):
                self.attributes.setdefault(node.name, set()).update(_identifiers(node))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self.imported |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
                self.imported |= set((getattr(node, "module", None) or "").split(".")[:1])


def _identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.alias(name=name, asname=short):
                yield from (short or name).split(".")
