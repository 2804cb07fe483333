"""Functions of the user that get the records of a run.  tests/ranks/test_python_api.py calls them from a run."""

from typing import Any

import pytest
import torch

from sft.metrics.callbacks import Callbacks
from tests.unit.metric_values import START, evaluation, questions, train


def test_each_function_gets_copies_of_its_records_and_changes_nothing() -> None:
    steps: list[Any] = []
    sets: list[Any] = []

    def on_step(record: dict[str, Any]) -> None:
        steps.append(record["lm loss"])
        torch.manual_seed(0)
        record["loss by position"].clear()

    callbacks = Callbacks(on_step, lambda record: sets.append(record["set"]))
    record, before = train(), torch.get_rng_state()
    for each in (START, record, questions(), evaluation()):
        callbacks.write(each)
    assert (steps, sets, callbacks.error) == ([1.5], ["eval"], None)
    assert record == train() and torch.equal(torch.get_rng_state(), before)
    Callbacks().write(record)


def test_after_an_exception_the_run_is_asked_to_stop_once() -> None:
    asked: list[str] = []

    def fails(record: dict[str, Any]) -> None:
        raise OSError("no\nserver")

    callbacks = Callbacks(fails, lambda record: pytest.fail("called after the exception"), asked.append)
    for each in (train(), train(), evaluation()):
        callbacks.write(each)
    assert asked == ["on_step raised OSError: no server"] and isinstance(callbacks.error, OSError)
