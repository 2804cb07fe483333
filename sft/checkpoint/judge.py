"""Compares the checkpoints of a run by `checkpoint.keep_best`, to find the best one (judging).

A resumed run continues to compare with the best checkpoint of its state only if the run continues from its own folder,
that checkpoint still exists there, and metric, direction, held-out set and the weights of tokens have not changed.
Otherwise judging starts anew, and the log says so.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from sft.checkpoint.best import Best
from sft.checkpoint.train_state import TrainState
from sft.config import CheckpointConfig
from sft.config.checkpoint import LOWER_IS_BETTER
from sft.console import Console
from sft.metrics.records import Record


class Judge:
    """Judges the checkpoints of a run.

    held_out   {name of a held-out set: (its digest, the number of its documents)}
    has        whether the run has a checkpoint of a step; all ranks call it, and get the same answer
    loss       the settings that weigh tokens
    best_step  step of the best checkpoint; None if no checkpoint was compared
    """

    def __init__(
        self,
        config: CheckpointConfig,
        held_out: Mapping[str, tuple[str, int]],
        has: Callable[[int], bool],
        console: Console,
        loss: str = "",
    ) -> None:
        self._has, self._console = has, console
        self._none: Best | None = None  # the record before the first comparison; None without checkpoint.keep_best
        if config.best is not None and config.keep_best is not None:
            self._set, self._metric = config.best
            data, documents = held_out[self._set]
            lower = LOWER_IS_BETTER[self._metric]
            self._none = Best(metric=config.keep_best, lower_is_better=lower, data=data, documents=documents, loss=loss)
        self._before = self._none  # the record before the latest comparison
        self.best_step: int | None = None

    def resumed(self, state: TrainState, *, is_ours: bool, is_due: bool) -> TrainState:
        """The state from which the run continues.  Its best checkpoint is dropped if judging starts anew.

        is_ours  whether the checkpoint of `state` is in this run's folder
        is_due   whether a held-out pass is due after the step of `state`.  If judging starts anew, this pass is made
                 again
        """
        why = self._why_anew(state.best, is_ours=is_ours)
        if why is None:
            self.best_step = state.best_step
            self._before = state.best
            return state
        if state.best_step is not None:
            self._console.say(f"{why}, so judging starts anew.  {self._fate(state, is_ours=is_ours)}")
        repeats = is_ours and is_due and self._none is not None
        return replace(state, best=self._none, evaluated=-1 if repeats else state.evaluated)

    def judged(self, state: TrainState, held_out: Mapping[str, Record], lost: Collection[int] = ()) -> TrainState:
        """The state after the checkpoint of its step was compared with the best one.

        held_out  the records of the held-out pass after the step, by held-out set; empty if no pass was made
        lost      steps whose saves failed.  If the best step is one of them, the previous best one takes its place
        """
        best = self._before if state.best_step in lost else state.best
        value = held_out[self._set][self._metric] if best is not None and held_out else None
        self._before = best
        if best is not None and value is not None:
            best = best.judged(state.step, value)
            if best.step == state.step:
                self._console.say(f"best so far: {best}")
        self.best_step = None if best is None else best.step
        return replace(state, best=best)

    def _why_anew(self, best: Best | None, *, is_ours: bool) -> str | None:
        """The reason why judging starts anew and drops `best`; None if `best` is kept."""
        if best is None or self._none is None:
            return None if best is self._none else "checkpoint.keep_best has changed between a metric and null"
        if not is_ours:
            return "the run continues from a checkpoint of another folder"
        if differences := list(best.differences(self._none)):
            return "; ".join(differences)
        if best.step is not None and not self._has(best.step):
            return f"the checkpoint of step {best.step} is missing"
        return None

    def _fate(self, state: TrainState, *, is_ours: bool) -> str:
        was = f"The best checkpoint so far was {state.best}"
        if not is_ours:
            return f"{was}; it stays where it is, and this run compares its own checkpoints only"
        return f"{was}; the next saves may remove it (checkpoint.keep_last), so copy it if you need it"
