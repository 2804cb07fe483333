"""Writes a record of each start, step, held-out pass and length of questions of a run, and prints lines about them."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from sft.console import Console, duration
from sft.errors import StorageError
from sft.files.atomic_files import unusable, why_not_written
from sft.metrics.callbacks import Callbacks
from sft.metrics.long import LongScores, table
from sft.metrics.long_records import AnswersOfRun, answers_of_run
from sft.metrics.records import Record, eval_record, long_record, start_record, train_record
from sft.metrics.results.records import RunError, read_records
from sft.metrics.run_facts import RunFacts
from sft.metrics.stragglers import Stragglers
from sft.metrics.totals import StepResult, Totals
from sft.metrics.writers import Writer, open_writers
from sft.parallel.collectives import broadcast_from_rank0


class MetricsLog:
    """The metrics log of one run, a context.  Only rank 0 has writers.

    step: the last step that was completed before this start; num_steps: the number of steps of the whole run
    Methods that write raise StorageError.  The end of the context closes the writers, with exit code 1 if the run
    failed.
    """

    def __init__(
        self, folder: Path, writers: Sequence[Writer], console: Console, run: RunFacts, *, step: int, num_steps: int
    ) -> None:
        self._folder, self._writers, self._console, self._run = folder, writers, console, run
        self._num_steps, self._every = num_steps, run.config.log.every
        self._first, self._busy_s = step, 0.0
        self.last: Record | None = None  # the record of the last optimizer step that was logged
        self._losses: dict[str, list[tuple[int, float]]] = {"train": []}
        self._stragglers = Stragglers()

    @staticmethod
    def open(
        folder: Path,
        console: Console,
        run: RunFacts,
        group: dist.ProcessGroup,
        *,
        step: int,
        num_steps: int,
        is_evaluated: bool,
        callbacks: Callbacks | None = None,
    ) -> "MetricsLog":
        """The log in the run's folder.  Collective over `group`.

        is_evaluated  whether the held-out pass after `step` was completed; if not, the records of this pass are removed
        callbacks     functions of the user, which rank 0 calls
        """
        writers: list[Writer] = []

        def open_all() -> None:
            writers.extend(open_writers(folder, run.config, step, console, is_evaluated=is_evaluated))
            writers.extend([] if callbacks is None else [callbacks])  # last: the record is in metrics.jsonl then

        broadcast_from_rank0(open_all, group)
        return MetricsLog(folder, writers, console, run, step=step, num_steps=num_steps)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with ExitStack() as closing:  # closes all writers, even if closing one of them fails
                for writer in self._writers:
                    closing.callback(writer.close, int(error is not None))
        except OSError as failure:
            if error is None:  # otherwise the run ends with `error`, which is its first failure
                raise unusable("the numbers of the run cannot be written", self._folder, failure) from failure

    def start(self) -> None:
        """Log that the run begins, or continues after a restart."""
        self._write(start_record(self._first, self._run, num_steps=self._num_steps))

    def train(self, step: int, result: StepResult, *, seconds: float) -> None:
        """Log an optimizer step, which took `seconds`."""
        record = train_record(step, result, self._run, seconds=seconds)
        self.last = record
        self._remember("train", record)
        self._busy_s += seconds
        self._write(record)
        if step % self._every == 0 or step == self._num_steps:
            self._console.say(self._line(record))
        if slow := self._stragglers.after(result, seconds):
            self._console.say(slow)

    def evaluation(self, step: int, set_name: str, totals: Totals, *, seconds: float) -> Record:
        """Log a pass over a held-out set after `step`, which took `seconds`."""
        record = eval_record(step, totals, self._run, set_name=set_name, seconds=seconds)
        name = "held-out" if set_name == "eval" else f"held-out {set_name}"
        self._remember(name, record)
        self._write(record)
        self._console.say(
            f"{name} after step {step}: lm loss {_number(record['lm loss'])} on "
            f"{record['tokens/supervised']:,} supervised tokens, {seconds:.1f} s"
        )
        return record

    def questions(self, step: int, by_length: Sequence[tuple[LongScores, float]]) -> None:
        """Log the answers to long-context questions after `step`, and print warnings about what fell below the start.

        by_length: for each length its scores and the seconds that it took
        """
        for scores, seconds in by_length:
            self._write(long_record(step, scores, self._run, seconds=seconds))
        answers = {key: of_bin for scores, _ in by_length for key, of_bin in scores.answers.items()}
        answered = self._answers_of_run(step)
        before = answered.before if answered and answered.before else None
        total_s = sum(seconds for _, seconds in by_length)
        self._console.say(
            "\n".join([f"long-context questions after step {step}, {total_s:.1f} s", *table(answers, before)])
        )
        for fall in answered.falls if answered else ():
            self._console.say(f"WARNING: below the start of the run: {fall}")

    def _answers_of_run(self, step: int) -> AnswersOfRun | None:
        """The answers in metrics.jsonl, which an earlier start may have written; None on ranks without writers, and if
        the file is damaged."""
        try:
            return answers_of_run(read_records(self._folder), step) if self._writers else None
        except (RunError, LookupError, TypeError, ValueError) as error:
            self._console.say(f"WARNING: the answers are not compared with those at the start of the run: {error}")
            return None

    def summarise(self) -> None:
        """Print the first and the last loss of training and of each held-out set that this process logged."""
        for name, losses in self._losses.items():
            if losses:
                (first, before), (last, after) = losses[0], losses[-1]
                self._console.result(f"lm loss, {name}: {before:.4f} (step {first}) -> {after:.4f} (step {last})")

    def _line(self, record: Record) -> str:
        """A line of at most 120 columns; memory and MFU are in it where they are measured."""
        step, width = record["step"], len(str(self._num_steps))
        left = self._busy_s / (step - self._first) * (self._num_steps - step)  # without time for evaluation and saving
        gib, mfu = record.get("memory/reserved-gib"), record.get("mfu")
        parts = [
            f"step {step:>{width}}/{self._num_steps}",
            f"lm loss {_number(record['lm loss'])}",
            f"grad-norm {_norm(record['grad-norm'])}",
            f"lr {record['learning-rate']:.1e}",
            f"{_rate(record['tokens-per-second'])} tok/s",
            f"{record['step-time-s']:6.2f} s",
            *([] if gib is None else [f"{gib:3.{int(gib < 9.95)}f} GiB"]),
            *([] if mfu is None else [f"MFU {mfu:3.0%}"]),
            f"left {duration(left)}",
        ]
        if record["skipped"]:  # instead of the speed of a step that trained nothing
            parts[4:-1] = [f"skipped: {'not finite' if record['bad'] else 'no supervised token'}"]
        return "  ".join(parts)

    def _remember(self, name: str, record: Record) -> None:
        if record["lm loss"] is not None:
            self._losses.setdefault(name, []).append((record["step"], record["lm loss"]))

    def _write(self, record: Record) -> None:
        try:
            for writer in self._writers:
                writer.write(record)
        except OSError as error:
            why = why_not_written(self._folder, error)
            raise StorageError(
                f"the numbers of step {record['step']} cannot be written: {why}.  The last checkpoint is complete."
            ) from error


def _number(loss: float | None) -> str:
    return "     -" if loss is None else f"{loss:6.4f}"


def _norm(norm: float | None) -> str:
    if norm is None:
        return "    -"
    text = f"{norm:5.3g}"
    return f"{norm:.1e}" if "e" in text else text


def _rate(per_second: float) -> str:
    """A number with three digits and a decimal unit: 50 -> `   50`, 12,441 -> `12.4K`, 1,234,567 -> `1.23M`"""
    for least, factor, unit in ((999_500, 1e6, "M"), (999.5, 1e3, "K")):
        if per_second >= least:
            return f"{per_second / factor:.3g}{unit}".rjust(5)
    return f"{per_second:5.0f}"
