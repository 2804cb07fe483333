"""Compiles a chat template to Python code that counts operations and keeps the sources of texts.

The code calls methods of the sandbox (`sandbox.py`) for constants, written values, sums, slices, loops, and assignments
to names, and around statements whose results may be kept (`iterations.py`).
"""

from typing import Any

from jinja2 import nodes
from jinja2.compiler import Frame

from sft.data.template.operations import Operations
from sft.data.template.statement_code import StatementCompiler

_OPERATORS = {"eq": "==", "ne": "!=", "gt": ">", "gteq": ">=", "lt": "<", "lteq": "<=", "in": "in", "notin": "not in"}


class Compiler(StatementCompiler):
    """Jinja's compiler, changed so that constants become texts with a source, and values pass through the sandbox."""

    def _constant(self, value: str | int) -> str:
        assert isinstance(self.environment, Operations)
        return f"environment.constants[{self.environment.constant(value)}]"

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str | int) and not isinstance(node.value, bool):
            self.write(self._constant(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(self._constant(node.data))

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        raise nodes.Impossible()  # compute nothing at compile time, because the limits apply to renderings

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        escaping = frame.eval_ctx.volatile or frame.eval_ctx.autoescape
        self.write("environment.write_escaped(context.eval_ctx, " if escaping else "environment.write(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        escaping = frame.eval_ctx.volatile or frame.eval_ctx.autoescape
        self.write("environment.concatenate_escaped(context.eval_ctx, (" if escaping else "environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        first: nodes.Expr = node
        rest: list[nodes.Expr] = []
        while isinstance(first, nodes.Add):  # a + b + c becomes one call
            rest.append(first.right)
            first = first.left
        self._call("environment.add", (first, *reversed(rest)), frame)

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        if isinstance(node.expr, nodes.Const):  # a constant that is only compared needs no source
            self.write(f" {_OPERATORS[node.op]} {node.expr.value!r}")
        else:
            super().visit_Operand(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Const):
            self.write("environment.getitem(")
            self.visit(node.node, frame)
            self.write(f", {node.arg.value!r})")
        elif isinstance(node.arg, nodes.Slice):
            self.write("environment.sliced(")
            self.visit(node.node, frame)
            self.write(", slice(")
            for part in (node.arg.start, node.arg.stop, node.arg.step):
                if part is None:
                    self.write("None")
                else:
                    self.visit(part, frame)
                self.write(", ")
            self.write("))")
        else:
            super().visit_Getitem(node, frame)

    def visit_MarkSafe(self, node: nodes.MarkSafe, frame: Frame) -> None:
        """Generates the code of a value that is assigned to a name.

        Only `Sandbox.compiled` makes this kind of node; Jinja does not.
        """
        is_name = isinstance(node.expr, nodes.Name)  # a second name for a value makes no new text
        self._call("environment.written" if is_name else "environment.named", (node.expr,), frame)

    def visit_MarkSafeIfAutoescape(self, node: nodes.MarkSafeIfAutoescape, frame: Frame) -> None:
        """Generates the code of a loop's iterable.  Only `Sandbox.compiled` makes this kind of node; Jinja does not."""
        kept = getattr(node, "kept", None)
        if kept is None:
            self._call("environment.loop_items", (node.expr,), frame)
            return
        self.begin_loop(kept[0], kept[1], kept[2], node.expr, frame)

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Frame) -> None:
        kept = getattr(node, "kept", None)
        if kept == "ends":
            self.writeline("environment.end_statement()")
        elif kept is not None:
            self.writeline("if ")
            self.repeats(kept[0], kept[1], kept[2], frame)
            self.write(": continue")
        elif isinstance(node.node, nodes.Tuple) and not node.node.items:  # `Sandbox.compiled` puts it into macros
            self.writeline("environment.tick()")
        elif isinstance(node.node, nodes.Name) and getattr(node, "begins_loop", False):
            self.newline(node)
            self._call("environment.enter", (node.node,), frame)
        else:
            super().visit_ExprStmt(node, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        outer = self.temporary_identifier()
        self.writeline(f"{outer} = environment.message")
        super().visit_For(node, frame)
        self.writeline(f"environment.message = {outer}")

    def _call(self, function: str, arguments: tuple[nodes.Expr, ...], frame: Frame) -> None:
        self.write(f"{function}(")
        for argument in arguments:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")
