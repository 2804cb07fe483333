"""The end of an evaluation.  tests/ranks/test_run.py tests the whole loop."""

from types import SimpleNamespace
from typing import Any

import pytest

import sft.evaluation.held_out
from sft.config import TrainConfig
from sft.errors import TrainingError
from sft.run import evaluation
from sft.run.evaluation import Evaluator
from tests.unit.fixtures.logs import console
from tests.unit.metric_values import config, run_of, totals


def evaluator(**config: Any) -> Evaluator:
    engine: Any = "an engine"
    lifecycle: Any = SimpleNamespace(phase=lambda name: None, stop_reason=lambda: None)
    sets: Any = {"chat": SimpleNamespace(sources=())}
    return Evaluator(
        engine, sets, TrainConfig(global_batch_size=1, **config), lifecycle, num_steps=10, suites=(), pad_id=0
    )


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_non_finite_held_out_loss_ends_the_run(loss: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks have the same totals, so all of them end."""
    monkeypatch.setattr(evaluation, "evaluate", lambda engine, loader, goes_on: totals(objective=loss))
    metrics: Any = "where nothing is written"
    message = f"held-out loss of chat after step 0 is {loss}; the run ends without a save"
    with pytest.raises(TrainingError, match=message):
        evaluator(num_steps=10).run(0, metrics)


def test_sft_eval_refuses_a_non_finite_loss_and_prints_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, (said, stream) = config(), console()
    engine: Any = SimpleNamespace(config=recipe, layout=run_of(recipe).layout, vocab_size=10)
    data: Any = SimpleNamespace(held_out={"chat": None})
    monkeypatch.setattr(sft.evaluation.held_out, "evaluate", lambda engine, loader: totals(objective=float("nan")))
    with pytest.raises(TrainingError, match="the held-out loss of chat after step 4 is nan."):
        sft.evaluation.held_out.score(engine, data, said, 4)
    assert stream.getvalue() == ""


def test_when_an_evaluation_is_due() -> None:
    due = evaluator(num_steps=10, eval_every=4)
    assert [step for step in range(11) if due.is_due(step)] == [0, 4, 8, 10]
    assert [step for step in range(11) if evaluator(num_steps=10).is_due(step)] == [0, 10]
    assert due.is_due(13)  # the run was longer before
