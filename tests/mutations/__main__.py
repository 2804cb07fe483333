"""`make test-mutations`: puts each deliberate fault into a copy of the repository, and checks that its tests fail.

Prints a table: fault, test that failed, seconds.  Exit code 1 if no test failed for a fault, if the tests of a fault
did not run, or if they fail without the fault.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from tests.mutations.survey import survey
from tests.mutations.table import REPOSITORY, Fault, read_table, sample
from tests.mutations.warm_pytest import Outcome, run_pytest

LIMIT_S = 900  # time limit for the tests of one fault


def main() -> int:
    arguments = _arguments()
    if arguments.random:
        return _try_random(arguments.random, arguments.jobs)
    faults = [fault for fault in read_table() if re.search(arguments.only, f"{fault.name} {fault.file}")]
    if arguments.sample:
        seed = _git("rev-parse", "HEAD").strip()
        faults = sample(faults, arguments.sample, seed)
        print(f"{len(faults)} faults, chosen by the commit {seed[:12]}")
    if not faults:
        print(f"no fault matches {arguments.only!r}", file=sys.stderr)
        return 2
    with _copies(arguments.jobs) as copies:
        sound = arguments.sample or _passes_without_faults(faults, copies)
        escaped = _run_all(faults, copies)
    print(f"{len(faults) - len(escaped)} of {len(faults)} faults noticed")
    for fault, outcome in escaped:
        print(f"\nNOT NOTICED  {fault.name}\n  {fault.file}: {fault.line!r}\n  {fault.tests}\n{outcome.failures}")
    return 1 if escaped or not sound else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", default="", metavar="PATTERN", help="only faults whose name or file matches")
    parser.add_argument("--sample", type=int, metavar="N", help="only N faults, one in ten slow; the commit says which")
    parser.add_argument("--random", type=float, metavar="SECONDS", help="random mutants instead, for this time")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="copies that are tested at once")
    return parser.parse_args()


def _try_random(seconds: float, jobs: int) -> int:
    """Exit code 1 if no mutant that a test called was noticed."""
    seed = _git("rev-parse", "HEAD").strip()
    with _copies(jobs) as copies:
        ends = survey(copies, seed, seconds)
    called = ends["noticed"] + ends["survived"]
    print(f"{ends['noticed']} of {called} mutants noticed, {ends['not called']} not called; seed {seed[:12]}")
    return 0 if ends["noticed"] or not called else 1


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout


@contextmanager
def _copies(jobs: int) -> Iterator[SimpleQueue[Path]]:
    """`jobs` copies of the working tree, each with a link to the folder that tests read beside the repository."""
    copies: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        for number in range(jobs):
            copy = Path(folder) / str(number) / "repository"
            for name in _git("ls-files", "--cached", "--others", "--exclude-standard").splitlines():
                if (REPOSITORY / name).is_file():  # skips files whose removal is not committed
                    (copy / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(REPOSITORY / name, copy / name)
            if (REPOSITORY.parent / "shared").exists():
                (copy.parent / "shared").symlink_to(REPOSITORY.parent / "shared")
            copies.put(copy)
        yield copies


def _passes_without_faults(faults: Sequence[Fault], copies: SimpleQueue[Path]) -> bool:
    """Whether the tests of all faults pass in an unchanged copy.  If not, a failure would not show the fault."""
    copy = copies.get()
    outcome = run_pytest(copy, sorted({argument for fault in faults for argument in fault.tests.split()}), limit_s=7200)
    copies.put(copy)
    if not outcome.passed:
        print(f"tests fail without a fault:\n{outcome.failures}")
    return outcome.passed


def _run_all(faults: Sequence[Fault], copies: SimpleQueue[Path]) -> list[tuple[Fault, Outcome]]:
    """Tests every fault in one of the copies, and prints a line for each.  Returns faults that made no test fail."""

    def run(fault: Fault) -> tuple[Fault, Outcome]:
        copy = copies.get()
        path, sound = copy / fault.file, (copy / fault.file).read_text()
        try:
            path.write_text(fault.apply(copy))
            return fault, run_pytest(copy, fault.tests.split(), limit_s=LIMIT_S)
        finally:
            path.write_text(sound)
            copies.put(copy)

    escaped = []
    with ThreadPoolExecutor(copies.qsize()) as pool:
        for fault, outcome in pool.map(run, faults):
            word = "noticed" if outcome.noticed else "NOT NOTICED"
            print(f"{word:11}  {outcome.seconds:5.0f} s  {fault.name}  [{outcome.by}]", flush=True)
            if not outcome.noticed:
                escaped.append((fault, outcome))
    return escaped


if __name__ == "__main__":
    sys.exit(main())
