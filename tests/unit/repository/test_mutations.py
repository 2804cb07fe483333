"""The table of deliberate faults fits the code: each line occurs once, each fault compiles, and each test exists."""

import pytest

from tests.mutations.table import REPOSITORY, Fault, read_table, sample

FAULTS = read_table()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_the_code(fault: Fault) -> None:
    changed = fault.apply(REPOSITORY)
    if fault.file.endswith(".py"):
        compile(changed, fault.file, "exec")
    for argument in fault.tests.split():
        file, _, test = argument.partition("::")
        assert (REPOSITORY / file).is_file(), argument
        assert not test or f"def {test.split('::')[-1].split('[')[0]}(" in (REPOSITORY / file).read_text(), argument


def test_no_fault_stands_twice() -> None:
    assert len({fault.name for fault in FAULTS}) == len({(fault.file, fault.line, fault.becomes) for fault in FAULTS})
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def fault(number: int, tests: str) -> Fault:
    return Fault(room="any", fault=str(number), file="", line="", becomes="", tests=tests)


def test_a_sample_holds_few_slow_faults_and_any_fault_can_be_in_it() -> None:
    quick = [fault(number, "tests/unit/test_a.py") for number in range(20)]
    slow = [fault(number, "tests/unit/test_a.py tests/ranks/test_b.py") for number in range(20, 25)]
    faults = [*slow, *quick]
    drawn = [sample(faults, 10, str(seed)) for seed in range(200)]
    assert all(sum(found.is_slow for found in chosen) == 1 and len({*chosen}) == 10 for chosen in drawn)
    assert {found for chosen in drawn for found in chosen} == {*faults}
    assert sample(faults, 10, "7") == drawn[7]
    assert sample(slow, 10, "7") != slow and {*sample(slow, 10, "7")} == {*slow}
    assert {*sample(quick, 30, "7")} == {*quick} and {*sample(faults, 25, "7")} == {*faults}
    assert [found.is_slow for found in sample(faults, 22, "7")].count(True) == 3
