"""Makes the reference part of docs/reference/python-api.md from the signatures and docstrings of `import sft`.

tools/pages.py writes the page.  The part is between `<!-- api -->` and `<!-- end -->`; people write the rest.
"""

import ast
import re
from pathlib import Path

from tools import page_text

ROOT = Path(__file__).resolve().parents[1]


def page(text: str) -> str:
    """The page with a newly generated part."""
    return page_text.replaced(text, "<!-- api -->\n", "<!-- end -->", "\n".join([*map(section, _public()), ""]))


def _public() -> list[ast.FunctionDef | ast.ClassDef]:
    """The functions and classes that sft/__init__.py offers, in the order of its `__all__`."""
    tree = ast.parse((ROOT / "sft/__init__.py").read_text(encoding="utf-8"))
    values = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    homes = ast.literal_eval(values["_HOMES"])
    names = [name for name in ast.literal_eval(values["__all__"]) if name in homes]
    return [_definition(ROOT / f"{homes[name].replace('.', '/')}.py", name) for name in names]


def _definition(file: Path, name: str) -> ast.FunctionDef | ast.ClassDef:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
    raise ValueError(f"{file} defines no {name}.")


def section(node: ast.FunctionDef | ast.ClassDef) -> str:
    """A heading, and a block with the signature and the docstring as in the source."""
    if isinstance(node, ast.FunctionDef):
        return f"### {node.name}\n\n```text\n{_signature(node)}\n\n{_docstring(node)}\n```\n"
    fields = [f"    {ast.unparse(line)}".replace("'", '"') for line in node.body if isinstance(line, ast.AnnAssign)]
    methods = [line for line in node.body if isinstance(line, ast.FunctionDef) and not line.name.startswith("_")]
    lines = [f"class {node.name}", *fields, "", _docstring(node)]
    for method in methods:
        lines += ["", f"{node.name}.{method.name}" if method.decorator_list else f"{node.name}.{_signature(method)}"]
        lines += [f"    {line}".rstrip() for line in _docstring(method).split("\n") if _docstring(method)]
    return f"### {node.name}\n\n```text\n" + "\n".join(lines).replace("\n\n\n", "\n\n") + "\n```\n"


def _signature(node: ast.FunctionDef) -> str:
    """The signature, such as `load(path: str | Path) -> Recipe`.  Over 100 columns, each parameter has its own line."""
    arguments = ast.unparse(node.args).replace("'", '"').removeprefix("self").removeprefix(", ")
    arguments = re.sub(r"(?<=[\w\]])=(?=[\w\"(])", " = ", arguments)
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns).strip(chr(39))}"
    line = f"{node.name}({arguments}){returns}"
    if len(line) <= 100:
        return line
    parameters = re.sub(r", (?=\w+: |\*)", ",\n    ", arguments)
    return f"{node.name}(\n    {parameters},\n){returns}"


def _docstring(node: ast.FunctionDef | ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "").rstrip()
