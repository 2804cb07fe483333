"""The parts of the probes that need no ranks."""

from pathlib import Path

import pytest
import torch

from sft.data.packing.pack import Collator
from sft.errors import ConfigError
from sft.mcore.hidden_states import sketch
from sft.probe.inputs import runs
from sft.probe.report import ProbeReport, check_path
from tests.builders import sample

# The norm of a sketch of 8 projections varies by a quarter.  Its mean over 1,000 hidden states varies by 1%.
MEAN_TOLERANCE = 0.05


def test_sketches_are_equal_only_for_equal_states() -> None:
    """One changed bit in the smallest of 1,000 numbers changes the sketch."""
    state = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1))
    changed = state.clone()
    smallest = changed[1].abs().argmin()
    changed[1, smallest] = torch.nextafter(changed[1, smallest], torch.tensor(torch.inf))
    assert (sketch(state) == sketch(changed)).all(dim=1).tolist() == [True, False, True]


def test_sketches_keep_norms() -> None:
    state = torch.randn(1000, 64, generator=torch.Generator().manual_seed(1))
    ratios = sketch(state).square().sum(1) / state.double().square().sum(1)
    assert float(ratios.mean()) == pytest.approx(1, abs=MEAN_TOLERANCE)


def test_runs_of_a_rank() -> None:
    """Documents of 8 and 4 tokens on cp rank 0 of 2: tokens 0 1 6 7 of the first document, and 0 and 3 of the
    second."""
    mb = Collator(doc_multiple=4, pad_id=0, cp_size=2).microbatch([sample(range(8)), sample(range(4))])
    assert runs(mb) == [(0, 0, 2), (0, 6, 8), (1, 0, 1), (1, 3, 4)]


def test_a_result_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    check_path(tmp_path / "a.json")
    for path in (tmp_path / "missing" / "a.json", tmp_path):
        with pytest.raises(ConfigError, match=f"--json {path} cannot be written"):
            check_path(path)


def test_verdicts() -> None:
    passed = ProbeReport(probe="leak", problems=[], checked="nothing leaks", lines=[], facts={})
    assert passed.verdict == "leak: PASS: nothing leaks"
    failed = ProbeReport(probe="leak", problems=["one", "two"], checked="nothing leaks", lines=[], facts={})
    assert failed.verdict == "leak: FAIL: one (and 1 more)"
