"""Computes the loss on every held-out set, with the same packing and context parallelism as in training, and asks
long-context questions."""

import math
import time
from collections.abc import Callable, Sequence

from sft.config import TrainConfig
from sft.data.loader import Loader
from sft.data.long.suite import Suite
from sft.errors import TrainingError
from sft.mcore.engine import Engine
from sft.metrics.log import MetricsLog
from sft.metrics.long import LongScores
from sft.metrics.records import Record
from sft.metrics.totals import Totals
from sft.run.lifecycle import Lifecycle
from sft.run.long_evaluation import score_suite


class Evaluator:
    """Decides when the held-out sets are evaluated, and evaluates them.

    sets    the loader of each held-out set
    suites  long-context questions, which are asked before the first step and after the last one
    pad_id  id of padding tokens
    """

    def __init__(
        self,
        engine: Engine,
        sets: dict[str, Loader],
        config: TrainConfig,
        lifecycle: Lifecycle,
        num_steps: int,
        suites: Sequence[Suite],
        pad_id: int,
    ) -> None:
        self._engine, self._sets, self._lifecycle = engine, sets, lifecycle
        self._suites, self._pad_id = suites, pad_id
        self._every, self._num_steps = config.eval_every, num_steps

    def is_due(self, step: int) -> bool:
        """Whether an evaluation is due: before the first step, after the last one, and every train.eval_every steps.

        If the number of steps was lowered below `step`, a resumed run trains no step, and `step` counts as the last.
        """
        return self._is_end(step) or (self._every is not None and step % self._every == 0)

    def _is_end(self, step: int) -> bool:
        """Whether the run begins or ends with `step`."""
        return step == 0 or step >= self._num_steps

    def is_missing(self, step: int, evaluated: int) -> bool:
        """Whether the evaluation after `step` is due but was not made.  evaluated: the last step with an evaluation"""
        return self.is_due(step) and evaluated != step

    def run(self, step: int, metrics: MetricsLog) -> dict[str, Record] | None:
        """Evaluate after `step`.  Returns the record of each set by name; None if the run must stop.  Collective.

        A run that must stop needs the remaining time for a save; the next start makes the evaluation.  Raises
        TrainingError if a loss is not finite.
        """
        results: dict[str, tuple[Totals, float]] = {}
        for name, loader in self._sets.items():
            started = time.monotonic()
            totals = evaluate(self._engine, loader, lambda: self._goes_on(f"held-out {name} after step {step}"))
            if totals is None:
                return None
            if not math.isfinite(totals.objective):
                raise TrainingError(
                    f"the held-out loss of {name} after step {step} is {totals.objective}; the run ends without a save."
                )
            results[name] = totals, time.monotonic() - started
        answers = self._ask(step)
        if answers is None:
            return None
        if answers:
            metrics.questions(step, answers)
        return {
            name: metrics.evaluation(step, name, totals, seconds=seconds) for name, (totals, seconds) in results.items()
        }

    def _ask(self, step: int) -> list[tuple[LongScores, float]] | None:
        """The scores and the seconds of each suite, [] if no questions are due; None if the run must stop."""
        answers = []
        for suite in self._suites if self._is_end(step) else ():
            started = time.monotonic()
            phase = f"questions of {suite.length:,} tokens after step {step}"
            scores = score_suite(self._engine, suite, self._pad_id, lambda: self._goes_on(phase))
            if scores is None:
                return None
            answers.append((scores, time.monotonic() - started))
        return answers

    def _goes_on(self, phase: str) -> bool:
        self._lifecycle.phase(phase)
        return self._lifecycle.stop_reason() is None


def evaluate(engine: Engine, loader: Loader, goes_on: Callable[[], bool] = lambda: True) -> Totals | None:
    """The totals over all samples of `loader`; None if `goes_on` ended the evaluation.  Collective.

    Each sample is counted once, in every layout.
    goes_on: called before each batch; must return the same on all ranks.  False ends the evaluation
    """
    totals = []
    for microbatches in loader.eval_batches():
        if not goes_on():
            return None
        totals.append(engine.evaluate(microbatches, sources=loader.sources))
    return sum(totals[1:], start=totals[0])
