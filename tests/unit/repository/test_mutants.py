"""Random mutants: each operator makes the change of its name, and the marker shows that a function was called."""

import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from tests.mutations.mutants import apply, draw, mutants_of, nearest_tests


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("return a < b", ["return a <= b", "return None"]),
        ("return a not in b", ["return a in b", "return None"]),
        ("x = a + b", ["x = a - b"]),
        ("x = a // 3", ["x = a * 3", "x = a // 4"]),
        ("x = a and b", ["x = a or b"]),
        ("x = True", ["x = False"]),
        ("f(a)", ["pass"]),
        ("x += y", ["pass"]),
        ("raise ValueError(f'{a + 1}')", ["pass"]),
        ("if a:\n        f(b)", ["if not a:\n        f(b)", "if a:\n        pass"]),
        ("x = 'a' + b", []),  # strings cannot be subtracted
        ("x = f'{a + b}'", []),  # text of messages is not changed
        ("assert a == b", []),
        ("return None", []),
    ],
)
def test_operators(line: str, becomes: list[str], tmp_path: Path) -> None:
    source = f"def g(a, b):\n    {line}\n"
    made = [apply(mutant, source, tmp_path / "called") for mutant in mutants_of("a.py", source)]
    expected = [f"def g(a, b):\n    open('{tmp_path}/called', 'a').write('called\\n')\n    {text}" for text in becomes]
    assert sorted(made) == sorted(expected)


def test_a_call_of_the_changed_function_is_seen(tmp_path: Path) -> None:
    source = 'class A:\n    def f(self):\n        """Doc."""\n        return 1\n\n    def g(self):\n        return 2\n'
    [mutant] = [m for m in mutants_of("a.py", source) if m.after == "return None" and m.function == "g"]
    changed = apply(mutant, source, tmp_path / "called")
    for call, seen in (("f", False), ("g", True)):
        subprocess.run([sys.executable, "-c", f"{changed}\nA().{call}()"], check=True)
        assert (tmp_path / "called").exists() is seen


def test_the_seed_decides_which_mutants_are_tried() -> None:
    sources = {"a.py": "def f(a):\n    return a + 1\n", "b.py": "def g(a):\n    return a * 2 < 3\n"}
    drawn = list(draw(sources, "7"))
    assert drawn == list(draw(sources, "7")) and len(drawn) == 3 + 5
    assert [m.file for m in islice(draw(sources, "8"), 4)] != [m.file for m in drawn[:4]]


def test_the_nearest_tests_come_first() -> None:
    imports = {"sft/a.py": set(), "sft/b.py": {"sft/a.py"}, "t/test_a.py": {"sft/a.py"}, "t/test_b.py": {"sft/b.py"}}
    imports |= {"t/test_c.py": {"sft/c.py"}, "t/test_far.py": {"t/test_b.py"}}
    tests = [file for file in imports if file.startswith("t/")]
    assert nearest_tests("sft/a.py", imports, tests) == ["t/test_a.py", "t/test_b.py", "t/test_far.py"]
