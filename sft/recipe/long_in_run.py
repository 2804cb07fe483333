"""Decides which long-context questions a run asks before its first step and at its end (data.long.in_run).

All ranks, all starts of a run and all machines must decide equally, so times are those of an H100, and memory is
compared with that of a training step, not with that of a GPU.
"""

from dataclasses import dataclass, replace

from sft.config import Config
from sft.console import size
from sft.data.long.suite import SuiteSettings
from sft.errors import ConfigError
from sft.estimate.forward import ForwardTime, forward_memory, forward_time
from sft.estimate.lengths import Lengths
from sft.estimate.memory import estimate
from sft.estimate.step_time import step_time
from sft.estimate.time import constants_for, shown
from sft.parallel.layout import Layout
from sft.recipe.long import suite_settings
from sft.recipe.resolved import Recipe
from sft.weights.trained import trained_weights

MOST_SHARE = 0.02  # of the predicted time of the run, for both evaluations together
_PASSES = 2  # before the first step, and at the end


@dataclass(frozen=True, kw_only=True)
class InRun:
    """The questions that a run asks.

    settings    None: the run asks none
    lines       what the run asks, what it leaves out, and why
    is_failure  whether the run would ask questions, but they cannot be made
    """

    settings: SuiteSettings | None
    lines: tuple[str, ...]
    is_failure: bool = False


def asked_in_run(
    recipe: Recipe,
    layout: Layout,
    vocab_size: int,
    lengths: Lengths,
    num_steps: int | None,
    usable_bytes: float | None = None,
) -> InRun:
    """The questions of the run.

    lengths       of the training data
    num_steps     of the whole run; None: unknown
    usable_bytes  memory of a GPU that a rank can use; None: unknown.  Only data.long.in_run = true is compared with it
    Raises ConfigError if data.long.in_run is true, and no question or not each of them can be asked.
    """
    wanted = recipe.config.data.long.in_run
    if wanted is False:
        return InRun(settings=None, lines=("not in this run: data.long.in_run is false; `sft eval --long` asks them",))
    try:
        settings = suite_settings(recipe)
    except ConfigError as error:
        if wanted is True:
            raise
        return InRun(settings=None, lines=(f"not in this run: {error}",))
    costs = _Costs(recipe, layout, vocab_size, lengths, num_steps, settings)
    if wanted is True:
        costs.check_memory(usable_bytes)
        return InRun(settings=settings, lines=(costs.described(settings), *costs.warnings()))
    return costs.as_far_as_cheap()


def may_ask(config: Config) -> bool:
    """Whether a run may ask questions: data.long.in_run is true, or auto, and times are predicted."""
    wanted = config.data.long.in_run
    return wanted is True or (wanted == "auto" and constants_for(config, None) is not None)


class _Costs:
    """Predicted time and memory of questions in a run."""

    def __init__(
        self,
        recipe: Recipe,
        layout: Layout,
        vocab_size: int,
        lengths: Lengths,
        num_steps: int | None,
        settings: SuiteSettings,
    ) -> None:
        self._config, self._layout, self._vocab_size = recipe.config, layout, vocab_size
        self._settings, self._num_steps = settings, num_steps
        self._trained = trained_weights(recipe.config, vocab_size)
        self._lengths, self._constants = lengths, constants_for(recipe.config, None)

    def check_memory(self, usable_bytes: float | None) -> None:
        """Raises ConfigError if a length needs more than `usable_bytes`, and more than a training step."""
        most = max(usable_bytes or 0.0, self._step_bytes())
        fitting = [length for length in self._settings.lengths if self._bytes(length) <= most]
        if usable_bytes is None or len(fitting) == len(self._settings.lengths):
            return
        length = max(self._settings.lengths)
        shares = ", ".join(f"{length / self._config.data.seq_length:g}" for length in fitting)
        shorter = f"Ask shorter ones with data.long.lengths=[{shares}], or use" if fitting else "Use"
        raise ConfigError(
            f"data.long.in_run = true asks questions of {length:,} tokens in the run.  A rank then needs "
            f"{size(self._bytes(length))} (predicted, with gradients and optimizer states), and can use {size(most)}.  "
            f"{shorter} data.long.in_run=auto, which leaves out what does not fit."
        )

    def warnings(self) -> list[str]:
        """A warning if passes are too slow for a stop, as far as times are predicted."""
        slow = self._constants and self._too_slow(max(self._settings.lengths))
        return [f"WARNING: {slow}"] if slow else []

    def as_far_as_cheap(self) -> InRun:
        """The questions of the shortest lengths, as many as take at most MOST_SHARE of the run."""
        if self._constants is None:
            why = "without a prediction of its time (fp32, or a CPU); data.long.in_run=true asks them"
            return InRun(settings=None, lines=(f"not in this run {why}",))
        if self._num_steps is None:
            why = "unknown before the data are read, on which the number of steps depends"
            return InRun(settings=None, lines=(f"whether this run asks them is {why}",))
        chosen: tuple[int, ...] = ()
        left_out = None
        for length in self._settings.lengths:
            left_out = self._obstacle(length, (*chosen, length))
            if left_out is not None:
                break
            chosen = (*chosen, length)
        settings = replace(self._settings, lengths=chosen) if chosen else None
        lines = [] if settings is None else [self.described(settings)]
        if left_out is not None:
            subject = "not in this run: " if settings is None else "none of more tokens: "
            lines.append(f"{subject}{left_out}; data.long.in_run=true asks all lengths")
        return InRun(settings=settings, lines=tuple(lines))

    def described(self, settings: SuiteSettings) -> str:
        number = sum(map(self._num_questions, settings.lengths))
        lengths = ", ".join(f"{length:,}" for length in settings.lengths)
        asked = f"before the first step and at the end, up to {number:,} questions of {lengths} tokens"
        if self._constants is None or self._num_steps is None:
            return f"{asked}; their time is not predicted"
        seconds = self._seconds(settings.lengths)
        return f"{asked}: predicted {shown(seconds)} s each time, together {self._share(seconds):.2%} of the run"

    def _obstacle(self, length: int, lengths: tuple[int, ...]) -> str | None:
        """The reason not to ask questions of `length`, as the longest of `lengths`; None: there is none."""
        most, needed = self._step_bytes(), self._bytes(length)
        if needed > most:
            return f"{length:,} tokens would need {size(needed)}, and a training step needs {size(most)} (predicted)"
        if slow := self._too_slow(length):
            return slow
        share = self._share(self._seconds(lengths))
        if share > MOST_SHARE:
            return f"with {length:,} tokens they would take {share:.1%} of the run, more than {MOST_SHARE:.0%}"
        return None

    def _too_slow(self, length: int) -> str | None:
        """A text if a run that must stop would wait too long for the end of a pass; None: it would not."""
        batch_s, grace_s = self._time(length).batch_s, self._config.run.grace_s
        if batch_s <= grace_s:
            return None
        return f"a pass of {length:,} tokens takes {shown(batch_s)} s (predicted), longer than run.grace_s = {grace_s}"

    def _num_questions(self, length: int) -> int:
        return len(self._settings.bins(length)) * self._settings.questions

    def _share(self, seconds: float) -> float:
        """The share of the run that two evaluations take, each of `seconds`."""
        assert self._constants is not None and self._num_steps is not None
        step = step_time(self._config, self._layout, self._vocab_size, self._lengths, self._constants, self._trained)
        return _PASSES * seconds / (self._num_steps * step.step_s)

    def _seconds(self, lengths: tuple[int, ...]) -> float:
        return sum(self._time(length).total_s for length in lengths)

    def _time(self, length: int) -> ForwardTime:
        assert self._constants is not None
        return forward_time(
            self._config,
            self._layout.with_short_batches(),
            self._vocab_size,
            self._constants,
            self._trained,
            tokens=length,
            num_packs=self._num_questions(length),
        )

    def _bytes(self, length: int) -> float:
        return forward_memory(self._config, self._layout, self._vocab_size, self._trained, length)

    def _step_bytes(self) -> float:
        return estimate(self._config, self._layout, self._vocab_size, trained=self._trained).device
