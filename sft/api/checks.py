"""`sft.check`: resolves and validates a recipe, and says its layout, its memory and its data."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sft.console import Console, grouped
from sft.errors import ConfigError

if TYPE_CHECKING:
    from sft.data.chat.tokenizer import ChatTokenizer
    from sft.estimate.gpus import Gpu
    from sft.estimate.lengths import Lengths
    from sft.layers.adapters import Trained
    from sft.parallel.layout import Layout
    from sft.recipe.resolved import Recipe

_WARNING = "WARNING"


class Topic(NamedTuple):
    """Lines about one topic, such as `memory`."""

    name: str
    lines: Sequence[str]


@dataclass(frozen=True, kw_only=True, repr=False)
class Checked:
    """The result of `check`.  Its `repr` is what `sft check` prints.

    topics  layout, lengths, model, memory, weights, data, resume, time, questions, one for each held-out set, and
            WARNING.  A topic may occur several times
    """

    topics: Sequence[Topic]

    @property
    def warnings(self) -> list[str]:
        """Lines about what the run may do, but probably should not."""
        return self[_WARNING]

    def __getitem__(self, name: str) -> list[str]:
        """The lines about a topic; [] if nothing is said about it."""
        return [line for topic in self.topics if topic.name == name for line in topic.lines]

    def __repr__(self) -> str:
        return "\n".join(grouped(*topic) for topic in self.topics if topic.lines)


def check(recipe: "Recipe", *, world_size: int | None = None, gpu: str | None = None, data: bool = True) -> Checked:
    """Check the recipe as `train` does, on any machine, without a GPU.  Data that are not prepared are tokenised.

    world_size: number of processes of the run; None: that of torchrun, or the smallest that the layout allows
    gpu: type of GPU that must hold the recipe, such as "h100"; None: the GPU of this machine.  Without one, a warning
    says which common GPUs hold the recipe
    data: read the data files and the tokenizer

    Raises the error with which `train` would end before its first step: ConfigError, DataError or CheckpointError; and
    ConfigError if a rank needs more memory than the GPU has.
    """
    return Checked(topics=tuple(topics(recipe, world_size=world_size, gpu=gpu, data=data)))


def topics(recipe: "Recipe", *, world_size: int | None, gpu: str | None, data: bool) -> Iterator[Topic]:
    """Yields the topics of `check`, each as soon as it is known."""
    from sft.recipe.layout import launched_world_size, resolve_layout
    from sft.recipe.needs import check_names, check_packages, check_paths
    from sft.recipe.rope_lengths import rope_lengths
    from sft.recipe.run_dir import check_folder

    type_of_gpu = _gpu(recipe, gpu)
    layout = resolve_layout(recipe, launched_world_size() if world_size is None else world_size)
    check_packages(recipe)
    check_names(recipe)
    check_folder(recipe, has_files=data)
    yield Topic("layout", layout.equations(recipe.config.data.seq_length))
    yield Topic("lengths", rope_lengths(recipe))
    yield from _rotary(recipe)
    if data:
        check_paths(recipe)
        yield from _with_data(recipe, layout, type_of_gpu)
    else:
        yield from _without_data(recipe, layout, type_of_gpu)


def _without_data(recipe: "Recipe", layout: "Layout", gpu: "Gpu | None") -> Iterator[Topic]:
    from sft.estimate.lengths import Lengths
    from sft.recipe.resume_lines import without_data
    from sft.recipe.tokenizer import tokenizer_of

    built_in = recipe.config.tokenizer == "byte"
    vocab_size = tokenizer_of(recipe.config).vocab_size if built_in else None
    yield from _model(recipe, layout, vocab_size, gpu)
    lengths = Lengths.all_of(recipe.config.data.seq_length)
    yield _time(recipe, layout, vocab_size, lengths, gpu)
    yield _questions(recipe, layout, vocab_size, lengths)
    yield Topic("weights", ["not read (--no-data)"])
    yield Topic("data", ["not read (--no-data)"])
    lines, warnings = without_data(recipe, layout)
    yield Topic("resume", lines)
    yield from _warnings(recipe, warnings, num_steps=recipe.config.train.num_steps)


def _gpu(recipe: "Recipe", name: str | None) -> "Gpu | None":
    """The GPU of this name; without a name, the GPU of this machine if it has one and the recipe may use it."""
    from sft.estimate import gpus

    if name is not None:
        return gpus.gpu(name)
    return None if recipe.config.run.device == "cpu" else gpus.gpu_of_machine()


def _rotary(recipe: "Recipe") -> Iterator[Topic]:
    """Yields the reason if the run may use Transformer Engine, but its fused rotary kernel cannot be used."""
    from sft.layers.fused_rotary import why_not

    config = recipe.config
    may_run = config.attention.may_be_te(config.run.device) and config.auto_is_portable is None
    if may_run and (problem := why_not(config)):
        yield Topic("rotary", [f"with te: {problem}"])


def _with_data(recipe: "Recipe", layout: "Layout", gpu: "Gpu | None") -> Iterator[Topic]:
    from sft.recipe.tokenizer import tokenizer_of

    train = recipe.config.train
    tokenizer = tokenizer_of(recipe.config)
    yield from _model(recipe, layout, tokenizer.vocab_size, gpu)

    # These modules import torch, which takes long.  So `_model` first refuses a recipe that does not fit.
    from sft.console import size
    from sft.data.cache.prepare import prepare_recipe
    from sft.data.inspect import cp_forecast
    from sft.data.inspect.forecast import length_lines
    from sft.data.loader import make_loader
    from sft.estimate.lengths import Lengths
    from sft.estimate.memory import estimate
    from sft.parallel.layout import vocab_rows
    from sft.recipe.long_questions import make_in_run, usable_bytes
    from sft.recipe.resume_lines import with_data
    from sft.recipe.run_checks import wasteful_multiple
    from sft.recipe.start import check_weights
    from sft.weights.trained import trained_weights

    rows = vocab_rows(recipe.config.model, tokenizer.vocab_size)
    trained = trained_weights(recipe.config, rows)
    for name, lines in check_weights(recipe.config, trained, rows).items():
        yield Topic(name, lines)
    console = Console(0, sys.stderr)
    corpora = prepare_recipe(recipe.config, tokenizer, console)
    corpus = corpora.pop("train")
    loader = make_loader(recipe.config, layout, corpus, pad_id=0)
    num_steps = train.num_steps or loader.plans.total_steps(train.num_epochs or 1)
    loader.plans.check_length(num_steps)
    plan = loader.plans.plan(0)
    explained: set[str] = set()
    lines = [
        *corpus.summary(explained).splitlines(),
        f"{len(plan):,} packs of at most {recipe.config.data.seq_length:,} tokens, {plan.fill:.1%} full, "
        f"of which {plan.alignment_waste:.1%} is padding inside documents",
        *length_lines(recipe.config, plan),
        *([cp_forecast.short_line(loader)] if layout.cp_sizes else ()),
    ]
    yield Topic("data", lines)
    lines, warnings = with_data(recipe, layout, corpus, loader, rows)
    yield Topic("resume", lines)
    lengths = Lengths.of_corpus(corpus.shapes)
    if lengths.trees:
        needed = estimate(recipe.config, layout, rows, trained=trained, lengths=lengths).device
        line = f"per rank with the trees of an average pack, estimated and not measured: {size(needed)}"
        yield Topic("memory", [line])
    if gpu is not None:
        _check_fit(recipe, layout, rows, trained, lengths, gpu)
    yield _time(recipe, layout, tokenizer.vocab_size, lengths, gpu)
    usable = usable_bytes(recipe.config, layout, gpu)
    asked = make_in_run(recipe, layout, tokenizer, corpus, console, lambda: num_steps, usable)
    yield Topic("questions", asked.lines)
    for name, held_out in corpora.items():
        yield Topic(name, held_out.summary(explained).splitlines())
    yield from _serving(recipe, tokenizer)
    waste = wasteful_multiple(recipe.config, corpus.lengths)
    yield from _warnings(recipe, [*warnings, *waste], num_steps=num_steps, num_packs=len(plan), longest=corpus.longest)


def _warnings(recipe: "Recipe", others: Sequence[str], **length: int | None) -> Iterator[Topic]:
    """Yields the warnings about a run of this length.  Raises ConfigError if training would refuse the run."""
    from sft.recipe.run_checks import check_run

    for warning in [*check_run(recipe, **length), *others]:
        yield Topic(_WARNING, [warning])


def _model(recipe: "Recipe", layout: "Layout", tokenizer_size: int | None, gpu: "Gpu | None") -> Iterator[Topic]:
    """Yields the number of parameters and the predicted memory.  Raises ConfigError if the recipe does not fit the
    GPU."""
    from sft.estimate.lengths import Lengths
    from sft.estimate.memory import describe
    from sft.layers import kinds
    from sft.layers.flops import describe_parameters, num_parameters
    from sft.parallel.layout import surplus_note, vocab_rows
    from sft.weights.trained import trained_weights

    model = recipe.config.model
    if model.vocab_size is None and tokenizer_size is None:
        unknown = "number of parameters unknown: model.vocab_size comes from the tokenizer, which was not read"
        yield Topic("model", [unknown])
        return
    rows = vocab_rows(model, tokenizer_size or 0)
    trained = trained_weights(recipe.config, rows)
    lines = [f"parameters {describe_parameters(model, rows)} with a vocabulary of {rows:,}"]
    if (note := surplus_note(model, tokenizer_size or 0)) is not None:
        lines.append(note)
    if (line := kinds.describe(model)) is not None:
        lines.append(line)
    if trained.whole is not None:
        lines.append(trained.describe(recipe.config.lora.rank, num_parameters(model, rows)))
    yield Topic("model", lines)
    yield Topic("memory", describe(recipe.config, layout, rows, trained))
    if gpu is None and recipe.config.run.device != "cpu":
        yield from _memory_warning(recipe, layout, rows, trained)
    if gpu is not None:
        _check_fit(recipe, layout, rows, trained, Lengths.all_of(recipe.config.data.seq_length), gpu)


def _memory_warning(recipe: "Recipe", layout: "Layout", rows: int, trained: "Trained") -> Iterator[Topic]:
    """Yields a warning if a rank needs more memory than the common GPUs have, or than some of them."""
    from sft.estimate.communicators import nccl_bytes
    from sft.estimate.gpus import COMMON, GIB, gpu, usable_memory
    from sft.estimate.lengths import Lengths
    from sft.estimate.memory import estimate

    config = recipe.config
    lengths = Lengths.all_of(config.data.seq_length)
    needed = estimate(config, layout, rows, trained=trained, lengths=lengths).device
    usable = {name: usable_memory(gpu(name), nccl_bytes(config, layout)).bytes for name in COMMON}
    fitting = [name for name, num_bytes in usable.items() if needed <= num_bytes]
    if len(fitting) == len(COMMON):
        return
    most = usable[COMMON[-1]] / GIB
    fits = f"fits {' and '.join(fitting)} only" if fitting else f"fits no common GPU ({COMMON[-1]}: {most:,.0f} usable)"
    options = f"--world-size {layout.world_size} --gpu {COMMON[0]}"
    advice = f"sft check {recipe.arguments} {options} names the cheapest change that fits"
    yield Topic(_WARNING, [f"a rank needs {needed / GIB:,.0f} GiB (predicted), which {fits}; {advice}"])


def _check_fit(
    recipe: "Recipe", layout: "Layout", rows: int, trained: "Trained", lengths: "Lengths", gpu: "Gpu"
) -> None:
    """Raise ConfigError if the recipe does not fit the GPU with documents of these lengths."""
    from sft.estimate.constants import constants_of
    from sft.estimate.gpus import GIB, HOST_GIB
    from sft.planner.fit import problem
    from sft.planner.task import Hardware, Task

    config = recipe.config
    hardware = Hardware(
        gpu=gpu,
        gpus_per_node=config.parallel.gpus_per_node,
        fabric="",
        constants=constants_of(gpu, config.parallel.inter_node_gb_s),
        host_bytes=HOST_GIB * GIB,
    )
    task = Task(
        name=config.model.hf or "",
        config=config,
        vocab_size=rows,
        trained=trained,
        lengths=lengths,
        hardware=hardware,
    )
    if paragraph := problem(task, layout):
        raise ConfigError(paragraph)


def _serving(recipe: "Recipe", tokenizer: "ChatTokenizer") -> Iterator[Topic]:
    """Yields the `vllm serve` command that serves the adapters with the chat template and stop ids of the training.

    Yields nothing for a whole model.
    """
    config = recipe.config
    if not config.lora.is_used or config.lora.export != "adapter" or config.model.hf is None:
        return
    from sft.weights.serving import flags
    from sft.weights.serving.served import served_of
    from sft.weights.serving.served_files import record_of

    if (served := served_of(config, tokenizer)) is not None:
        record = record_of(served)
        lines = [
            f"adapters in the folder ADAPTER: {' '.join(flags.flags(record, config.model.hf, config.lora.rank or 0))}"
        ]
        if record.end_ids:
            lines.append(f"without --generation-config, each request needs {flags.stop_ids(record)}")
        yield Topic("serving", lines)


def _time(
    recipe: "Recipe", layout: "Layout", tokenizer_size: int | None, lengths: "Lengths", gpu: "Gpu | None"
) -> Topic:
    """The predicted time of a step, without the loss head if the size of the vocabulary is unknown."""
    from sft.estimate.time import constants_for, describe
    from sft.weights.trained import trained_weights

    config = recipe.config
    vocab_size = config.model.vocab_size or tokenizer_size or 0
    constants, trained = constants_for(config, gpu), trained_weights(config, vocab_size)
    lines = describe(config, layout, vocab_size, lengths, constants, os.environ, time.time(), trained)
    return Topic("time", lines)


def _questions(recipe: "Recipe", layout: "Layout", tokenizer_size: int | None, lengths: "Lengths") -> Topic:
    """Which long-context questions the run asks, as far as this is known without data."""
    from sft.recipe.long_in_run import asked_in_run

    vocab_size = recipe.config.model.vocab_size or tokenizer_size or 0
    return Topic("questions", asked_in_run(recipe, layout, vocab_size, lengths, recipe.config.train.num_steps).lines)
