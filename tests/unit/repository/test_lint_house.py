"""tools/lint: plants each kind of fault in a small repository and looks for it; what is fine stays unreported."""

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


def faults(tmp_path: Path, **planted: str) -> list[str]:
    """The faults of FINE with `planted` files beside, as text; docs__a_md stands for docs/a.md."""
    texts = FINE | {
        name.replace("__", "/").replace("_py", ".py").replace("_md", ".md"): t for name, t in planted.items()
    }
    files = []
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
        files.append(Source(name, text))
    return [str(fault) for fault in check(tmp_path, files)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("message = 'ranks are told'\n", 'sft/a.py:1: word: "told"; write message, report, say, print, describe'),
        ("class LossTally: ...\n", 'sft/a.py:1: word: "Tally"; write accumulator, count'),
        ("# A bad step ends it.\n", 'sft/a.py:1: word: "bad step"; write non-finite'),
        ("def f(found): ...\n", "sft/a.py:1: word: `found`; a name is a noun that says what it holds"),
        ("is_bad = 1\n", "sft/a.py:1: word: `is_bad`; write nonfinite"),
    ],
)
def test_retired_words(tmp_path: Path, text: str, expected: str) -> None:
    (fault,) = faults(tmp_path, sft__a_py=text)
    assert fault.startswith(expected)


@pytest.mark.parametrize(
    "docstring", ["Of one call.", "Those of the file.", "The same\n  on all ranks.", "As `f`.", "What x is."]
)
def test_docstrings_that_do_not_name_the_thing(tmp_path: Path, docstring: str) -> None:
    (fault,) = faults(tmp_path, sft__a_py=f'class A:\n    def f(self):\n        """{docstring}"""\n')
    assert fault.startswith('sft/a.py:3: word: docstring begins with "')
    assert faults(tmp_path, tests__a_py=f'"""{docstring}"""\n') == []


def test_docstrings_that_name_the_thing(tmp_path: Path) -> None:
    code = (
        '"""Offsets of rows."""\ndef f():\n    """Assigns x.  Of y, the first."""\ndef g():\n    """Whatever fits."""\n'
    )
    assert faults(tmp_path, sft__a_py=code) == []


def test_a_class_name_in_two_modules(tmp_path: Path) -> None:
    """Private names and tests are free."""
    private = "class _A: ...\n"
    (fault,) = faults(
        tmp_path, sft__a_py="class Pack: ...\n" + private, sft__b_py=private, tests__b_py="class Pack: ...\n"
    )
    assert fault == "sft/a.py:1: word: class Pack is also in sft/batch.py; say what it is of"


def test_words_that_stay(tmp_path: Path) -> None:
    """Files on disk, rows of data, plain English where only a name is retired, and other words that begin alike."""
    code = "# Again: a spare place.\nfiles = 'seen.jsonl', 'ledger.json'\non_bad_row = 'feed-forward'\nstellar = 0\n"
    assert faults(tmp_path, sft__a_py=code) == []


@pytest.mark.parametrize(
    "stale",
    ["`Bin`", "`batch.Bin`", "`_gone`", "`gone(3)`", "`gone.py`", "sft/gone.py", "`sft/gone/`", "`data.seq_lenght`",
     "[x](gone.md)", "[x](page.md#gone)"],
)  # fmt: skip
def test_stale_references(tmp_path: Path, stale: str) -> None:
    (in_page,) = faults(tmp_path, docs__b_md=f"# B\n\nSee {stale}.\n")
    assert in_page.startswith("docs/b.md:3: reference: ")


OTHER = """import functools
from sft.batch import Pack
class Bin(Pack):
    def fill(self):
        self.rest = 0
class Base(functools.partial): ...
SIZE, _limit = 1, 2
"""


@pytest.mark.parametrize(
    "stale", ["batch.Bin", "other.Pack", "Pack.fill", "batch.Pack.rest", "other.gone()", "sft.fill"]
)
def test_a_dotted_name_of_another_module(tmp_path: Path, stale: str) -> None:
    """Each name exists somewhere, but not in the module or class before the dot."""
    (fault,) = faults(tmp_path, sft__other_py=OTHER, docs__b_md=f"# B\n\nSee `{stale}`.\n")
    assert fault == f"docs/b.md:3: reference: `{stale.removesuffix('()')}` does not exist; use the current name"


@pytest.mark.parametrize(
    "name",
    ["other.Bin", "Bin.rest", "other.Bin.fill", "sft.other.Bin", "Bin.size", "Base.args", "other._limit", "sft.batch",
     "functools.wraps", "other.SIZE.real", "data.SOURCE"],
)  # fmt: skip
def test_a_dotted_name_of_its_module(tmp_path: Path, name: str) -> None:
    """Defined there, inherited there from a class of ours, or by a base class of other software."""
    assert faults(tmp_path, sft__other_py=OTHER, docs__b_md=f"# B\n\nSee `{name}`.\n") == []


def test_an_attribute_of_a_variable_is_not_a_name_of_a_module(tmp_path: Path) -> None:
    """The comment means the parameter `batch`; a class is never an attribute of it."""
    code = "def f(batch):\n    # `batch.lengths`\n    # `batch.Bin`\n    return batch.lengths\n"
    (fault,) = faults(tmp_path, sft__a_py=code, sft__other_py=OTHER)
    assert fault.startswith("sft/a.py:3: reference: `batch.Bin` does not exist")


def test_names_of_tests_are_for_tests(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, tests__cases_py="def case(): ...\n# `cases.case`\n", docs__b_md="`cases.case`\n")
    assert fault.startswith("docs/b.md:1: reference: `cases.case` does not exist")


def test_a_page_that_the_site_does_not_list(tmp_path: Path) -> None:
    (tmp_path / "mkdocs.yml").write_text("nav:\n  - A page: page.md\n")
    assert faults(tmp_path) == []
    (fault,) = faults(tmp_path, docs__new_md="# New\n")
    assert fault == "docs/new.md:1: reference: mkdocs.yml does not list this page; add it to nav"


def test_stale_references_in_code(tmp_path: Path) -> None:
    in_docstring, in_comment = faults(tmp_path, sft__a_py='"""Like `Bin`."""\n# Like sft/gone.py.\n')
    assert in_docstring.startswith("sft/a.py:1: reference: ")
    assert in_comment.startswith("sft/a.py:2: reference: ")


def test_code_blocks_and_users_files_are_not_references(tmp_path: Path) -> None:
    page = "# B\n```text\n`Bin` sft/gone.py\n```\n`runs/a/` `logs/x.txt` `chat.jsonl`\n"
    assert faults(tmp_path, docs__b_md=page) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(): ...\n" + "\n" * 321, "322 lines; at most 320"),
        ("def f():\n" + "    x = 1\n" * 61, "f() has 62 lines; at most 60"),
        (f"def f({', '.join(f'a{i}' for i in range(9))}): ...\n", "f() has 9 parameters; at most 8"),
        ("class A:\n" + "".join(f"    def f{i}(self): ...\n" for i in range(17)), "class A has 17 methods; at most 16"),
    ],
)
def test_limits(tmp_path: Path, text: str, expected: str) -> None:
    (fault,) = faults(tmp_path, sft__a_py=text)
    assert fault == f"sft/a.py:1: limit: {expected}"


def test_what_limits_leave_out(tmp_path: Path) -> None:
    """self is no parameter, a Triton kernel may have many, and the tests may have long functions."""
    nine = ", ".join(f"a{i}" for i in range(9))
    eight = "class A:\n    def f(self, a, b, c, d, e, f, g, h): ...\n"
    kernel = f"@triton.jit\ndef kernel({nine}): ...\n"
    assert faults(tmp_path, sft__a_py=eight + kernel, tests__b_py=f"def f({nine}): ...\n") == []


def test_long_lines_of_pages_and_a_crowded_top(tmp_path: Path) -> None:
    crowd = {f"sft__m{i}_py": "" for i in range(26)}
    assert faults(tmp_path, docs__b_md="# B\n" + "x" * 121 + "\n", **crowd) == [
        "docs/b.md:2: limit: 121 columns; at most 120",
        "sft/__init__.py:1: limit: 28 entries in sft/; at most 27",
    ]
