"""docs/start/first-family.md adds a family: this test applies its edits and its command, word for word, to a copy of
the tree."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.mutations.warm_pytest import run_pytest

PAGE = (ROOT / "docs/start/first-family.md").read_text(encoding="utf-8")
COPIED = ("sft", "tests", "tools", "docs/reference")
_EDIT = re.compile(
    r"^In `(?P<file>[\w/.]+)`, (?P<how>above|below|replace) ``(?P<line>[^\n]+?)``(?:, add| by):\n\n"
    r"(?:<!-- not run: part -->\n)?```(?:python|text)\n(?P<added>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
EDITS = [match.groupdict() for match in _EDIT.finditer(PAGE)]
ENTRY = "sft/hf/families/gemma.py"
FORGOTTEN = "    rules=(*outer(), *attention(), *mlp(norm=_NORM)),\n"
PRINTED = """\
missing: model.layers.*.post_attention_layernorm.weight (layers 0-1)
missing: model.layers.*.post_feedforward_layernorm.weight (layers 0-1)
"""


def apply(root: Path, file: str, how: str, line: str, added: str) -> None:
    """Edits the single line that begins with `line` after its indentation; added lines get the same indentation."""
    lines = (root / file).read_text(encoding="utf-8").split("\n")
    (number,) = (n for n, text in enumerate(lines) if text.lstrip().startswith(line))
    indent = lines[number].removesuffix(lines[number].lstrip())
    start, end = {"above": (number, number), "below": (number + 1, number + 1), "replace": (number, number + 1)}[how]
    lines[start:end] = [f"{indent}{text}".rstrip() for text in added.removesuffix("\n").split("\n")]
    (root / file).write_text("\n".join(lines), encoding="utf-8")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the working tree with all edits of the page."""
    root = tmp_path_factory.mktemp("copy")
    for name in COPIED:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", root)
    for edit in EDITS:
        apply(root, **edit)
    return root


def run(root: Path, command: str) -> tuple[int, str]:
    """The exit code and the output of a pytest command in `root`."""
    expand = ["bash", "-c", f"printf '%s\\n' {command}"]
    words = subprocess.run(expand, capture_output=True, text=True, check=True).stdout
    outcome = run_pytest(root, words.splitlines(), limit_s=600)
    assert outcome.code is not None, outcome.why_ended
    return outcome.code, outcome.output


def test_the_page_adds_a_family_that_the_tree_lacks(copy: Path) -> None:
    """Every test of the new family passes, with the tests of its losses and gradients."""
    assert len(EDITS) == PAGE.count("\nIn `") == 7
    assert "vaultgemma" not in (ROOT / ENTRY).read_text(encoding="utf-8")
    (command,) = re.findall(r"^pytest (.+)$", PAGE, re.MULTILINE)
    code, output = run(copy, f"-vv {command}")
    assert code == 0, output
    for name in (
        "test_a_family_has_the_tensors_of_transformers[vaultgemma-True]",
        "test_every_token_has_the_loss_that_transformers_gives_it[vaultgemma-one]",
        "test_loss_and_every_gradient_are_those_of_transformers[vaultgemma-one]",
        "test_a_row_is_what_the_code_does[vaultgemma]",
    ):
        assert f"{name} PASSED" in output, output


def test_an_entry_without_its_rules_fails_as_the_page_says(copy: Path) -> None:
    complete = (copy / ENTRY).read_text(encoding="utf-8")
    assert complete.count(FORGOTTEN) == 1
    (copy / ENTRY).write_text(complete.replace(FORGOTTEN, ""), encoding="utf-8")
    try:
        code, output = run(copy, "tests/unit/weights/test_hf_convert.py -k vaultgemma")
    finally:
        (copy / ENTRY).write_text(complete, encoding="utf-8")
    assert code == 1 and f"```text\n{PRINTED}```" in PAGE
    assert all(line in output for line in PRINTED.splitlines()), output
