"""`sft.plan`: searches the layouts of a recipe or a model."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft.api.recipes import override_words
from sft.console import Console
from sft.errors import ConfigError
from sft.estimate.gpus import GIB, HOST_GIB
from sft.recipe.needs import check_paths
from sft.recipe.resolved import Recipe

if TYPE_CHECKING:
    from sft.config import Config
    from sft.data.chat.tokenizer import ChatTokenizer
    from sft.planner.report import Report
    from sft.planner.task import Proposal, Task


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of `plan`: proposals of layouts.  All numbers are predictions.

    model    the argument `model` of `plan`
    recipe   the recipe for which layouts were searched
    reports  one report for each number of GPUs.  Its `proposals` are the layouts that fit, the fastest first, each with
             `settings` (keys of a recipe), `time` (seconds of a step and its parts) and `memory` (bytes of a rank)
    """

    model: str
    recipe: Recipe
    reports: Sequence["Report"]

    @property
    def best(self) -> "Proposal | None":
        """The fastest proposal on the first number of GPUs; None if nothing fits."""
        return next(iter(self.reports[0].proposals), None)

    def write(self, file: str | Path, *, has_comments: bool = False) -> None:
        """Write the best proposal as a recipe.  has_comments: whether it says what each key means

        Raises ConfigError if nothing fits, if several numbers of GPUs were planned, or if the file cannot be written.
        """
        from sft.planner.written import recipe_text

        if len(self.reports) > 1 or self.best is None:
            content = "several numbers of GPUs" if len(self.reports) > 1 else "no layout that fits"
            raise ConfigError(f"{file}: one proposal makes a recipe, but the plan has {content}.")
        is_recipe = self.model.endswith((".yaml", ".yml"))
        sibling = f"{self.model}, from which it was planned." if is_recipe else "recipes/ has others."
        task = self.reports[0].task
        text = recipe_text(self.recipe, task, self.best, path=str(file), sibling=sibling, has_comments=has_comments)
        try:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror}.") from error


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Assumptions of `plan`: the hardware, and the data of a step.  The names are those of the options of `sft plan`.

    gpu                type of GPU, such as "h200"
    gpus_per_node      number of GPUs of a node
    fabric             network between nodes: ib400, roce200, ..., or the GB/s that a GPU receives, as a text
    host_gib           memory of a node's host that offloading may use, in GiB
    seq_length         tokens of a pack; None: data.seq_length of the recipe
    lengths            lengths of documents: "data" for those of the recipe's data, which are tokenised if needed, or
                       "LENGTH:SHARE,..." in tokens; None: every document fills a pack
    lora               whether LoRA adapters of rank 16 are trained
    global_batch_size  packs of a step; None: train.global_batch_size of the recipe
    tokens_per_step    tokens of a step, instead of global_batch_size; None: 2^20 if `model` is not a recipe
    tokens             tokens of the whole run, from which its GPU hours are computed; None: those of the recipe or
                       data, if they are known
    price              price of an hour of a GPU, in any currency, for the cost of the run; None: no cost is given
    top                largest number of proposals in a report
    """

    gpu: str = "h100"
    gpus_per_node: int = 8
    fabric: str = "ib400"
    host_gib: float = HOST_GIB
    seq_length: int | None = None
    lengths: str | None = None
    lora: bool = False
    global_batch_size: int | None = None
    tokens_per_step: int | None = None
    tokens: float | None = None
    price: float | None = None
    top: int = 5


def plan(
    model: str | Path,
    gpus: int | Sequence[int],
    options: PlanOptions = PlanOptions(),
    overrides: Mapping[str, Any] | Sequence[str] = (),
) -> Plan:
    """Search for the fastest layouts of `model` that fit on `gpus` GPUs.  Needs no GPU.

    model: a recipe (.yaml), a folder with config.json, or a name on the hub
    gpus: a number of GPUs, or several numbers; each number gets a report
    overrides: settings of the recipe, as for `load`

    Raises ConfigError if the arguments cannot be used together, or for an unknown GPU, network, family or model; its
    message names arguments by the options of `sft plan`.  If no layout fits, no error is raised: `best` is None, and
    the report says which changes would fit.
    """
    counts = [gpus] if isinstance(gpus, int) else list(gpus)
    _check(counts, options)

    from sft.planner.report import Report
    from sft.planner.subject import recipe_of

    recipe = recipe_of(
        str(model),
        seq_length=options.seq_length,
        packs=options.global_batch_size,
        tokens_per_step=options.tokens_per_step,
        is_lora=options.lora,
        overrides=override_words(overrides),
    )
    task = _task(str(model), recipe, options)
    return Plan(model=str(model), recipe=recipe, reports=tuple(Report.of(task, count, options.top) for count in counts))


def _check(counts: Sequence[int], options: PlanOptions) -> None:
    """Raise ConfigError if arguments cannot be used together, before anything is computed."""
    for name in ("gpus_per_node", "seq_length", "global_batch_size", "tokens_per_step", "top", "tokens", "price"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{name} = {value} is not above 0.")
    if not counts or min(counts) < 1:
        written = ",".join(map(str, counts))
        raise ConfigError(f"gpus = {written} is no list of numbers of GPUs, such as 8 or 8,64.")
    if options.global_batch_size is not None and options.tokens_per_step is not None:
        raise ConfigError("tokens_per_step and global_batch_size both give the packs of a step.  Give one.")
    partial = [count for count in counts if count > options.gpus_per_node and count % options.gpus_per_node]
    if partial:
        raise ConfigError(
            f"gpus = {partial[0]} is no multiple of gpus_per_node = {options.gpus_per_node}.  A run on several nodes "
            "uses all their GPUs."
        )


def _task(model: str, recipe: Recipe, options: PlanOptions) -> "Task":
    from sft.estimate import gpus
    from sft.estimate.constants import constants_of
    from sft.estimate.lengths import Lengths
    from sft.planner.task import Hardware, Task
    from sft.weights.trained import trained_weights

    config, gpu = recipe.config, gpus.gpu(options.gpu)
    hardware = Hardware(
        gpu=gpu,
        gpus_per_node=options.gpus_per_node,
        fabric=options.fabric,
        constants=constants_of(gpu, gpus.fabric(options.fabric)),
        host_bytes=options.host_gib * GIB,
    )
    rows = config.model.vocab_size or _tokenizer(config).vocab_size
    lengths, tokens = Lengths.all_of(config.data.seq_length), options.tokens
    if options.lengths == "data":
        from sft.data.cache.prepare import prepare_train

        check_paths(recipe)
        corpus = prepare_train(config, _tokenizer(config), Console(0, sys.stderr))
        lengths = Lengths.of_corpus(corpus.shapes)
        tokens = tokens or float(corpus.lengths.sum()) * (config.train.num_epochs or 1)
    elif options.lengths is not None:
        lengths = Lengths.read(options.lengths)
    if tokens is None and config.train.num_steps is not None:
        tokens = float(config.train.num_steps * config.train.global_batch_size * config.data.seq_length)
    return Task.of(
        config.model.hf or model,
        config,
        vocab_size=rows,
        trained=trained_weights(config, rows),
        lengths=lengths,
        hardware=hardware,
        tokens=tokens,
        price=options.price,
    )


def _tokenizer(config: "Config") -> "ChatTokenizer":
    """The recipe's tokenizer.  Its modules are imported only where a plan needs it."""
    from sft.recipe.tokenizer import tokenizer_of

    return tokenizer_of(config)
