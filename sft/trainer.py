"""The run: from a recipe to a trained checkpoint.  The only module that puts all parts together."""

import json
import math
import os
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from sft.atomic_files import replace_text
from sft.checkpoint import folders, resume
from sft.checkpoint.saver import Saver
from sft.checkpoint.train_state import Conditions, TrainState, installed
from sft.config.keys import values
from sft.config.train import LOWER_IS_BETTER
from sft.console import Console
from sft.data.loader import Loader
from sft.data.pipeline import DataPipeline
from sft.errors import ConfigError, TrainingError
from sft.flops import describe_parameters, num_parameters
from sft.mcore import device, process_groups
from sft.mcore.engine import Engine, StepResult
from sft.metrics.loss_spikes import LossSpikes
from sft.metrics.records import Record, eval_record, train_record
from sft.metrics.writers import Metrics, Writer, open_writers
from sft.parallel.collectives import all_gather_objects, broadcast_from_rank0
from sft.parallel.layout import Layout
from sft.recipe.load import Recipe, dump
from sft.run import nonfinite_dump
from sft.run.evaluation import evaluate
from sft.run.lifecycle import Lifecycle
from sft.run.profiler import Profiler
from sft.run.sample_log import SampleLog, link
from sft.run.signals import leave_with_parent
from sft.run.status import Kind

STOPPED = 75  # the exit code of a run that was asked to stop and has saved: start it again (EX_TEMPFAIL)


def main(recipe: Recipe) -> int:
    """Train as the recipe says, as one of the processes that torchrun started (or as the only one); the exit code."""
    config = recipe.config
    leave_with_parent()
    layout = Layout.resolve(config, int(os.environ.get("WORLD_SIZE", "1")))
    here = device.start(device.choose(config.run.device))
    place = process_groups.start(layout, here, seed=config.run.seed, timeout_s=config.run.timeout_s)
    console = Console(place.rank)
    console.say("\n".join([dump(recipe), *layout.equations(config.data.seq_length)]))
    folder = Path(config.run.dir)
    with (
        Lifecycle(config.run, folder, place, console) as start,
        Profiler(config.profile, folder, place, console) as profile,
    ):
        is_done = Run(recipe, layout, place, console, start, profile).train()
    process_groups.stop()
    return 0 if is_done else STOPPED


class Run:
    """Everything one rank needs to train."""

    def __init__(
        self,
        recipe: Recipe,
        layout: Layout,
        place: process_groups.ProcessGroups,
        console: Console,
        start: Lifecycle,
        profile: Profiler,
    ) -> None:
        self.recipe, self.config, self.layout, self.place = recipe, recipe.config, layout, place
        self.console, self.start, self.profile = console, start, profile
        self.folder = Path(self.config.run.dir)
        self.checkpoints = self.folder / "checkpoints"
        start.begin(
            broadcast_from_rank0(lambda: resume.next_step(self.config.checkpoint, self.checkpoints), place.control)
        )
        self.feed = DataPipeline(recipe, layout, place, console)
        self.num_steps = self.feed.num_steps
        self.engine = Engine(self.config, layout, place, vocab_size=self.feed.vocab_size, num_steps=self.num_steps)
        now = Conditions(plan=self.feed.plan, recipe=values(self.config), layout=_sizes(layout), versions=installed())
        self.conditions = now
        self.saver = Saver(self.config.checkpoint, self.checkpoints, now, place, console, start.is_ours)
        self._epoch: int | None = None  # the newest whose packing was told
        self._step_s = 0.0  # what the last step took
        self._saved_at = time.monotonic()
        self._told_save: int | None = None
        self._spikes = LossSpikes()

    def train(self) -> bool:
        """Step until the last step is done or somebody asks to stop; evaluate and save when due; whether it is done."""
        state = self._resumed() or self._fresh()
        self.start.go_on(state.step)
        if self._is_over(state):
            self.console.say(f"nothing to do: {self.folder} has done all its {self.num_steps} steps")
            self.start.end("done", state.step, self.num_steps, None)
            return True
        broadcast_from_rank0(self._note)
        bar = self.console.track("training", self.num_steps, "steps", lines=False, start=state.step)
        with self._metrics(state) as metrics, bar as progress, ExitStack() as ending:
            ending.callback(self.saver.linger)
            seen = self._open_seen(state)
            state, _ = self._evaluated(state, metrics)
            reason = self.start.agreed()[0]
            while state.step < self.num_steps and reason is None:
                with self.profile.step(state.step + 1):
                    state = self._step(state, metrics, seen)
                    progress.advance(1)
                    state, reason = self._finish_step(state, metrics, seen)
            is_done = self._is_over(state)
            self._leave(state, is_done, reason)
            metrics.summarise()
        kept = "checkpoints/, tensorboard/, metrics.jsonl, seen.jsonl, recipe.yaml, data.json and run_state.json"
        self.console.say(f"done: {self.folder}/ holds {kept}" if is_done else self._goodbye(state, reason))
        return is_done

    def _note(self) -> None:
        """What trained here on what.  Only once it is sure that it does: a refused recipe replaces nothing."""
        try:
            replace_text(self.folder / "recipe.yaml", dump(self.recipe))
            replace_text(self.folder / "data.json", json.dumps(self.feed.ledgers, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"run.dir = {self.folder} cannot be written: {error}.") from error

    def _step(self, state: TrainState, metrics: Metrics, seen: SampleLog | None) -> TrainState:
        """One update, and its record."""
        started = time.monotonic()
        self.start.phase(f"step {state.step + 1}: data")
        self._tell_packing(state.step)
        position, samples = self.feed.train.locate(state.step), self.feed.samples(state.step)
        microbatches = self.feed.train.microbatches(state.step)
        waited = time.monotonic() - started
        self.start.phase(f"step {state.step + 1}: forward, backward and update")
        result = self.engine.train_step(microbatches, sources=self.feed.train.sources, data_wait_s=waited)
        assert result.totals.num_documents == len(samples), (result.totals.num_documents, samples)
        state = state.after(result, position, link(state.chain, *position, samples))
        self._step_s = time.monotonic() - started
        self.start.step = state.step
        if seen:
            seen.write(state.step, *position, samples, state.chain)
        metrics.train(self._record(state, result))
        self._look_at(result, state)
        return state

    def _finish_step(
        self, state: TrainState, metrics: Metrics, seen: SampleLog | None
    ) -> tuple[TrainState, str | None]:
        """What is due after a step; and why the run is to stop, or None."""
        last = state.step == self.num_steps
        state, found = self._evaluated(state, metrics)
        every = self.config.checkpoint.save_every_minutes
        is_late = every is not None and self.place.rank == 0 and time.monotonic() - self._saved_at >= 60 * every
        reason, (late,) = self.start.agreed(is_late)
        due = late or _due(state.step, self.config.checkpoint.save_every)
        due |= self.config.checkpoint.save_last if last else reason is not None
        if due:
            state = self._judged(state, found)
            if found and state.best_step == state.step:
                self.console.say(
                    f"best so far: step {state.step}, {self.config.checkpoint.keep_best} {state.best_value}"
                )
            self._save(state, seen, wait=last or reason is not None)
            reason = reason or self.start.agreed()[0]  # asked again: a save may take long
        self._tell_saved()
        return state, reason

    def _save(self, state: TrainState, seen: SampleLog | None, *, wait: bool) -> None:
        self.start.phase(f"saving step {state.step}")
        if seen:
            seen.sync()
        self.saver.save(self.engine, state, wait=wait)
        self._saved_at = time.monotonic()

    def _tell_saved(self) -> None:
        """A save in the background may have ended at any time."""
        done = self.saver.published
        if self.place.rank == 0 and done is not None and done != self._told_save:
            if self._told_save is None:
                self.start.tell_grace(self._step_s, self.saver.took_s)
            self._told_save = done
            self.start.saved(done, step_s=self._step_s, save_s=self.saver.took_s)

    def _is_over(self, state: TrainState) -> bool:
        return state.step >= self.num_steps and state.evaluated == state.step

    def _leave(self, state: TrainState, is_done: bool, reason: str | None) -> None:
        """Nothing is in flight, and everybody knows how it ended, before the first rank is gone."""
        self.start.phase(f"saving step {state.step}")
        self.saver.drain(must=True)
        self._tell_saved()
        kind: Kind = "done" if is_done else "preempted"
        self.start.end(kind, state.step, self.num_steps, None if is_done else reason)

    def _goodbye(self, state: TrainState, reason: str | None) -> str:
        return (
            f"stopped after step {state.step} of {self.num_steps} ({reason}); the same command goes on from there.  "
            f"Exit code {STOPPED}, which torchrun reports as a failure"
        )

    def _tell_packing(self, step: int) -> None:
        """Once an epoch; packing takes about a second a million samples, too little for a bar."""
        epoch, _ = self.feed.train.locate(step)
        if epoch != self._epoch:
            self._epoch, plan = epoch, self.feed.train.plan(epoch)
            self.console.say(f"packed epoch {epoch}: {len(plan):,} packs, {plan.fill:.1%} full")

    def _resumed(self) -> TrainState | None:
        """What checkpoint.resume asks for, in the engine; None when a new run is to start."""
        config = self.config.checkpoint
        found = resume.find(config, self.checkpoints, self.place, self.console)
        for left in broadcast_from_rank0(lambda: folders.sweep(self.checkpoints), self.place.control):
            self.console.say(f"removed {left}, left by a save that was cut off")
        broadcast_from_rank0(self._probe, self.place.control)
        if found is None:
            return None
        state = resume.load(self.engine, found, config, self.conditions, self.console)
        self.saver.resumed(state.step, is_ours=found.path.parent.resolve() == self.checkpoints.resolve())
        return state

    def _probe(self) -> None:
        try:
            folders.probe(self.checkpoints)
        except OSError as error:
            raise ConfigError(f"run.dir = {self.folder}: no checkpoint could be written: {error}.") from error

    def _fresh(self) -> TrainState:
        """A new run: from random weights, or from those that model.init_from names."""
        source = self.config.model.init_from
        if source:
            resume.start_from(self.engine, source, self.config.checkpoint.verify, self.console)
        else:
            self.console.say(f"started from random weights (seed {self.config.run.seed})")
        return TrainState()

    def _open_seen(self, state: TrainState) -> SampleLog | None:
        """On rank 0; the others have none."""
        opened: list[SampleLog] = []
        broadcast_from_rank0(lambda: opened.append(SampleLog(self.folder / "seen.jsonl", state.step, state.chain)))
        return opened[0] if opened else None

    def _metrics(self, state: TrainState) -> Metrics:
        writers: list[Writer] = []  # stays empty on the other ranks
        evaluated = state.evaluated == state.step
        broadcast_from_rank0(
            lambda: writers.extend(
                open_writers(self.folder, self.config, state.step, self.console, is_evaluated=evaluated)
            )
        )
        every = self.config.log.every
        metrics = Metrics(writers, self.console, step=state.step, num_steps=self.num_steps, every=every)
        model, rows = self.config.model, self.engine.vocab_size
        told = describe_parameters(model, rows)
        self.console.say(f"parameters {told} | attention {self.engine.backend} | steps {self.num_steps:,}")
        metrics.start(
            {"parameters": num_parameters(model, rows), "num-steps": self.num_steps, "layout": _sizes(self.layout)}
        )
        return metrics

    def _record(self, state: TrainState, result: StepResult) -> Record:
        return train_record(
            state.step,
            result,
            self.layout,
            self.config,
            schema=self.engine.schema(self.feed.train.sources),
            vocab_size=self.engine.vocab_size,
            seconds=self._step_s,
        )

    def _evaluated(self, state: TrainState, metrics: Metrics) -> tuple[TrainState, dict[str, Record]]:
        """Held-out data, where they are due after this step: the record of each set.

        A run that is asked to stop leaves the rest for its next start: the time it is given is for a save.
        """
        due = state.step in (0, self.num_steps) or _due(state.step, self.config.train.eval_every)
        if not due or state.evaluated == state.step:
            return state, {}
        records = {name: self._evaluate(name, loader, state) for name, loader in self.feed.held_out.items()}
        done = {name: record for name, record in records.items() if record is not None}
        if len(done) < len(records):
            return state, {}
        for record in done.values():
            metrics.eval(record)
        return replace(state, evaluated=state.step), done

    def _evaluate(self, name: str, loader: Loader, state: TrainState) -> Record | None:
        """The record of one set; None where the run is to stop."""

        def goes_on() -> bool:
            self.start.phase(f"held-out {name} after step {state.step}")
            return self.start.agreed()[0] is None

        started = time.monotonic()
        totals = evaluate(self.engine, loader, goes_on)
        if totals is None:
            return None
        if not math.isfinite(totals.loss):
            raise TrainingError(
                f"the held-out loss of {name} after step {state.step} is {totals.loss}; nothing was saved."
            )
        seconds, schema = time.monotonic() - started, self.engine.schema(loader.sources)
        return eval_record(state.step, totals, self.config, set_name=name, schema=schema, seconds=seconds)

    def _judged(self, state: TrainState, found: dict[str, Record]) -> TrainState:
        """Whether this is the best so far by checkpoint.keep_best."""
        best = self.config.checkpoint.best
        value = found[best[0]][best[1]] if best and found else None
        return state if best is None or value is None else state.judged(value, lower=LOWER_IS_BETTER[best[1]])

    def _look_at(self, result: StepResult, state: TrainState) -> None:
        """Loss and norm are the same on all ranks, so all stop together."""
        if not result.is_bad:
            loss = result.totals.loss / result.totals.denominator if result.totals.num_tokens else None
            if loss is not None and (told := self._spikes.look(loss)):
                self.console.say(f"WARNING: loss spike in step {state.step}: {told}")
            return
        mean = result.totals.loss / max(result.totals.denominator, 1)
        what = f"step {state.step}: lm loss {mean:.4f}, gradient norm {result.grad_norm}"
        if state.bad_in_a_row <= self.config.train.max_bad_steps:
            in_a_row = f"{state.bad_in_a_row} in a row of at most {self.config.train.max_bad_steps}"
            self.console.say(f"WARNING: {what}: nothing was updated, the step is skipped ({in_a_row})")
            return
        kept = self._keep_bad(state)
        raise TrainingError(
            f"{what}, after {state.bad_in_a_row - 1} such steps before it (train.max_bad_steps).  Nothing of it was "
            f"saved.  Its samples and every rank's losses are in {kept}.  A lower optim.lr may help, from a checkpoint "
            f"before the first bad step: checkpoint.resume=PATH with another run.dir."
        )

    def _keep_bad(self, state: TrainState) -> Path:
        mine = {
            "rank": self.place.rank,
            "summed loss of each microbatch": [repr(loss) for loss in self.engine.local_losses],
        }
        mine |= {f"{kind}_rank": getattr(self.place, f"{kind}_rank") for kind in ("dp", "cp", "tp", "pp", "ep")}
        ranks = all_gather_objects(lambda: mine, self.place.control)
        samples = [{"sample": i, "row": self.feed.name(i)} for i in sorted(self.feed.samples(state.step - 1))]
        return broadcast_from_rank0(
            lambda: nonfinite_dump.keep(
                self.folder, state.step, samples=samples, ranks=ranks, recipe=dump(self.recipe)
            ),
            self.place.control,
        )


def _sizes(layout: Layout) -> dict[str, int]:
    return {name: getattr(layout, name) for name in ("world_size", "tp", "cp", "pp", "dp", "ep", "etp")}


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
