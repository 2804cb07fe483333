"""Compiles the statements of a template whose results may be kept, with calls of the sandbox before and after them.

    for m in environment.begin_loop(0, messages, names, changes, ...):      a loop
        if environment.repeats(0, m, changes, lambda: keys, loop): continue
        ...
        environment.end_statement()
    if not environment.repeats(1, None, (), lambda: keys, None, names):     a text
        yield ...
        environment.end_statement()

`iterations.py` finds the statements and what they read, and `replay.py` has the methods.
"""

from collections.abc import Sequence

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame

from sft.data.template.iterations import Reads
from sft.data.template.lookahead import lookahead
from sft.data.template.queries import Query
from sft.data.template.scans import IndexScan


class StatementCompiler(CodeGenerator):
    """Jinja's compiler, with calls around statements whose results may be kept."""

    def begin_loop(self, number: int, reads: Reads, target: str, items: nodes.Expr, frame: Frame) -> None:
        """Generates the iterable of a loop.  target: the name of an item"""
        self.write(f"environment.begin_loop({number}, ")
        self.visit(items, frame)
        self.write(", ")
        self._names(reads, frame)
        self.write(", ")
        self._owners(reads, frame)
        looks = lookahead(reads.keys, target)
        if looks is not None:
            self.write(f", ({looks.reach}, {looks.behind}, (")
            for name in looks.lists:
                self._outer(name, frame)
                self.write(", ")
            self.write("), lambda: (")
            for name, key in looks.values:
                if key is not None:
                    self.write("environment.getitem(" if isinstance(key, int) else "environment.getattr(")
                self._outer(name, frame)
                self.write(", " if key is None else f", {key!r}), ")
            self.write("), (")
            for position, name in looks.queries:
                query = reads.keys[position]
                assert isinstance(query, Query)
                self.write(f"('{number}.{position}', {looks.lists.index(name)}, ")
                self._outcome(query.target, query.tests, frame)
                self.write("), ")
            self.write("))")
        self.write(")")

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:
        kept = getattr(node, "kept", None)
        names = [] if kept is None else [name for part in _parts(kept[1]) for name in part.find_all(nodes.Name)]
        if kept is None or any(frame.symbols.find_ref(name.name) is None for name in names):
            super().visit_Output(node, frame)
            return
        self.writeline("if not ")
        self.repeats(kept[0], kept[1], kept[2], frame)
        self.write(":")
        self.indent()
        super().visit_Output(node, frame)
        self.writeline("environment.end_statement()")
        self.outdent()

    def repeats(self, number: int, reads: Reads, item: str | None, frame: Frame) -> None:
        """Generates the call of `Replay.repeats`.  item: the name of the loop's item; None: the statement is no loop"""
        self.write(f"environment.repeats({number}, ")
        if item is None:
            self.write("None")
        else:
            self.visit(nodes.Name(item, "load"), frame)
        self.write(", ")
        self._owners(reads, frame)
        self.write(", lambda: (")
        for position, key in enumerate(reads.keys):
            if isinstance(key, Query):
                self.write(f"environment.query('{number}.{position}', ")
                self.visit(key.items, frame)
                self.write(", ")
                self._outcome(key.target, key.tests, frame)
                self.write(")")
            elif isinstance(key, IndexScan):
                self.write("environment.scan(")
                self.visit(key.items, frame)
                self.write(", ")
                self.visit(key.indices, frame)
                self.write(", ")
                self._outcome(key.target, () if key.stops is None else (key.stops,), frame)
                self.write(")")
            else:
                self.visit(key, frame)
            self.write(", ")
        self.write(")")
        if item is None:
            self.write(", None, ")
            self._names(reads, frame)
        elif "loop" in frame.symbols.refs:
            self.write(", ")
            self.visit(nodes.Name("loop", "load"), frame)
        self.write(")")

    def _outcome(self, target: str, tests: Sequence[nodes.Expr], frame: Frame) -> None:
        """Generates a function of an item, with the name `target`, that returns the values of conditions."""
        inside = frame.inner()
        self.write(f"lambda {inside.symbols.declare_parameter(target)}: (")
        for test in tests:
            self.visit(test, inside)
            self.write(", ")
        self.write(")")

    def _names(self, reads: Reads, frame: Frame) -> None:
        """Generates the values of names before a statement."""
        self.write("(")
        for name in reads.names:
            self._outer(name, frame)
            self.write(", ")
        self.write(")")

    def _owners(self, reads: Reads, frame: Frame) -> None:
        """Generates the namespace or list of each change."""
        self.write("(")
        for name, attribute in reads.changes:
            self.write("(")
            self._outer(name, frame)
            self.write(f", {attribute!r}), ")
        self.write(")")

    def _outer(self, name: str, frame: Frame) -> None:
        """Generates the value of a name outside of the statement.  A name that the template does not assign comes from
        the context."""
        if frame.symbols.find_ref(name) is None:
            self.write(f"{self.get_resolve_func()}({name!r})")
        else:
            self.visit(nodes.Name(name, "load"), frame)


def mark_kept(statement: nodes.For | nodes.Output, number: int, reads: Reads) -> None:
    """Marks a statement whose result may be kept, for the compiler."""
    if isinstance(statement, nodes.Output):
        statement.kept = number, reads, None  # type: ignore[attr-defined]
        return
    assert isinstance(statement.target, nodes.Name)
    statement.iter.kept = number, reads, statement.target.name  # type: ignore[attr-defined]
    start, end = nodes.ExprStmt(nodes.Tuple(_parts(reads), "load")), nodes.ExprStmt(nodes.Tuple([], "load"))
    start.kept, end.kept = (number, reads, statement.target.name), "ends"  # type: ignore[attr-defined]
    statement.body.insert(1, start)
    statement.body.append(end)


def _parts(reads: Reads) -> list[nodes.Expr]:
    """The expressions that are computed before a statement: the owners of changes, and the keys."""
    owners = [nodes.Name(name, "load") for name, _ in reads.changes]
    values: list[nodes.Expr] = []
    for key in reads.keys:
        if isinstance(key, IndexScan):
            values += [key.items, key.indices]
        else:
            values.append(key.items if isinstance(key, Query) else key)
    return [*owners, *values]
