"""The table has every row of the fault matrix, and the tests that it names exist."""

import re
from pathlib import Path

import pytest

from tests.faults.matrix import HERE, ROWS

ROOT = Path(__file__).parents[2]
COUNTS = {"P": 7, "S": 11, "L": 10, "X": 4, "T": 10, "D": 8, "N": 4, "G": 4, "H": 2, "O": 5, "R": 6}


@pytest.mark.quick
def test_every_row_is_there_and_what_it_cites_exists() -> None:
    assert sorted(ROWS) == sorted(f"{kind}{number}" for kind, n in COUNTS.items() for number in range(1, n + 1))
    for name, row in ROWS.items():
        assert row.proofs or row.missing, name
        for proof in row.proofs:
            path, _, test = proof.partition("::")
            if proof != HERE:
                assert (ROOT / path).exists(), f"{name} cites {path}"
                assert f"def {test}" in (ROOT / path).read_text() if test else True, f"{name} cites {proof}"
    here = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    marked = set(re.findall(r'"([A-Z]\d+)"', " ".join(re.findall(r"mark\.row\(([^)]*)\)", here))))
    assert marked == {name for name, row in ROWS.items() if HERE in row.proofs}
