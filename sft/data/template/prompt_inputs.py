"""Finds the inputs on which a prompt's header can depend, from the syntax tree of the template.

The header is the text that a template adds because of add_generation_prompt.  The shape of a chat is the role of each
message, and which keys of the message have a value.  Chats of equal shape have equal headers if the header reads only
names that the template sets to constants, under conditions on shapes:

    {% if message['role'] == 'tool' %}{% set ns.is_tool = true %}{% endif %} ...
    {% if add_generation_prompt and not ns.is_tool %}<|Assistant|>{% endif %}

Everything that this module does not recognise counts as dependent on texts.
"""

from collections import defaultdict
from collections.abc import Iterable, Set
from enum import Enum
from typing import Any

from jinja2 import nodes

from sft.data.rows.messages import Message

PROMPT = "add_generation_prompt"
_PURE = (
    nodes.Const, nodes.TemplateData, nodes.Tuple, nodes.List, nodes.Add, nodes.Sub, nodes.Neg, nodes.Concat, nodes.Test,
    nodes.Compare, nodes.Operand, nodes.CondExpr, nodes.And, nodes.Or, nodes.Not, nodes.Filter,
)  # fmt: skip
_MARKS = ("defined", "undefined", "none")  # tests whose result depends on the shape alone
_LOOP = ("index", "index0", "revindex", "revindex0", "first", "last", "length")  # known in a loop over messages
_Conditions = tuple[nodes.Node | None, ...]  # conditions of a statement; None: a condition that is not recognised


class PromptInputs(Enum):
    """The inputs on which the header depends, besides variables of the run and of the row."""

    NOTHING = "nothing"
    SHAPES = "the shapes of the messages before it"
    TEXTS = "anything"


def prompt_inputs(tree: nodes.Template, variables: Set[str]) -> PromptInputs:
    """The inputs of the header.

    variables: the names that the template reads without defining them, except messages, tools and documents
    """
    reads = _Reads(_Assignments(tree), variables)
    if not reads.header_is_known(tree):
        return PromptInputs.TEXTS
    return PromptInputs.SHAPES if reads.shapes else PromptInputs.NOTHING


def shape(message: Message) -> tuple[Any, ...]:
    """The shape of a message: its role, and which of its keys are null or empty."""
    return message["role"], *sorted((key, None if value is None else bool(value)) for key, value in message.items())


class _Assignments:
    """The assignments of a template to each name: `x`, or `ns.x` for a namespace.

    values    by name, the assigned expressions (None: not recognised), each with the conditions of the assignment
    blocks    each `if`, with the conditions under which it is reached
    messages  names of the items of loops over messages
    """

    def __init__(self, tree: nodes.Template) -> None:
        self.values: dict[str, list[tuple[nodes.Node | None, _Conditions]]] = defaultdict(list)
        self.blocks: list[tuple[nodes.If, _Conditions]] = []
        self.messages: set[str] = set()
        self.has_jumps = False  # break and continue add conditions to the statements after them
        attributes = {id(node.node) for node in tree.find_all(nodes.Getattr)}
        # Names that are read without an attribute.  Such a namespace could get a second name and change under it.
        self.whole = {n.name for n in tree.find_all(nodes.Name) if n.ctx == "load" and id(n) not in attributes}
        self._statements(tree.body, ())

    def _statements(self, statements: Iterable[nodes.Node], conditions: _Conditions) -> None:
        for statement in statements:
            match statement:
                case nodes.Assign():
                    self._assign(statement.target, statement.node, conditions)
                case nodes.If():
                    self._if(statement, conditions)
                case nodes.For():
                    if isinstance(statement.target, nodes.Name) and _is_name(statement.iter, "messages"):
                        self.messages.add(statement.target.name)
                    else:
                        self._assign(statement.target, None, conditions)
                    self._statements(statement.body, (*conditions, statement))
                    self._statements(statement.else_, (*conditions, statement))
                case nodes.Output():
                    pass
                case nodes.Break() | nodes.Continue():
                    self.has_jumps = True
                case _:  # it is not known whether and how often such a statement runs
                    for node in statement.find_all(nodes.NSRef):
                        self._assign(node, None, conditions)
                    for name in statement.find_all(nodes.Name):
                        if name.ctx != "load":
                            self._assign(name, None, conditions)
                    self._statements(statement.iter_child_nodes(), (*conditions, None))

    def _if(self, block: nodes.If, conditions: _Conditions) -> None:
        tests: _Conditions = (*conditions, block.test)
        self.blocks.append((block, conditions))
        self._statements(block.body, tests)
        for other in block.elif_:
            self.blocks.append((other, tests))
            tests = (*tests, other.test)
            self._statements(other.body, tests)
        self._statements(block.else_, tests)

    def _assign(self, target: nodes.Node, value: nodes.Node | None, conditions: _Conditions) -> None:
        if isinstance(target, nodes.Tuple):
            for item in target.items:
                self._assign(item, None, conditions)
        elif isinstance(target, nodes.NSRef):
            self.values[f"{target.name}.{target.attr}"].append((value, conditions))
        elif isinstance(target, nodes.Name):
            self.values[target.name].append((value, conditions))
            if isinstance(value, nodes.Call) and _is_name(value.node, "namespace"):
                for keyword in value.kwargs:
                    self.values[f"{target.name}.{keyword.key}"].append((keyword.value, conditions))


class _Reads:
    """Finds the inputs that expressions read, directly or through assigned names.

    shapes  whether an expression that was examined reads the shapes of messages
    """

    def __init__(self, assignments: _Assignments, variables: Set[str]) -> None:
        self.assignments, self.variables, self.shapes = assignments, variables, False
        self._known: dict[str, bool] = {}

    def header_is_known(self, tree: nodes.Template) -> bool:
        """Whether all statements that depend on add_generation_prompt read only constants, variables and shapes."""
        asked = {id(name) for name in tree.find_all(nodes.Name) if name.name == PROMPT and name.ctx == "load"}
        asked -= {id(without.node) for without in tree.find_all(nodes.Not)}  # `if not` guards no text of a header
        for block, conditions in self.assignments.blocks:
            names = {id(name) for name in (block.test, *block.test.find_all(nodes.Name))}
            has_else = isinstance(block.test, nodes.Not) and _is_name(block.test.node, PROMPT) and block.else_
            if (names & asked or has_else) and not (self._all(conditions) and self._is_written(block)):
                return False
            asked -= names
        return not asked and not (self.assignments.has_jumps and self.shapes)

    def _is_written(self, statement: nodes.Node) -> bool:
        match statement:
            case nodes.If():
                parts = [*statement.body, *statement.elif_, *statement.else_]
                return self._decides(statement.test) and all(self._is_written(part) for part in parts)
            case nodes.Output():
                return all(self._is_known(node) for node in statement.nodes)
        return isinstance(statement, nodes.Assign)  # an assignment counts where its name is read

    def _all(self, conditions: _Conditions) -> bool:
        return all(condition is not None and self._decides(condition) for condition in conditions)

    def _decides(self, condition: nodes.Node) -> bool:
        """Whether the condition, or a loop's number of iterations, depends only on constants, variables and shapes."""
        match condition:
            case nodes.For():
                over_messages = _is_name(condition.iter, "messages") and "messages" not in self.assignments.values
                self.shapes = True
                return condition.test is None and over_messages  # shapes decide the number of messages, not of calls
            case nodes.And() | nodes.Or():
                return self._decides(condition.left) and self._decides(condition.right)
            case nodes.Not():
                return self._decides(condition.node)
            case nodes.Test(name=name) if name in _MARKS and self._is_key(condition.node):
                return True
            case nodes.Compare(expr=nodes.Const(), ops=[nodes.Operand(op="in" | "notin", expr=where)]):
                if self._is_message(where):
                    return True
        return self._is_key(condition) or self._is_known(condition)

    def _is_known(self, value: nodes.Node) -> bool:
        """Whether the value depends only on constants, variables and shapes."""
        match value:
            case nodes.Name():
                return value.name in (*self.variables, PROMPT) or self._is_set_to_known(value.name)
            case nodes.Getattr() | nodes.Getitem():
                key = _key(value)
                if _is_name(value.node, "loop"):
                    self.shapes = True
                    return key in _LOOP
                if isinstance(value.node, nodes.Name) and f"{value.node.name}.{key}" in self.assignments.values:
                    is_whole = value.node.name in self.assignments.whole
                    return not is_whole and self._is_set_to_known(f"{value.node.name}.{key}")
                return key == "role" and self._is_message(value.node)
            case nodes.And() | nodes.Or() | nodes.Not():
                return self._decides(value) and all(self._is_known(node) for node in value.iter_child_nodes())
        return isinstance(value, _PURE) and all(self._is_known(node) for node in value.iter_child_nodes())

    def _is_set_to_known(self, name: str) -> bool:
        if name not in self._known:
            values = self.assignments.values.get(name, [])
            self._known[name] = bool(values) and name not in self.assignments.messages  # until it has been examined
            self._known[name] = self._known[name] and all(
                value is not None and self._is_known(value) and self._all(where) for value, where in values
            )
        return self._known[name]

    def _is_key(self, value: nodes.Node) -> bool:
        """Whether the expression reads a key of a message.

        As a condition, such an expression depends on shapes only: the shape of a message says which keys have a value.
        """
        if isinstance(value, nodes.Call) and isinstance(value.node, nodes.Getattr) and value.node.attr == "get":
            return len(value.args) == 1 and not value.kwargs and self._is_message(value.node.node)
        return isinstance(value, nodes.Getattr | nodes.Getitem) and bool(_key(value)) and self._is_message(value.node)

    def _is_message(self, value: nodes.Node) -> bool:
        values = self.assignments.values
        if isinstance(value, nodes.Name):
            is_one = value.name in self.assignments.messages and not {value.name, "messages"} & values.keys()
        else:
            is_one = (
                isinstance(value, nodes.Getitem)
                and _is_name(value.node, "messages")
                and "messages" not in values
                and self._is_known(value.arg)
            )
        self.shapes |= is_one
        return is_one


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def _key(node: nodes.Getattr | nodes.Getitem) -> str | None:
    """The name of the attribute, or the constant text in brackets; None for any other expression."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    return node.arg.value if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str) else None
