"""tools/lint: each kind of fault, added to a small repository, is reported; correct text is not."""

from pathlib import Path

import pytest

from tools.lint.__main__ import check
from tools.lint.source import Source

FINE = {
    "sft/__init__.py": "",
    "sft/batch.py": """'A `Pack`, `batch.Pack`, `sft/batch.py`, `_size()`.'
import torch
class Pack:
    size: int
def _size(): ...
""",
    "docs/page.md": """# What a page says
`batch.Pack` `data.seq_length` `torch.load` `a.jsonl` [here](#what-a-page-says)
""",
}
OTHER = """import functools
from sft.batch import Pack
class Bin(Pack):
    def fill(self):
        self.rest = 0
class Base(functools.partial): ...
SIZE, _limit = 1, 2
"""
NINE = ", ".join(f"a{i}" for i in range(9))


def faults(tmp_path: Path, planted: dict[str, str]) -> list[str]:
    """The reported faults of FINE with the additional files `planted`."""
    files = []
    for name, text in (FINE | planted).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
        files.append(Source(name, text))
    return [str(fault) for fault in check(tmp_path, files)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("message = 'ranks are told'\n", 'word: "told"; write message, report, say, print, describe'),
        ("class LossTally: ...\n", 'word: "Tally"; write accumulator, count'),
        ("# A bad step ends it.\n", 'word: "bad step"; write non-finite'),
        ("def f(found): ...\n", "word: `found`; a name is a noun that says what it holds"),
        ("is_bad = 1\n", "word: `is_bad`; write nonfinite"),
        ("class Pack: ...\n", "word: class Pack is also in sft/batch.py; say what it is of"),
        ('"""Like `Bin`."""\n', "reference: `Bin` does not exist"),
        ("# Like sft/gone.py.\n", "reference: sft/gone.py does not exist"),
        ("def f(): ...\n" + "\n" * 321, "limit: 322 lines; at most 320"),
        ("def f():\n" + "    x = 1\n" * 61, "limit: f() has 62 lines; at most 60"),
        (f"def f({NINE}): ...\n", "limit: f() has 9 parameters; at most 8"),
        (
            "class A:\n" + "".join(f"    def f{i}(self): ...\n" for i in range(17)),
            "limit: class A has 17 methods; at most 16",
        ),
    ],
)
def test_a_fault_of_a_module(tmp_path: Path, text: str, expected: str) -> None:
    (fault,) = faults(tmp_path, {"sft/a.py": text})
    assert fault.startswith(f"sft/a.py:1: {expected}")


@pytest.mark.parametrize(
    "docstring", ["Of one call.", "Those of the file.", "The same\n  on all ranks.", "As `f`.", "What x is."]
)
def test_docstrings_that_do_not_name_the_thing(tmp_path: Path, docstring: str) -> None:
    (fault,) = faults(tmp_path, {"sft/a.py": f'class A:\n    def f(self):\n        """{docstring}"""\n'})
    assert fault.startswith('sft/a.py:3: word: docstring begins with "')
    assert faults(tmp_path, {"sft/a.py": "", "tests/a.py": f'"""{docstring}"""\n'}) == []


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(
            {"sft/a.py": '"""Offsets of rows."""\ndef f():\n    """Assigns x.  Of y, the first."""\n'},
            id="a docstring that names the thing",
        ),
        pytest.param(
            {"sft/a.py": "class _A: ...\n", "sft/b.py": "class _A: ...\n", "tests/b.py": "class Pack: ...\n"},
            id="class names of two modules that are private or of tests",
        ),
        pytest.param(
            {
                "sft/a.py": "# Again: a spare place.\nfiles = 'seen.jsonl', 'ledger.json'\n"
                "on_bad_row = 'feed-forward'\nstellar = 0\n"
            },
            id="files on disk, rows of data, plain English where only a name is retired, words that begin alike",
        ),
        pytest.param(
            {"docs/b.md": "# B\n```text\n`Bin` sft/gone.py\n```\n`runs/a/` `logs/x.txt` `chat.jsonl`\n"},
            id="code blocks and files of users",
        ),
        pytest.param(
            {
                "sft/a.py": "class A:\n    def f(self, a, b, c, d, e, f, g, h): ...\n"
                f"@triton.jit\ndef kernel({NINE}): ...\n",
                "tests/b.py": f"def f({NINE}): ...\n",
            },
            id="self is no parameter; kernels and tests may have many",
        ),
    ],
)
def test_what_is_fine(tmp_path: Path, planted: dict[str, str]) -> None:
    assert faults(tmp_path, planted) == []


@pytest.mark.parametrize(
    "stale",
    ["`Bin`", "`batch.Bin`", "`_gone`", "`gone(3)`", "`gone.py`", "sft/gone.py", "`sft/gone/`", "`data.seq_lenght`",
     "[x](gone.md)", "[x](page.md#gone)"],
)  # fmt: skip
def test_stale_references(tmp_path: Path, stale: str) -> None:
    (in_page,) = faults(tmp_path, {"docs/b.md": f"# B\n\nSee {stale}.\n"})
    assert in_page.startswith("docs/b.md:3: reference: ")


@pytest.mark.parametrize(
    "stale", ["batch.Bin", "other.Pack", "Pack.fill", "batch.Pack.rest", "other.gone()", "sft.fill"]
)
def test_a_dotted_name_of_another_module(tmp_path: Path, stale: str) -> None:
    """Each name exists, but not in the module or class before the dot."""
    (fault,) = faults(tmp_path, {"sft/other.py": OTHER, "docs/b.md": f"# B\n\nSee `{stale}`.\n"})
    assert fault == f"docs/b.md:3: reference: `{stale.removesuffix('()')}` does not exist; use the current name"


@pytest.mark.parametrize(
    "name",
    ["other.Bin", "Bin.rest", "other.Bin.fill", "sft.other.Bin", "Bin.size", "Base.args", "other._limit", "sft.batch",
     "functools.wraps", "other.SIZE.real", "data.SOURCE"],
)  # fmt: skip
def test_a_dotted_name_of_its_module(tmp_path: Path, name: str) -> None:
    """The name is defined in the module, or inherited from a class of ours or of other software."""
    assert faults(tmp_path, {"sft/other.py": OTHER, "docs/b.md": f"# B\n\nSee `{name}`.\n"}) == []


def test_an_attribute_of_a_variable_is_not_a_name_of_a_module(tmp_path: Path) -> None:
    """The comment refers to the parameter `batch`; a class is never an attribute of a parameter."""
    code = "def f(batch):\n    # `batch.lengths`\n    # `batch.Bin`\n    return batch.lengths\n"
    (fault,) = faults(tmp_path, {"sft/a.py": code, "sft/other.py": OTHER})
    assert fault.startswith("sft/a.py:3: reference: `batch.Bin` does not exist")


def test_names_of_tests_are_for_tests(tmp_path: Path) -> None:
    planted = {"tests/cases.py": "def case(): ...\n# `cases.case`\n", "docs/b.md": "`cases.case`\n"}
    (fault,) = faults(tmp_path, planted)
    assert fault.startswith("docs/b.md:1: reference: `cases.case` does not exist")


def test_faults_of_pages_and_a_crowded_top(tmp_path: Path) -> None:
    (tmp_path / "mkdocs.yml").write_text("nav:\n  - A page: page.md\n")
    assert faults(tmp_path, {}) == []
    crowd = {f"sft/m{i}.py": "" for i in range(26)}
    assert faults(tmp_path, {"docs/new.md": "# New\n" + "x" * 121 + "\n", **crowd}) == [
        "docs/new.md:1: reference: mkdocs.yml does not list this page; add it to nav",
        "docs/new.md:2: limit: 121 columns; at most 120",
        "sft/__init__.py:1: limit: 28 entries in sft/; at most 27",
    ]
