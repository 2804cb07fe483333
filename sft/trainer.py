"""The training loop, the only module that combines all parts of the trainer.  `api/rank.py` starts and ends it."""

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sft.checkpoint import folders, resume
from sft.checkpoint.judge import Judge
from sft.checkpoint.remote import RemoteCopies
from sft.checkpoint.saver import Saver
from sft.checkpoint.train_state import Conditions, TrainState
from sft.console import Console
from sft.data.pipeline import DataPipeline, GlobalBatch
from sft.files.atomic_files import replace_text, unusable
from sft.layers.flops import describe_parameters, num_parameters
from sft.mcore import process_groups
from sft.mcore.backends.kernel_lines import kernel_lines
from sft.mcore.engine import Engine
from sft.metrics.callbacks import Callbacks
from sft.metrics.log import MetricsLog
from sft.metrics.records import Record
from sft.metrics.run_facts import RunFacts
from sft.metrics.totals import StepResult
from sft.parallel.collectives import broadcast_from_rank0
from sft.parallel.layout import Layout
from sft.recipe.long_questions import open_in_run
from sft.recipe.resolved import Recipe, dump
from sft.recipe.run_checks import check_run
from sft.recipe.start import check_start
from sft.recipe.tokenizer import tokenizer_of
from sft.run.compilation import compile_first
from sft.run.evaluation import Evaluator
from sft.run.gpu_memory import GpuMemory
from sft.run.gpu_peak import peak_tflops
from sft.run.lifecycle import Lifecycle
from sft.run.outcome import Outcome, closing_line
from sft.run.profiler import Profiler
from sft.run.sample_log import SampleLog, link
from sft.run.step_check import StepCheck, dump_step
from sft.weights import run_folder
from sft.weights.background_exports import Exports
from sft.weights.initial import load_initial
from sft.weights.lora.base_digest import base_digest
from sft.weights.lora.initial_adapters import load_new_adapters
from sft.weights.serving.served import served_of
from sft.weights.trained import trained_weights

_WAIT_S = 2.0  # seconds of waiting for exports between two checks for a signal


class Trainer:
    """The training loop of one rank, and the objects that it uses."""

    def __init__(
        self,
        recipe: Recipe,
        layout: Layout,
        groups: process_groups.ProcessGroups,
        console: Console,
        lifecycle: Lifecycle,
        profiler: Profiler,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.recipe, self.config, self.layout, self.groups = recipe, recipe.config, layout, groups
        self.console, self.lifecycle, self.profiler = console, lifecycle, profiler
        self.callbacks = callbacks
        self.folder = Path(self.config.run.dir)
        checkpoints, config = self.folder / "checkpoints", self.config
        tokenizer = tokenizer_of(config)
        self.data = DataPipeline(config, tokenizer, recipe.arguments, layout, groups, console)
        self.served = served_of(config, tokenizer, self.data.row_variables)
        self.num_steps = self.data.num_steps
        length = dict(num_steps=self.num_steps, num_packs=self.data.num_packs, longest=self.data.longest)
        for warning in check_run(recipe, **length):
            console.say(f"WARNING: {warning}")
        suites = open_in_run(recipe, layout, tokenizer, self.data, console)
        self.trained = trained_weights(config, self.data.vocab_size)
        base = base_digest(config, self.folder, groups) if config.lora.is_used else None
        self.conditions = Conditions.of(config, layout, self.data.plan, base)
        check = partial(check_start, config, self.conditions, self.trained, self.data)
        if rates := broadcast_from_rank0(check, groups.control):
            console.say(rates)
        self.engine = Engine(
            config,
            layout,
            groups,
            vocab_size=self.data.vocab_size,
            num_steps=self.num_steps,
            trained=self.trained,
            progress=lifecycle.progress,
        )
        self.exports = Exports(config.checkpoint, self.folder, console)
        self.saver = Saver(
            config.checkpoint,
            checkpoints,
            self.conditions,
            groups,
            console,
            is_ours=lifecycle.holds_folder,
            on_published=self._after_publishing,
            in_use=self.exports.in_use,
        )
        self.saver.disk = lifecycle.disk
        if (url := config.checkpoint.remote) is not None:
            self.saver.copies = RemoteCopies(config.checkpoint, url, console, lifecycle.holds_folder, lifecycle.disk)
        self.judge = Judge(
            config.checkpoint, self.data.held_out_facts(), self._has_checkpoint, console, config.loss.weighing
        )
        self.evaluator = Evaluator(
            self.engine, self.data.held_out, config.train, lifecycle, self.num_steps, suites, self.data.pad_id
        )
        self.check = StepCheck(config.train, console)
        self.gpu_memory = GpuMemory(config, layout, groups.device, console)

    def train(self) -> Outcome:
        """Train until the last step, or until the run must stop."""
        initial = partial(load_initial, self.engine, self.config, self.console)
        if self.config.lora.is_used:  # a checkpoint holds the adapters only
            self.console.say(f"frozen: {initial()}")
            initial = partial(load_new_adapters, self.engine, self.config, self.console)
        state = resume.restore(self.engine, self.saver, self.config, self.conditions, self.console, initial)
        self.lifecycle.restored(state.step, self.num_steps)
        is_due, is_ours = self.evaluator.is_due(state.step), self.saver.holds(state.step)
        state = self.judge.resumed(state, is_ours=is_ours, is_due=is_due)
        if state.step > self.num_steps:
            self.console.say(f"the run has {self.num_steps} steps, and has done {state.step}: it ends after these")
        model, checkpoint = self.config.model, self.config.checkpoint
        prepare = partial(run_folder.prepare, self.folder, model, checkpoint, self.console, self.served)
        broadcast_from_rank0(partial(prepare, is_new=state.step == 0), self.groups.control)
        is_last = state.step >= self.num_steps
        broadcast_from_rank0(partial(self.exports.resumed, state, is_last=is_last), self.groups.control)
        if self._is_done(state):
            self.console.result(f"nothing to do: the run in {self.folder} has done all its {self.num_steps} steps")
            return self._outcome(state, self._end(state, None), None)
        broadcast_from_rank0(
            partial(_write_inputs, self.recipe, self.data.row_reports, self.folder), self.groups.control
        )
        bar = self.console.track("training", self.num_steps, "steps", lines=False, start=state.step)
        with self._open_metrics(state) as metrics, bar as progress, ExitStack() as at_exit:
            at_exit.callback(self.saver.wait_briefly)
            sample_log = SampleLog.open(self.folder / "seen.jsonl", state.step, state.chain, self.groups.control)
            compile_first(self.engine.backend, self.groups.device, self.console)
            state = self._make_missing_pass(state, metrics)
            stop = self.lifecycle.stop_reason()
            while state.step < self.num_steps and stop is None:
                with self.profiler.step(state.step + 1):
                    started = time.monotonic()
                    batch = self._get_batch(state.step)
                    result = self._train_step(state.step, batch, waited_s=time.monotonic() - started)
                    state = state.after(result, batch.location, link(state.chain, *batch.location, batch.samples))
                    self.lifecycle.step, self.lifecycle.step_s = state.step, time.monotonic() - started
                    if sample_log is not None:
                        sample_log.write(state.step, *batch.location, batch.samples, state.chain)
                    metrics.train(state.step, result, seconds=self.lifecycle.step_s)
                    self._check(state, batch, result)
                    progress.advance(1)
                    state, held_out = self._evaluate(state, metrics)
                    is_save_due, stop = self.lifecycle.after_step(state.step)
                    if is_save_due:
                        self.saver.drain()  # the previous save may have failed
                        state = self.judge.judged(state, held_out, self.saver.lost)
                        self._save(state, sample_log, wait=stop is not None or state.step == self.num_steps)
                        stop = stop or self.lifecycle.stop_reason()  # again, because a signal may arrive during a save
            stop = self._end(state, stop)
            metrics.summarise()
        outcome = self._outcome(state, stop, metrics.last)
        self.console.result(closing_line(outcome))
        return outcome

    def _outcome(self, state: TrainState, stop: str | None, last: Record | None) -> Outcome:
        return Outcome(folder=self.folder, step=state.step, num_steps=self.num_steps, stopped=stop, last=last)

    def _has_checkpoint(self, step: int) -> bool:
        """Whether there is a checkpoint of `step`, in the run's folder or in checkpoint.remote.  Collective."""
        folder, copies = self.saver.folder / folders.name_of(step), self.saver.copies

        def is_there() -> bool:
            return folder.is_dir() or (copies is not None and copies.folder.is_complete(step))

        return broadcast_from_rank0(is_there, self.groups.control)

    def _get_batch(self, step: int) -> GlobalBatch:
        self.lifecycle.phase(f"step {step + 1}: data")
        if line := self.data.new_epoch(step):
            self.console.say(line)
        return self.data.batch(step)

    def _train_step(self, step: int, batch: GlobalBatch, *, waited_s: float) -> StepResult:
        self.lifecycle.phase(f"step {step + 1}")
        result = self.engine.train_step(batch.microbatches, sources=self.data.train.sources, data_wait_s=waited_s)
        assert result.num_documents == len(batch.samples), (result.num_documents, batch.samples)
        self.gpu_memory.after_step()
        self.saver.prepare(self.engine, step + 1, self.num_steps)
        return result

    def _check(self, state: TrainState, batch: GlobalBatch, result: StepResult) -> None:
        """Raises TrainingError after too many non-finite steps in a row."""

        def dump_this() -> Path:
            return dump_step(
                self.folder,
                state.step,
                samples=[{"sample": i, "row": self.data.row_name(i)} for i in sorted(batch.samples)],
                losses=self.engine.local_losses,
                recipe=dump(self.recipe),
                position=self.groups,
            )

        self.check.check(state.step, result, state.bad_in_a_row, dump_this)

    def _make_missing_pass(self, state: TrainState, metrics: MetricsLog) -> TrainState:
        """Evaluate after the step from which the run continues, if this evaluation is due and was not made.

        If the run has a checkpoint of this step, the evaluation decides whether it is the best checkpoint.
        """
        is_missing = self.evaluator.is_missing(state.step, state.evaluated)
        state, held_out = self._evaluate(state, metrics)
        if is_missing and state.evaluated == state.step and self.saver.holds(state.step):
            state = self.judge.judged(state, held_out)
            self.saver.add_pass(state)
            broadcast_from_rank0(partial(self._export, state.step), self.groups.control)
        return state

    def _evaluate(self, state: TrainState, metrics: MetricsLog) -> tuple[TrainState, dict[str, Record]]:
        """Evaluate if due.  Returns the new state, and the records by held-out set (empty if the run must stop)."""
        if not self.evaluator.is_missing(state.step, state.evaluated):
            return state, {}
        records = self.evaluator.run(state.step, metrics)
        return (state, {}) if records is None else (replace(state, evaluated=state.step), records)

    def _save(self, state: TrainState, sample_log: SampleLog | None, *, wait: bool) -> None:
        self.lifecycle.phase(f"saving step {state.step}")
        if sample_log is not None:
            sample_log.sync()
        self.saver.save(self.engine, state, wait=wait)
        self.lifecycle.saved_at = time.monotonic()

    def _after_publishing(self, step: int, save_s: float) -> None:
        """Called on rank 0 when a checkpoint is published, possibly by the thread that saves."""
        self.lifecycle.report_published(step, save_s)
        run_folder.check(self.folder, self.console, self.served)
        self._export(step)

    def _export(self, step: int) -> None:
        self.exports.published(step, is_best=step == self.judge.best_step, is_last=step >= self.num_steps)

    def _end(self, state: TrainState, stop: str | None) -> str | None:
        """Wait for a background save and for exports, and record how the run ended, before any rank exits.

        Returns the reason why the run is not done; None if it is done.
        """
        self.lifecycle.phase(f"saving step {state.step}")
        self.saver.drain(must_succeed=True)
        stop = self._wait_for_exports() if self._is_done(state) else stop or "the last evaluation is missing"
        self.exports.stop()
        self.lifecycle.end("preempted" if stop else "done", state.step, stop)
        return stop

    def _wait_for_exports(self) -> str | None:
        """Wait until all exports are made.  Returns the reason if the run must stop before that, else None.

        Raises StorageError if an export failed.
        """
        with self.console.watch("waiting for exports", None, "bytes", self.exports.num_bytes):
            while broadcast_from_rank0(partial(self.exports.is_busy, wait_s=_WAIT_S), self.groups.control):
                self.lifecycle.phase("waiting for exports")
                if stop := self.lifecycle.stop_reason():
                    return stop
        broadcast_from_rank0(self.exports.refuse_failures, self.groups.control)
        return None

    def _is_done(self, state: TrainState) -> bool:
        return state.step >= self.num_steps and state.evaluated == state.step

    def _open_metrics(self, state: TrainState) -> MetricsLog:
        """Open the metrics log, and print and log facts of this start.  Collective."""
        model, vocab_size, backend = self.config.model, self.engine.vocab_size, self.engine.backend
        peak = peak_tflops(self.config, self.groups.device)
        metrics = MetricsLog.open(
            self.folder,
            self.console,
            RunFacts.of(self.config, self.layout, vocab_size, self.trained, peak_tflops=peak),
            self.groups.control,
            step=state.step,
            num_steps=self.num_steps,
            is_evaluated=not self.evaluator.is_missing(state.step, state.evaluated),
            callbacks=self.callbacks,
        )
        for line in kernel_lines(self.config, backend, self.groups.device.type):
            self.console.say(line)
        parameters = describe_parameters(model, vocab_size)
        if self.trained.whole is not None:
            parameters = self.trained.describe(self.config.lora.rank, num_parameters(model, vocab_size))
        self.console.say(f"parameters {parameters} | attention {backend} | steps {self.num_steps:,}")
        if self.groups.device.type != "cpu":
            self.console.say(f"modules {backend.library}")
        metrics.start()
        return metrics


def _write_inputs(recipe: Recipe, row_reports: Mapping[str, Any], folder: Path) -> None:
    """Write recipe.yaml and data.json.  Called after all checks, so a refused recipe replaces no file."""
    try:
        replace_text(folder / "recipe.yaml", dump(recipe))
        replace_text(folder / "data.json", json.dumps(row_reports, indent=1) + "\n")
    except OSError as error:
        raise unusable(f"run.dir = {folder} cannot be written", folder, error) from error
