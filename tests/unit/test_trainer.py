"""What ends a run.  The whole loop is tested in tests/ranks/test_run.py."""

from types import SimpleNamespace

import pytest

from sft import trainer
from sft.checkpoint.train_state import TrainState
from sft.errors import TrainingError
from tests.unit.test_metrics import totals


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_held_out_loss_that_is_no_number_ends_the_run(loss: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks have the same totals, so all end together."""
    monkeypatch.setattr(trainer, "evaluate", lambda engine, loader, goes_on: totals(loss=loss))
    run = trainer.Run.__new__(trainer.Run)
    run.feed, run.engine = SimpleNamespace(held_out={"chat": "a loader"}), "an engine"  # type: ignore[assignment]
    with pytest.raises(TrainingError, match=f"held-out loss of chat after step 0 is {loss}; nothing was saved"):
        run._evaluate("chat", "a loader", TrainState())  # type: ignore[arg-type]
