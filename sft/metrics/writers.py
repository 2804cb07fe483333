"""Where the records of a run go: metrics.jsonl, TensorBoard, Weights & Biases, and a line on the console.

Decides what a number is called there, and what is still there after a restart.  What the numbers are and how they
are made is `metrics.py`'s business.  Only rank 0 has writers.
"""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from sft.atomic_files import replace_text
from sft.config import Config
from sft.config.keys import values
from sft.console import Console, duration
from sft.errors import ConfigError, StorageError
from sft.metrics.records import SCHEMA, Record, flat
from sft.parallel.collectives import broadcast_from_rank0

_NO_NUMBERS = ("kind", "step", "set")


class Writer(Protocol):
    def write(self, record: Record) -> None:
        """One record, of any kind."""

    def close(self, exit_code: int = 0) -> None:
        """Nothing more comes; `exit_code` is 0 where the run did all it was to do."""


class JsonLines:
    """metrics.jsonl.  `step` is the last one done: records of later ones are of a run that was cut off, and are
    removed, so that no step is told twice; so are those of its evaluation unless `is_evaluated`."""

    def __init__(self, path: Path, step: int, *, is_evaluated: bool) -> None:
        _forget_after(path, step, is_evaluated)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self, exit_code: int = 0) -> None:
        self._file.close()


class TensorBoard:
    """Events in a folder.  Those after `step`, the last one done, are hidden by TensorBoard."""

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
    """A run of Weights & Biases, which goes on where the run of this folder goes on: its id lies in `wandb_id`.

    W&B refuses to go back in its own steps, and a run that continues tells those after the checkpoint again.  So the
    step is a metric among the others, and the x-axis of all of them.

    Raises ConfigError where W&B cannot be started.
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
        except Exception as error:  # wandb passes on whatever its service, its files and the network raise
            raise ConfigError(
                f"log.wandb = {project}: W&B did not start: {_one_line(error)}.  Run `wandb login` first, keep the "
                "run on this machine with WANDB_MODE=offline, or go without: log.wandb=null."
            ) from error

    def write(self, record: Record) -> None:
        if numbers := scalars(record):
            self._run.log({"step": record["step"], **numbers})

    def close(self, exit_code: int = 0) -> None:
        self._run.finish(exit_code=exit_code)


class Spared:
    """A writer whose failure ends no run: it is told once, and gets nothing more.  metrics.jsonl has it all."""

    def __init__(self, name: str, writer: Writer, console: Console) -> None:
        self._name, self._console = name, console
        self._writer: Writer | None = writer

    def write(self, record: Record) -> None:
        self._try(lambda writer: writer.write(record))

    def close(self, exit_code: int = 0) -> None:
        self._try(lambda writer: writer.close(exit_code))
        self._writer = None

    def _try(self, tell: Callable[[Writer], object]) -> None:
        if self._writer is None:
            return
        try:
            tell(self._writer)
        except Exception as error:  # whatever a service, the network or a thread of theirs met
            self._writer = None
            self._console.say(f"{self._name} gets nothing more of this run: {_one_line(error)}")


def open_writers(
    folder: Path, config: Config, step: int, console: Console, *, is_evaluated: bool = False
) -> list[Writer]:
    """What the recipe asks for, in the run's folder; `step` is the last one done.  For rank 0."""
    opened: list[Writer] = []
    try:
        # The one that may refuse comes first: before any file is touched.
        if config.log.wandb is not None:
            opened.append(Spared("W&B", Wandb(folder, config.log.wandb, values(config)), console))
        if config.log.tensorboard:
            opened.append(Spared("TensorBoard", TensorBoard(folder / "tensorboard", step), console))
        opened.append(JsonLines(folder / "metrics.jsonl", step, is_evaluated=is_evaluated))
    except OSError as error:
        for writer in opened:
            writer.close(exit_code=2)
        raise ConfigError(f"run.dir = {folder} cannot be written: {error}.") from error
    return opened[::-1]


def open_on_rank0(folder: Path, config: Config, step: int, console: Console, *, is_evaluated: bool) -> list[Writer]:
    """`open_writers` on rank 0; the other ranks have none.  Collective."""
    writers: list[Writer] = []
    broadcast_from_rank0(lambda: writers.extend(open_writers(folder, config, step, console, is_evaluated=is_evaluated)))
    return writers


class Metrics:
    """Hands the records of a run to its writers, and says on the console what a person follows.

    `step` is the last one already done.  As a context: the writers are closed, and told how the run ended.
    """

    def __init__(
        self, writers: Sequence[Writer], console: Console, *, step: int, num_steps: int, every: int = 1
    ) -> None:
        self._writers, self._console = writers, console
        self._num_steps, self._every = num_steps, every
        self._first, self._busy_s = step, 0.0
        self._losses: dict[str, list[tuple[int, float]]] = {"train": []}

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with ExitStack() as each:  # all are closed, even if one fails
            for writer in self._writers:
                each.callback(writer.close, int(error is not None))

    def start(self, facts: Record) -> None:
        """Note the beginning (or continuation) of a run."""
        self._write({"schema": SCHEMA, "kind": "start", "step": self._first, "time": time.time(), **facts})

    def train(self, record: Record) -> None:
        self._remember("train", record)
        self._busy_s += record["step-time-s"]
        self._write(record)
        step = record["step"]
        if step % self._every == 0 or step == self._num_steps:
            self._console.say(self._line(record))

    def eval(self, record: Record) -> None:
        name = "held-out" if record["set"] == "eval" else f"held-out {record['set']}"
        self._remember(name, record)
        self._write(record)
        self._console.say(
            f"{name} after step {record['step']}: lm loss {_number(record['lm loss'])} on "
            f"{record['tokens/supervised']:,} supervised tokens, {record['eval-time-s']:.1f} s"
        )

    def summarise(self) -> None:
        """How far the loss came, first to last of what this process did."""
        for name, losses in self._losses.items():
            if losses:
                (first, before), (last, after) = losses[0], losses[-1]
                self._console.say(f"lm loss, {name}: {before:.4f} (step {first}) -> {after:.4f} (step {last})")

    def _line(self, record: Record) -> str:
        step, width = record["step"], len(str(self._num_steps))
        left = self._busy_s / (step - self._first) * (self._num_steps - step)  # evaluation and saving not counted
        why = "not a number" if record["bad"] else "no supervised token"
        note = f" | skipped: {why}" if record["skipped"] else ""
        return (
            f"step {step:>{width}}/{self._num_steps} | lm loss {_number(record['lm loss'])} | "
            f"grad-norm {_norm(record['grad-norm'])} | lr {record['learning-rate']:.2e} | "
            f"supervised {record['tokens/supervised']:>9,} of {record['tokens/real']:>11,} tokens | "
            f"{record['tokens-per-second']:>9,.0f} tok/s | {record['step-time-s']:6.2f} s | left {duration(left)}{note}"
        )

    def _remember(self, name: str, record: Record) -> None:
        if record["lm loss"] is not None:
            self._losses.setdefault(name, []).append((record["step"], record["lm loss"]))

    def _write(self, record: Record) -> None:
        try:
            for writer in self._writers:
                writer.write(record)
        except OSError as error:
            raise StorageError(
                f"the numbers of step {record['step']} cannot be written: {error}.  The last checkpoint is whole."
            ) from error


def scalars(record: Record) -> dict[str, float]:
    """The numbers that are drawn over steps, by the names Megatron-LM users know; none of a `start`.

    `lm loss`, of the held-out set `eval` `lm loss validation`, of another one `lm loss validation/NAME`
    """
    if record["kind"] == "start":
        return {}
    suffix = ""
    if record["kind"] == "eval":
        suffix = " validation" if record["set"] == "eval" else f" validation/{record['set']}"
    return {
        name + suffix: float(value) for name, value in flat(record) if name not in _NO_NUMBERS and value is not None
    }


def _forget_after(path: Path, step: int, is_evaluated: bool) -> None:
    """Drop the records of steps after `step`, by a new file and a rename; a last line cut short goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        again = record["kind"] == "eval" and record["step"] == step and not is_evaluated  # told anew
        if record["step"] <= step and not again:
            kept.append(line + "\n")
    replace_text(path, "".join(kept))


def _kept_id(path: Path) -> str:
    """What the file holds; made up where there is none yet."""
    if path.exists():
        return path.read_text(encoding="ascii").strip()
    made_up = uuid.uuid4().hex[:12]
    replace_text(path, made_up + "\n")
    return made_up


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")


def _number(loss: float | None) -> str:
    return "      -" if loss is None else f"{loss:7.4f}"


def _norm(norm: float | None) -> str:
    return "        -" if norm is None else f"{norm:9.3f}"
