"""Records in services; replacements of the packages, one of which applies MLflow's rules for names."""

import importlib.machinery
import re
import socket
import sys
import time
import types
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from sft.errors import ConfigError, TrainingError
from sft.metrics.prometheus_writer import Prometheus
from sft.metrics.writers import BestEffortWriter, Mlflow, Wandb, Writer, mlflow_name, open_writers
from tests.unit.fixtures.logs import console, log_of
from tests.unit.metric_values import config, evaluation, result, totals

ALLOWED = r"[/\w.\- ]+"  # from mlflow.utils.validation (MLflow 3.17): the rule on Windows, the stricter one


class FakeRun:
    """A run of W&B that only records calls."""

    def __init__(self, settings: dict[str, Any], fails: str) -> None:
        self.settings, self._fails = settings, fails
        self.axes: list[tuple[str, str | None]] = []
        self.logged: list[dict[str, float]] = []
        self.exit_codes: list[int] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, numbers: dict[str, float]) -> None:
        self._fail("log")
        self.logged.append(numbers)

    def finish(self, exit_code: int) -> None:
        self._fail("finish")
        self.exit_codes.append(exit_code)

    def _fail(self, what: str) -> None:
        if what == self._fails:
            raise ConnectionError("the service\nis gone.")


class FakeWandb(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="a stand-in")
        self.runs: list[FakeRun] = []
        self.fails = ""

    def init(self, **settings: Any) -> FakeRun:
        if self.fails == "init":
            raise RuntimeError("no API key configured.")
        self.runs.append(FakeRun(settings, self.fails))
        return self.runs[-1]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    stand_in = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    return stand_in


class Sent:
    """Numbers that a thread of MLflow sends; `wait` raises if they did not arrive."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.waits = fails, 0

    def wait(self) -> None:
        self.waits += 1
        if self.fails:
            raise ConnectionError("the service\nis gone.")


class FakeMlflow(types.ModuleType):
    """Functions of MLflow for one active run.  `runs` has the params, tags and metrics of each run by id."""

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


class FakeTrackio(types.ModuleType):
    """Records what a run of trackio gets."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.__spec__ = importlib.machinery.ModuleSpec("trackio", None, origin="a stand-in")
        self.names: list[str] = []
        self.logged: list[dict[str, float]] = []
        self.ends, self.fails = 0, False

    def init(self, *, project: str, name: str, config: dict, resume: str, **quiet: bool) -> Any:
        if self.fails:
            raise OSError("read-only\nfile system")
        assert not any(quiet.values())
        assert (project, resume, config["optim.lr"]) == ("chats", "allow", (1e-3, 2e-3)[len(self.names)])
        self.names.append(name)
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.logged.append({"step": step, **numbers})

    def finish(self) -> None:
        self.ends += 1


@pytest.fixture
def trackio(monkeypatch: pytest.MonkeyPatch) -> FakeTrackio:
    stand_in = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", stand_in)
    return stand_in


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
    stand_in = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", stand_in)
    return stand_in


def log_twice(folder: Path, key: str) -> None:
    """Logs a run that is resumed after step 2 with another learning rate.  Both starts log step 3 and its
    evaluation."""
    folder.mkdir()
    for step, lr in ((0, "1e-3"), (2, "2e-3")):
        said, _ = console()
        recipe = config(f"log.{key}=chats", "log.tensorboard=false", f"optim.lr={lr}")
        with log_of(open_writers(folder, recipe, step, said), said, step=step) as metrics:
            metrics.start()
            metrics.train(3, result(), seconds=2.0)
            metrics.evaluation(3, "eval", totals(), seconds=2.0)
    assert sorted(file.name for file in folder.iterdir()) == ["metrics.jsonl", f"{key}_id"]


def losses(records: list[dict[str, float]]) -> list[tuple[float, float | None, float | None]]:
    return [(told["step"], told.get("lm loss"), told.get("lm loss validation")) for told in records]


def test_wandb_gets_the_run_and_a_resumed_run_continues_it(tmp_path: Path, wandb: FakeWandb) -> None:
    folder = tmp_path / "demo"
    log_twice(folder, "wandb")
    kept = (folder / "wandb_id").read_text().strip()
    assert re.fullmatch(r"[0-9a-f]{12}", kept)
    expected = {"project": "chats", "id": kept, "resume": "allow", "dir": str(folder), "name": "demo"}
    for run, lr in zip(wandb.runs, (1e-3, 2e-3), strict=True):
        values = run.settings.pop("config")
        assert run.settings == expected
        assert (values["optim.lr"], values["model.rope.base"], values["log.wandb"]) == (lr, 10000.0, "chats")
        assert run.axes == [("step", None), ("*", "step")]
        assert losses(run.logged) == [(3, 1.5, None), (3, None, 1.5)]
        assert run.exit_codes == [0]


def test_mlflow_gets_the_run_and_a_resumed_run_continues_it(tmp_path: Path, mlflow: FakeMlflow) -> None:
    folder = tmp_path / "demo"
    log_twice(folder, "mlflow")
    assert mlflow.starts == [("chats", None, "demo"), ("chats", "run-0", "demo")]
    assert (folder / "mlflow_id").read_text() == "run-0\n"
    run = mlflow.runs["run-0"]
    params = run["params"]
    assert (params["optim.lr"], params["model.rope.base"], params["log.mlflow"]) == ("0.001", "10000.0", "chats")
    assert (params["log.wandb"], params["log.tensorboard"]) == ("null", "false")
    assert run["tags"] == {"optim.lr": "0.002"}  # the only value that has changed
    assert losses(run["metrics"]) == [(3, 1.5, None), (3, None, 1.5)] * 2
    assert mlflow.ends == ["FINISHED", "FINISHED"] and all(sent.waits for sent in mlflow.sent)


def test_names_that_mlflow_refuses(tmp_path: Path, mlflow: FakeMlflow) -> None:
    assert mlflow_name("loss by position/64K+/loss") == "loss by position/64K_plus/loss"
    assert mlflow_name("a@b") == "a_40_b"
    assert mlflow_name("lm loss validation/v1.2-x_y") == "lm loss validation/v1.2-x_y"
    assert mlflow_name("a:b") == "a_3a_b"  # a server on Windows refuses a colon
    writer = Mlflow(tmp_path, "chats", {})
    writer.write(evaluation(nll_by_source={"a@b": 5.0}, num_tokens_by_source={"a@b": 10}))
    assert mlflow.runs["run-0"]["metrics"][0]["loss by source/a_40_b/loss validation"] == 0.5


@pytest.mark.parametrize("error", [TrainingError("no number"), KeyboardInterrupt()])
def test_both_hear_that_the_run_failed(
    tmp_path: Path, wandb: FakeWandb, mlflow: FakeMlflow, error: BaseException
) -> None:
    said, _ = console()
    writers = open_writers(tmp_path, config("log.wandb=chats", "log.mlflow=chats"), 0, said)
    with pytest.raises(type(error)), log_of(writers, said):
        raise error
    assert wandb.runs[0].exit_codes == [1] and mlflow.ends == ["FAILED"]


@pytest.mark.parametrize(
    "key, why, left",
    [
        ("wandb", "W&B did not start: RuntimeError: no API key configured. ", ["wandb_id"]),
        ("mlflow", "MLflow did not start: RuntimeError: no server at this address. ", []),
    ],
)
def test_a_service_that_does_not_start_ends_the_run_before_anything_is_written(
    tmp_path: Path, wandb: FakeWandb, mlflow: FakeMlflow, key: str, why: str, left: list[str]
) -> None:
    wandb.fails, mlflow.fails = "init", "start"
    with pytest.raises(ConfigError, match=f"log.{key} = chats: {why}"):
        open_writers(tmp_path, config(f"log.{key}=chats"), 0, console()[0])
    assert [file.name for file in tmp_path.iterdir()] == left


@pytest.mark.parametrize("name, fails, num_told", [("W&B", "log", 0), ("W&B", "finish", 2), ("MLflow", "send", 1)])
def test_a_service_that_fails_later_is_reported_once_and_ends_nothing(
    tmp_path: Path, wandb: FakeWandb, mlflow: FakeMlflow, name: str, fails: str, num_told: int
) -> None:
    """An error of MLflow's thread is raised when the next record is written."""
    wandb.fails = mlflow.fails = fails
    said, stream = console()
    writer: Writer = Wandb(tmp_path, "chats", {}) if name == "W&B" else Mlflow(tmp_path, "chats", {})
    with pytest.raises(TrainingError), log_of([BestEffortWriter(name, writer, said)], said) as metrics:
        metrics.train(3, result(), seconds=2.0)
        metrics.evaluation(3, "eval", totals(), seconds=2.0)
        raise TrainingError("the error that ended the run")
    report = f"{name} gets no more records of this run: ConnectionError: the service is gone\n"
    assert stream.getvalue().count(report) == 1
    run = wandb.runs[0] if name == "W&B" else None
    logged, ends = (run.logged, run.exit_codes) if run else (mlflow.runs["run-0"]["metrics"], mlflow.ends)
    assert len(logged) == num_told and ends == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, wandb: FakeWandb) -> None:
    """Services that were opened before are closed, and learn that the run did not start."""
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(
        ConfigError, match="run.dir = .* cannot be written: .*metrics.jsonl is a folder, not a regular file"
    ):
        open_writers(tmp_path, config("log.wandb=p"), 0, console()[0])
    assert wandb.runs[0].exit_codes == [2]


def test_trackio_continues_the_run_of_the_same_name(tmp_path: Path, trackio: FakeTrackio) -> None:
    log_twice(tmp_path / "demo", "trackio")
    first, second = trackio.names
    assert first == second and first.startswith("demo-") and len(first) == len("demo-") + 12
    assert losses(trackio.logged) == [(3, 1.5, None), (3, None, 1.5)] * 2
    assert trackio.ends == 2


def test_trackio_that_does_not_start(tmp_path: Path, trackio: FakeTrackio) -> None:
    trackio.fails = True
    with pytest.raises(ConfigError, match="log.trackio = chats: trackio did not start: OSError: read-only"):
        open_writers(tmp_path, config("log.trackio=chats"), 0, console()[0])
    assert not (tmp_path / "metrics.jsonl").exists()


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def served(port: int) -> dict[str, float]:
    """The gauges that Prometheus would read."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.split(" ") for line in lines)}


def test_prometheus_reads_the_newest_numbers(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    said, _ = console()
    port = free_port()
    recipe = config(f"log.prometheus_port={port}", "log.tensorboard=false")
    with log_of(open_writers(tmp_path, recipe, 0, said), said) as metrics:
        metrics.start()
        assert served(port).keys() == {"sft_step", "sft_last_record_time_seconds"}
        metrics.train(3, result(), seconds=2.0)
        metrics.evaluation(3, "eval", totals(), seconds=2.0)
        gauges = served(port)
        assert (gauges["sft_step"], gauges["sft_lm_loss"], gauges["sft_lm_loss_validation"]) == (3.0, 1.5, 1.5)
        assert gauges["sft_loss_by_position_4K_plus_tokens"] == 0.0 and gauges["sft_passes_rank"] == 1.0
        assert abs(gauges["sft_last_record_time_seconds"] - time.time()) < 60
        with pytest.raises(ConfigError, match=f"log.prometheus_port = {port} cannot be opened"):
            Prometheus(port)
    with pytest.raises(urllib.error.URLError):
        served(port)


def test_names_that_prometheus_cannot_tell_apart(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    port = free_port()
    writer = Prometheus(port)
    sources = {"a-b": {"loss": 1.0, "tokens": 2}, "a_b": {"loss": 3.0, "tokens": 4}}
    writer.write({"kind": "train", "step": 1, "loss by source": sources})
    gauges = served(port)
    writer.close()
    assert gauges["sft_loss_by_source_a_b_loss"] == 1.0 and gauges["sft_loss_by_source_a_b_loss_"] == 3.0
