"""Writes the records of a run to metrics.jsonl, TensorBoard and Weights & Biases, on rank 0 only.

Decides the names of numbers in TensorBoard and W&B, and which records remain after a restart.
"""

import json
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from sft.atomic_files import replace_text
from sft.config import Config
from sft.config.keys import values
from sft.console import Console
from sft.errors import ConfigError
from sft.metrics.records import Record, flat
from sft.metrics.rows import ROWS

_NOT_DRAWN = {row.name for row in ROWS if not row.drawn}


class Writer(Protocol):
    def write(self, record: Record) -> None:
        """Write one record of any kind."""

    def close(self, exit_code: int = 0) -> None:
        """Close the writer after its last record.  `exit_code` is 0 if the run ended without an error."""


class JsonLines:
    """Writes metrics.jsonl.  `step` is the last completed step.

    Removes records of later steps, which a killed run left, so that no step is recorded twice.  Unless `is_evaluated`,
    removes the records of the evaluation after `step`, too.
    """

    def __init__(self, path: Path, step: int, *, is_evaluated: bool) -> None:
        _remove_after(path, step, is_evaluated)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self, exit_code: int = 0) -> None:
        self._file.close()


class TensorBoard:
    """Writes TensorBoard events.  TensorBoard hides events of an earlier start for steps later than `step`."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._events = SummaryWriter(str(folder), purge_step=step + 1)

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
    """The writers that the recipe asks for.  `step` is the last completed step.  Called on rank 0."""
    opened: list[Writer] = []
    try:
        # W&B comes first: if W&B does not start, no file has changed.
        if config.log.wandb is not None:
            opened.append(BestEffortWriter("W&B", Wandb(folder, config.log.wandb, values(config)), console))
        if config.log.tensorboard:
            opened.append(BestEffortWriter("TensorBoard", TensorBoard(folder / "tensorboard", step), console))
        opened.append(JsonLines(folder / "metrics.jsonl", step, is_evaluated=is_evaluated))
    except OSError as error:
        for writer in opened:
            writer.close(exit_code=2)
        raise ConfigError(f"run.dir = {folder} cannot be written: {error}.") from error
    return opened[::-1]


def scalars(record: Record) -> dict[str, float]:
    """The numbers that TensorBoard and W&B draw over steps, with Megatron-LM's names.  A `start` record has none.

    step -> `lm loss`        held-out set `eval` -> `lm loss validation`        other set -> `lm loss validation/NAME`
    """
    if record["kind"] == "start":
        return {}
    suffix = ""
    if record["kind"] == "eval":
        suffix = " validation" if record["set"] == "eval" else f" validation/{record['set']}"
    return {name + suffix: float(value) for name, value in flat(record) if name not in _NOT_DRAWN and value is not None}


def _remove_after(path: Path, step: int, is_evaluated: bool) -> None:
    """Remove the records of steps after `step`, and an incomplete last line.  Replaces the file atomically."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        is_repeated = record["kind"] == "eval" and record["step"] == step and not is_evaluated
        if record["step"] <= step and not is_repeated:
            kept.append(line + "\n")
    replace_text(path, "".join(kept))


def _kept_id(path: Path) -> str:
    """The id in the file.  If there is no file, creates it with a new id."""
    if path.exists():
        return path.read_text(encoding="ascii").strip()
    new_id = uuid.uuid4().hex[:12]
    replace_text(path, new_id + "\n")
    return new_id


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
