"""The run: from a recipe to a trained checkpoint.  The only module that puts all parts together."""

import json
import math
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from sft import cp
from sft.checkpoint import Checkpoints, RunState, weights_of
from sft.console import Console
from sft.data.chat.tokenizer import ChatTokenizer, load_tokenizer
from sft.data.corpus import Corpus, find_prepared, map_prepared
from sft.data.loader import Loader
from sft.data.plan.mixture import Mixture
from sft.data.plan.plan import Plan
from sft.data.plan.replay import follows_from, replayed_plans
from sft.durable import replace_text
from sft.errors import ConfigError, TrainingError
from sft.evaluate import evaluate
from sft.layout import Layout, attention_crossover, num_parameters, vocab_rows
from sft.mcore import device, groups, shards
from sft.mcore.engine import Engine, StepResult
from sft.metrics import eval_record, train_record
from sft.profile import Profile
from sft.recipe import Recipe, dump
from sft.writers import Metrics, Writer, open_writers


def main(recipe: Recipe) -> None:
    """Train as the recipe says, as one of the processes that torchrun started (or as the only one)."""
    config = recipe.config
    layout = Layout.resolve(config, int(os.environ.get("WORLD_SIZE", "1")))
    here = device.start(device.choose(config.run.device))
    place = groups.start(layout, here, seed=config.run.seed, timeout_s=config.run.timeout_s)
    console = Console(place.rank)
    console.say("\n".join([dump(recipe), *layout.equations(config.data.seq_length)]))
    folder = Path(config.run.dir)
    with Profile(config.profile, folder, place, console) as profile:
        Run(recipe, layout, place, console, profile).train()
    groups.stop()


class Run:
    """Everything one rank needs to train."""

    def __init__(
        self, recipe: Recipe, layout: Layout, place: groups.Groups, console: Console, profile: Profile
    ) -> None:
        self.config, self.layout, self.place, self.console = recipe.config, layout, place, console
        self.profile = profile
        self.folder = Path(self.config.run.dir)
        self.recipe = recipe
        self._epoch: int | None = None  # the newest whose packing was told
        groups.agree(lambda: _open_folder(self.folder))
        tokenizer = load_tokenizer(self.config.data)
        vocab_size = vocab_rows(self.config.model, tokenizer.vocab_size)
        data = self.config.data
        corpus = self._corpus(data.train_files, tokenizer, data.train_names)
        held_out = {name: self._corpus(files, tokenizer) for name, files in data.eval_sets.items()}
        self.ledgers = {"train": corpus.report(), **{name: found.report() for name, found in held_out.items()}}
        mixture = Mixture.of(data.sources, corpus.source_ids, corpus.lengths)
        self.loader = self._loader(corpus, tokenizer, mixture, replayed_plans(self.config, corpus))
        self.held_out = {name: self._loader(found, tokenizer) for name, found in held_out.items()}
        self.num_steps = self.config.train.num_steps or self.loader.total_steps(self.config.train.num_epochs or 1)
        if self.config.data.plan is not None:
            self.loader.locate(self.num_steps - 1)  # a plan that ends too early is refused now
        self.engine = Engine(self.config, layout, place, vocab_size=vocab_size, num_steps=self.num_steps)
        self.checkpoints = Checkpoints(
            self.config.checkpoint, self.folder / "checkpoints", follows_from(self.config, corpus), console
        )

    def train(self) -> None:
        """Step until the last step is done; evaluate and save when due, at the end in any case."""
        state = self.checkpoints.resume(self.engine) or self._fresh()
        if state.step >= self.num_steps:
            self.console.say(f"nothing to do: {self.folder} has done all its {self.num_steps} steps")
            return
        groups.agree(self._note)
        bar = self.console.track("training", self.num_steps, "steps", lines=False, start=state.step)
        with self._metrics(state) as metrics, bar as progress:
            if state.step == 0:
                self._evaluate(state, metrics)
            while state.step < self.num_steps:
                with self.profile.step(state.step + 1):
                    state = self._step(state, metrics)
                    progress.advance(1)
                    self._finish_step(state, metrics)
            metrics.summarise()
        self.console.say(
            f"done: {self.folder}/ holds checkpoints/, tensorboard/, metrics.jsonl, recipe.yaml and data.json"
        )

    def _note(self) -> None:
        """What trained here on what.  Only once it is sure that it does: a refused recipe replaces nothing."""
        try:
            replace_text(self.folder / "recipe.yaml", dump(self.recipe))
            replace_text(self.folder / "data.json", json.dumps(self.ledgers, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"run.dir = {self.folder} cannot be written: {error}.") from error

    def _step(self, state: RunState, metrics: Metrics) -> RunState:
        """One update, and its record."""
        started = time.monotonic()
        self._tell_packing(state.step)
        microbatches = self.loader.microbatches(state.step)
        waited = time.monotonic() - started
        result = self.engine.train_step(microbatches, sources=self.loader.sources, data_wait_s=waited)
        self._check(result, state.step)
        state = state.after(result)
        metrics.train(self._record(state, result, time.monotonic() - started))
        return state

    def _finish_step(self, state: RunState, metrics: Metrics) -> None:
        """What is due after a step."""
        last = state.step == self.num_steps
        if _due(state.step, self.config.train.eval_every) or last:
            self._evaluate(state, metrics)
        if _due(state.step, self.config.checkpoint.save_every) or (last and self.config.checkpoint.save_last):
            self.checkpoints.save(self.engine, state)

    def _tell_packing(self, step: int) -> None:
        """Once an epoch; packing takes about a second a million samples, too little for a bar."""
        epoch, _ = self.loader.locate(step)
        if epoch != self._epoch:
            self._epoch, plan = epoch, self.loader.plan(epoch)
            self.console.say(f"packed epoch {epoch}: {len(plan):,} packs, {plan.fill:.1%} full")

    def _corpus(self, paths: list[str], tokenizer: ChatTokenizer, names: list[str] | None = None) -> Corpus:
        """Rank 0 finds what was prepared, by reading the files once; then everybody maps it."""
        data, how = self.config.data, f"sft data prepare {self.recipe.arguments}"
        folders = groups.agree(lambda: find_prepared(paths, data, tokenizer, Path(self.config.cache_dir), how=how))
        corpus = map_prepared(paths, folders, data, names, how=how)
        self.console.say(corpus.summary())
        return corpus

    def _loader(
        self,
        corpus: Corpus,
        tokenizer: ChatTokenizer,
        mixture: Mixture | None = None,
        replayed: Sequence[Plan] | None = None,
    ) -> Loader:
        return Loader(
            corpus,
            data=self.config.data,
            layout=self.layout,
            seed=self.config.run.seed,
            dp_rank=self.place.dp_rank,
            pad_id=tokenizer.pad_id,
            reduction=self.config.loss.reduction,
            crossover=attention_crossover(self.config.model),
            mixture=mixture,
            replayed=replayed,
            local_indices=partial(cp.local_indices, cp_size=self.layout.cp, cp_rank=self.place.cp_rank),
        )

    def _fresh(self) -> RunState:
        """A new run: from random weights, or from those that model.init_from names."""
        source = self.config.model.init_from
        if source:
            folder = weights_of(source)
            shards.load_weights(self.engine, folder)
            self.console.say(f"started from the weights of {folder}")
        else:
            self.console.say(f"started from random weights (seed {self.config.run.seed})")
        return RunState()

    def _metrics(self, state: RunState) -> Metrics:
        writers: list[Writer] = []  # stays empty on the other ranks
        groups.agree(lambda: writers.extend(open_writers(self.folder, self.config, state.step, self.console)))
        every = self.config.log.every
        metrics = Metrics(writers, self.console, step=state.step, num_steps=self.num_steps, every=every)
        parameters = num_parameters(self.config.model, self.engine.vocab_size)
        self.console.say(f"parameters {parameters:,} | attention {self.engine.backend} | steps {self.num_steps:,}")
        sizes = {name: getattr(self.layout, name) for name in ("world_size", "tp", "cp", "pp", "dp")}
        metrics.start({"parameters": parameters, "num-steps": self.num_steps, "layout": sizes})
        return metrics

    def _record(self, state: RunState, result: StepResult, seconds: float) -> dict[str, object]:
        return train_record(
            state.step,
            result,
            self.layout,
            self.config,
            schema=self.engine.schema(self.loader.sources),
            vocab_size=self.engine.vocab_size,
            seconds=seconds,
        )

    def _evaluate(self, state: RunState, metrics: Metrics) -> None:
        for name, loader in self.held_out.items():
            started = time.monotonic()
            totals = evaluate(self.engine, loader)
            if not math.isfinite(totals.loss):
                raise TrainingError(
                    f"the held-out loss of {name} after step {state.step} is {totals.loss}; nothing was saved."
                )
            seconds, schema = time.monotonic() - started, self.engine.schema(loader.sources)
            record = eval_record(state.step, totals, self.config, set_name=name, schema=schema, seconds=seconds)
            metrics.eval(record)

    def _check(self, result: StepResult, step: int) -> None:
        """Loss and norm are the same on all ranks, so all stop together, and nothing is saved."""
        if math.isfinite(result.totals.loss) and math.isfinite(result.grad_norm):
            return
        samples = sorted(i for pack in self.loader.global_batch(step) for i in pack)
        raise TrainingError(
            f"step {step + 1}: loss {result.totals.loss}, gradient norm {result.grad_norm}.  The step was not saved; "
            f"the last checkpoint is whole.  Its samples, by number: {samples}."
        )


def _open_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.dir = {folder} cannot be made: {error}.") from error


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
