"""Writes the records of a run to metrics.jsonl, TensorBoard, Weights & Biases and MLflow, on rank 0 only.

`open_writers` also opens trackio and Prometheus.  This module decides which records remain after a restart.
"""

import json
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from sft.config import Config
from sft.config.keys import values
from sft.console import QUIET, Console
from sft.errors import ConfigError, first_few
from sft.files.atomic_files import append, replace_text, unusable
from sft.files.folder_files import LINE_BYTES, METRICS_BYTES, WORD_BYTES, UnsafeFileError, read_file
from sft.metrics.long_records import LONG
from sft.metrics.prometheus_writer import Prometheus
from sft.metrics.records import Record
from sft.metrics.scalars import scalars
from sft.metrics.trackio_writer import Trackio


class Writer(Protocol):
    """Writes the records of a run to one place."""

    def write(self, record: Record) -> None:
        """Write one record of any kind."""

    def close(self, exit_code: int = 0) -> None:
        """Close the writer after its last record.  `exit_code` is 0 if the run ended without an error."""


class JsonLines:
    """Writes metrics.jsonl.

    step          the last completed step.  Records of later steps, which a killed run left, are removed, so that no
                  step is recorded twice
    is_evaluated  whether the evaluation after `step` was completed; if not, its records are removed, too
    console       prints a warning about damaged lines, which are removed
    """

    def __init__(self, path: Path, step: int, *, is_evaluated: bool, console: Console = QUIET) -> None:
        if os.path.lexists(path) and (damaged := _remove_after(path, step, is_evaluated)):
            console.say(
                f"WARNING: {path} had lines that are no records, which were removed: {', '.join(first_few(damaged))}"
            )
        self._file = path.open("ab", buffering=0)

    def write(self, record: Record) -> None:
        append(self._file, json.dumps(record, allow_nan=False).encode("ascii") + b"\n")

    def close(self, exit_code: int = 0) -> None:
        self._file.close()


class TensorBoard:
    """Writes TensorBoard events, and makes TensorBoard hide events of earlier starts that this start writes again.

    step          the last completed step; events of later steps are hidden
    is_evaluated  whether the evaluation after `step` was completed.  If not, the events of `step` are hidden, too, and
                  `of_step` is written again
    of_step       the records of the optimizer step `step`
    """

    def __init__(self, folder: Path, step: int, *, is_evaluated: bool, of_step: Iterable[Record] = ()) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._events = SummaryWriter(str(folder), purge_step=step + is_evaluated)
        for record in () if is_evaluated else of_step:
            self.write(record)

    def write(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._events.add_scalar(name, value, record["step"])
        self._events.flush()

    def close(self, exit_code: int = 0) -> None:
        self._events.close()


class Wandb:
    """Logs to Weights & Biases.  A resumed run continues the same W&B run, whose id is in the file `wandb_id`.

    W&B accepts no step below the last one, but a resumed run logs the steps after its checkpoint again.  So the step is
    logged as a metric, which is the x-axis of all other metrics.

    Raises ConfigError if W&B does not start.
    """

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        import wandb  # optional, and slow to import

        try:
            self._run: Any = wandb.init(
                project=project,
                id=_kept_id(folder / "wandb_id"),
                resume="allow",
                dir=str(folder),
                name=folder.resolve().name,
                config=dict(config),
            )
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except Exception as error:  # wandb may raise any error of its service, of files and of the network
            raise ConfigError(
                f"log.wandb = {project}: W&B did not start: {_one_line(error)}.  Run `wandb login` first, keep the "
                "run on this machine with WANDB_MODE=offline, or switch W&B off with log.wandb=null."
            ) from error

    def write(self, record: Record) -> None:
        if numbers := scalars(record):
            self._run.log({"step": record["step"], **numbers})

    def close(self, exit_code: int = 0) -> None:
        self._run.finish(exit_code=exit_code)


class Mlflow:
    """Logs to MLflow.  A resumed run continues the same MLflow run, whose id is in the file `mlflow_id`.

    A param of MLflow never changes.  So the params are the values at the first start, and a value that has changed
    since then is a tag with the name of the param.

    Raises ConfigError if MLflow does not start.
    """

    def __init__(self, folder: Path, experiment: str, config: Mapping[str, Any]) -> None:
        import mlflow  # optional, and slow to import

        self._mlflow: Any = mlflow
        self._pending: Any = None  # the numbers of the last record, which a thread of MLflow sends
        id_file = folder / "mlflow_id"
        values = {mlflow_name(key): _text(value) for key, value in config.items()}
        kept_id = _read_id(id_file) if id_file.exists() else None
        try:
            mlflow.set_experiment(experiment)
            run = mlflow.start_run(run_id=kept_id, run_name=folder.resolve().name)
            params = run.data.params
            mlflow.log_params({key: text for key, text in values.items() if key not in params})
            mlflow.set_tags({key: text for key, text in values.items() if params.get(key, text) != text})
        except Exception as error:  # mlflow may raise any error of its service and of its libraries
            raise ConfigError(
                f"log.mlflow = {experiment}: MLflow did not start: {_one_line(error)}.  Set MLFLOW_TRACKING_URI to "
                "the server or database, or switch MLflow off with log.mlflow=null."
            ) from error
        replace_text(id_file, run.info.run_id + "\n")

    def write(self, record: Record) -> None:
        if numbers := scalars(record):
            self._wait()
            named = {mlflow_name(name): value for name, value in numbers.items()}
            self._pending = self._mlflow.log_metrics(named, step=record["step"], synchronous=False)

    def close(self, exit_code: int = 0) -> None:
        self._wait()
        self._mlflow.end_run("FINISHED" if exit_code == 0 else "FAILED")

    def _wait(self) -> None:
        """Wait until the numbers of the last record are sent.  Raises MlflowException if they were not."""
        if self._pending is not None:
            self._pending.wait()


class BestEffortWriter:
    """A writer whose failure does not end the run.  A failure is reported, and the writer gets no more records."""

    def __init__(self, name: str, writer: Writer, console: Console) -> None:
        self._name, self._console = name, console
        self._writer: Writer | None = writer

    def write(self, record: Record) -> None:
        self._try(lambda writer: writer.write(record))

    def close(self, exit_code: int = 0) -> None:
        self._try(lambda writer: writer.close(exit_code))
        self._writer = None

    def _try(self, call: Callable[[Writer], object]) -> None:
        if self._writer is None:
            return
        try:
            call(self._writer)
        except Exception as error:  # any error of a service, of the network or of a library's thread
            self._writer = None
            self._console.say(f"{self._name} gets no more records of this run: {_one_line(error)}")


def open_writers(
    folder: Path, config: Config, step: int, console: Console, *, is_evaluated: bool = False
) -> list[Writer]:
    """The writers of the recipe.  step: the last completed step; is_evaluated: as for JsonLines.  Called on rank 0.

    Raises ConfigError or StorageError if a writer cannot be opened.
    """
    opened: list[Writer] = []
    try:
        # Services come first: if one of them does not start, no record has changed.
        if config.log.wandb is not None:
            opened.append(BestEffortWriter("W&B", Wandb(folder, config.log.wandb, values(config)), console))
        if config.log.mlflow is not None:
            opened.append(BestEffortWriter("MLflow", Mlflow(folder, config.log.mlflow, values(config)), console))
        if config.log.trackio is not None:
            name = f"{folder.resolve().name}-{_kept_id(folder / 'trackio_id')}"
            opened.append(BestEffortWriter("trackio", Trackio(config.log.trackio, name, values(config)), console))
        if config.log.prometheus_port is not None:
            opened.append(BestEffortWriter("Prometheus", Prometheus(config.log.prometheus_port), console))
        if config.log.tensorboard:
            of_step = _train_records(folder / "metrics.jsonl", step)
            tensorboard = TensorBoard(folder / "tensorboard", step, is_evaluated=is_evaluated, of_step=of_step)
            opened.append(BestEffortWriter("TensorBoard", tensorboard, console))
        opened.append(JsonLines(folder / "metrics.jsonl", step, is_evaluated=is_evaluated, console=console))
    except (OSError, UnsafeFileError, ConfigError) as error:
        for writer in opened:
            writer.close(exit_code=2)
        message = f"run.dir = {folder} cannot be written"
        if isinstance(error, OSError):
            raise unusable(message, folder, error) from error
        raise error if isinstance(error, ConfigError) else ConfigError(f"{message}: {error}.")
    return opened[::-1]


def mlflow_name(name: str) -> str:
    """The name of a number or param in MLflow, which allows letters, digits, "_", "-", ".", " " and "/".

    "loss by position/64K+/loss" -> "loss by position/64K_plus/loss".  Any other character becomes its code point in
    hex: "a@b" -> "a_40_b".  MLflow also allows ":", but not on Windows.
    """
    return re.sub(r"[^/\w.\- ]", lambda match: f"_{ord(match[0]):x}_", name.replace("+", "_plus"))


def _text(value: Any) -> str:
    """A value of the recipe as a param of MLflow: a text as it is, any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _remove_after(path: Path, step: int, is_evaluated: bool) -> list[str]:
    """Remove the records of steps after `step`, damaged lines, and an incomplete last line.

    The file is replaced atomically.  Returns "line 3" for each damaged line, but not for an incomplete last line.
    """
    kept, damaged = [], []
    lines = read_file(path, METRICS_BYTES).split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            record: Any = json.loads(line.decode()) if len(line) <= LINE_BYTES else None
            is_record = isinstance(record["kind"], str) and type(record["step"]) is int
        except (ValueError, LookupError, TypeError, RecursionError):
            is_record = False
        if not is_record:
            damaged += [f"line {number}"] if number < len(lines) else []
            continue
        is_repeated = record["kind"] in ("eval", LONG) and record["step"] == step and not is_evaluated
        if record["step"] <= step and not is_repeated:
            kept.append(line.decode() + "\n")
    replace_text(path, "".join(kept))
    return damaged


def _train_records(path: Path, step: int) -> Iterator[Record]:
    """The records in metrics.jsonl of the optimizer step `step`.  Lines that are no records are left out."""
    for line in read_file(path, METRICS_BYTES).split(b"\n") if path.exists() else ():
        with suppress(ValueError, LookupError, TypeError, RecursionError):
            record: Any = json.loads(line.decode()) if len(line) <= LINE_BYTES else None
            if (record["kind"], record["step"]) == ("train", step):
                yield record


def _kept_id(path: Path) -> str:
    """The id of the run that the file contains.  If there is no file, makes one with a new id."""
    if path.exists():
        return _read_id(path)
    new_id = uuid.uuid4().hex[:12]
    replace_text(path, new_id + "\n")
    return new_id


def _read_id(path: Path) -> str:
    try:
        return read_file(path, WORD_BYTES).decode("ascii").strip()
    except ValueError as error:  # not a file, too large, or not ASCII
        raise ConfigError(f"{path} does not hold the id of a run: {error}.  Remove it to begin a new one.") from error


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
