"""What MLflow gets: a stand-in for the package, which obeys MLflow's rules of names and params."""

import importlib.machinery
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from sft.errors import ConfigError, TrainingError
from sft.metrics.writers import BestEffortWriter, Mlflow, mlflow_name, open_writers
from tests.unit.fixtures.logs import console, log_of
from tests.unit.metric_values import config, evaluation, result, totals

ALLOWED = r"[/\w.\- ]+"  # of mlflow.utils.validation (MLflow 3.17), the rule on Windows, which is the stricter one


class Sent:
    """Numbers that a thread of MLflow sends; `wait` raises if they did not arrive."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.waits = fails, 0

    def wait(self) -> None:
        self.waits += 1
        if self.fails:
            raise ConnectionError("the service\nis gone.")


class FakeMlflow(types.ModuleType):
    """MLflow's functions for one active run.  `runs` holds the params, tags and metrics of each run by id."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.__spec__ = importlib.machinery.ModuleSpec("mlflow", None, origin="a stand-in")
        self.runs: dict[str, dict[str, Any]] = {}
        self.starts: list[tuple[str, str | None, str]] = []
        self.ends: list[str] = []
        self.sent: list[Sent] = []
        self.fails = ""

    def set_experiment(self, name: str) -> None:
        if self.fails == "start":
            raise RuntimeError("no server at this address.")
        self.experiment = name

    def start_run(self, run_id: str | None, run_name: str) -> Any:
        self.starts.append((self.experiment, run_id, run_name))
        self.active = run_id or f"run-{len(self.runs)}"
        run = self.runs.setdefault(self.active, {"params": {}, "tags": {}, "metrics": []})
        params = dict(run["params"])
        return types.SimpleNamespace(
            info=types.SimpleNamespace(run_id=self.active), data=types.SimpleNamespace(params=params)
        )

    def log_params(self, params: dict[str, str]) -> None:
        kept = self.runs[self.active]["params"]
        assert not kept.keys() & params.keys(), "MLflow refuses a param that has a value"
        kept.update(params)

    def set_tags(self, tags: dict[str, str]) -> None:
        self.runs[self.active]["tags"].update(tags)

    def log_metrics(self, metrics: dict[str, float], step: int, synchronous: bool) -> Sent:
        assert not synchronous and all(sent.waits for sent in self.sent), "one record is sent at a time"
        assert all(re.fullmatch(ALLOWED, name) for name in metrics)
        self.runs[self.active]["metrics"].append({"step": step, **metrics})
        self.sent.append(Sent(self.fails == "send"))
        return self.sent[-1]

    def end_run(self, status: str) -> None:
        self.ends.append(status)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
    stand_in = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", stand_in)
    return stand_in


def test_mlflow_gets_the_run_and_a_resumed_run_continues_it(tmp_path: Path, mlflow: FakeMlflow) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    for step, lr in ((0, "1e-3"), (2, "2e-3")):
        said, _ = console()
        recipe = config("log.mlflow=chats", "log.tensorboard=false", f"optim.lr={lr}")
        with log_of(open_writers(folder, recipe, step, said), said, step=step) as metrics:
            metrics.start()
            metrics.train(3, result(), seconds=2.0)
            metrics.evaluation(3, "eval", totals(), seconds=2.0)
    assert mlflow.starts == [("chats", None, "demo"), ("chats", "run-0", "demo")]
    assert (folder / "mlflow_id").read_text() == "run-0\n"
    params, tags = mlflow.runs["run-0"]["params"], mlflow.runs["run-0"]["tags"]
    assert (params["optim.lr"], params["model.rope.base"], params["log.mlflow"]) == ("0.001", "10000.0", "chats")
    assert (params["log.wandb"], params["log.tensorboard"]) == ("null", "false")
    assert tags == {"optim.lr": "0.002"}  # the only value that has changed
    sent = [
        (told["step"], told.get("lm loss"), told.get("lm loss validation")) for told in mlflow.runs["run-0"]["metrics"]
    ]
    assert sent == [(3, 1.5, None), (3, None, 1.5)] * 2
    assert mlflow.ends == ["FINISHED", "FINISHED"] and all(sent.waits for sent in mlflow.sent)
    assert sorted(file.name for file in folder.iterdir()) == ["metrics.jsonl", "mlflow_id"]


def test_names_that_mlflow_refuses(tmp_path: Path, mlflow: FakeMlflow) -> None:
    assert mlflow_name("loss by position/64K+/loss") == "loss by position/64K_plus/loss"
    assert mlflow_name("a@b") == "a_40_b"
    assert mlflow_name("lm loss validation/v1.2-x_y") == "lm loss validation/v1.2-x_y"
    assert mlflow_name("a:b") == "a_3a_b"  # a server on Windows refuses a colon
    writer = Mlflow(tmp_path, "chats", {})
    writer.write(evaluation(nll_by_source={"a@b": 5.0}, num_tokens_by_source={"a@b": 10}))
    assert mlflow.runs["run-0"]["metrics"][0]["loss by source/a_40_b/loss validation"] == 0.5


def test_mlflow_hears_that_the_run_failed(tmp_path: Path, mlflow: FakeMlflow) -> None:
    said, _ = console()
    writers = open_writers(tmp_path, config("log.mlflow=chats"), 0, said)
    with pytest.raises(TrainingError), log_of(writers, said):
        raise TrainingError("no number")
    assert mlflow.ends == ["FAILED"]


def test_mlflow_that_does_not_start_ends_the_run_before_anything_is_written(tmp_path: Path, mlflow: FakeMlflow) -> None:
    mlflow.fails = "start"
    message = "log.mlflow = chats: MLflow did not start: RuntimeError: no server at this address. "
    with pytest.raises(ConfigError, match=message):
        open_writers(tmp_path, config("log.mlflow=chats"), 0, console()[0])
    assert list(tmp_path.iterdir()) == []


def test_mlflow_that_fails_later_is_reported_once_and_ends_nothing(tmp_path: Path, mlflow: FakeMlflow) -> None:
    """The thread's failure shows when the next record is written."""
    mlflow.fails = "send"
    said, stream = console()
    with log_of([BestEffortWriter("MLflow", Mlflow(tmp_path, "chats", {}), said)], said) as metrics:
        for step in (1, 2, 3):
            metrics.train(step, result(), seconds=2.0)
    report = "MLflow gets no more records of this run: ConnectionError: the service is gone\n"
    assert stream.getvalue().count(report) == 1
    assert [told["step"] for told in mlflow.runs["run-0"]["metrics"]] == [1] and mlflow.ends == []
