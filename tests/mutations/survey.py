"""Tries random mutants for a given time, and prints which tests noticed them: `python -m tests.mutations --random 120`.

The commit is the seed.  A mutant is tried with the test files that import its file, the nearest first, until one fails.
There are three outcomes: noticed (a test failed); survived (tests called the function and passed); not called (no
tested file called it).  If a mutant survives, its change has no effect, or a test is missing.
"""

import ast
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutations.mutants import Mutant, apply, draw, nearest_tests
from tests.mutations.table import REPOSITORY
from tests.mutations.warm_pytest import run_pytest

NUM_FILES = 6  # test files for each mutant
LIMIT_S = 120  # for one test file; tests that hang have noticed the mutant


def survey(copies: "SimpleQueue[Path]", seed: str, seconds: float) -> Counter[str]:
    """The number of mutants with each outcome.  Prints a line for each mutant."""
    sources = {_name(path): path.read_text() for path in sorted((REPOSITORY / "sft").rglob("*.py"))}
    tests = [_name(path) for path in sorted((REPOSITORY / "tests/unit").rglob("test_*.py"))]
    imports = _imports([*sources, *(_name(path) for path in (REPOSITORY / "tests").rglob("*.py"))])
    mutants, ends, stop_at = draw(sources, seed), Counter[str](), time.monotonic() + seconds

    def work() -> None:
        while time.monotonic() < stop_at and (mutant := next(mutants, None)) is not None:
            copy = copies.get()
            try:
                end, by = _end_of(
                    mutant, copy, sources[mutant.file], nearest_tests(mutant.file, imports, tests)[:NUM_FILES]
                )
            finally:
                (copy / mutant.file).write_text(sources[mutant.file])
                copies.put(copy)
            ends[end] += 1
            print(f"{end:10}  {mutant.name}  [{by}]", flush=True)

    with ThreadPoolExecutor(copies.qsize()) as pool:
        for future in [pool.submit(work) for _ in range(copies.qsize())]:
            future.result()
    return ends


def _end_of(mutant: Mutant, copy: Path, source: str, tests: list[str]) -> tuple[str, str]:
    reached = copy.parent / "called"
    reached.unlink(missing_ok=True)
    (copy / mutant.file).write_text(apply(mutant, source, reached))
    end, by = "not called", f"{len(tests)} files"
    for test in tests:
        outcome = run_pytest(copy, [test], limit_s=LIMIT_S)
        if outcome.noticed or not outcome.passed:
            return "noticed", outcome.by
        if reached.exists():
            end, by = "survived", test
    return end, by


def _imports(files: list[str]) -> dict[str, set[str]]:
    """The files of the repository that each file imports, also within functions."""
    known = {*files}
    return {file: {name for name in _imported(file) if name in known} for file in files}


def _imported(file: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse((REPOSITORY / file).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    paths = {name.replace(".", "/") for name in names}
    return {f"{path}.py" for path in paths} | {f"{path}/__init__.py" for path in paths}


def _name(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()
