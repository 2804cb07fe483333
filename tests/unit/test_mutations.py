"""The table of deliberate faults fits the code: each line is there once, each fault compiles, each test exists."""

import pytest

from tests.mutations.table import REPOSITORY, Fault, read_table

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
