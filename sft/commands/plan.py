"""`sft plan`: searches the layouts of a recipe or a model, and says which is the fastest that fits, and why."""

import json
from argparse import Namespace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft.commands.output import need_matplotlib, print_group, progress
from sft.errors import ConfigError
from sft.estimate.gpus import GIB, HOST_GIB

if TYPE_CHECKING:
    import numpy as np

    from sft.planner.report import Report
    from sft.planner.task import Task
    from sft.recipe.resolved import Recipe

_TOP = 5


def add(commands: Any) -> None:
    command = commands.add_parser("plan", help="find the fastest layout that fits, on any machine, without a GPU")
    command.set_defaults(action=plan, parser=command)
    command.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help="settings of the recipe")
    command.add_argument("--model", metavar="M", help="a recipe, a folder, or a name on the hub")
    command.add_argument("--gpus", metavar="N[,N]", help="numbers of GPUs; each is planned")
    command.add_argument("--gpu", metavar="NAME", default="h100", help="type of GPU, such as h200 (default h100)")
    command.add_argument("--gpus-per-node", metavar="N", type=int, default=8, help="GPUs of a node (default 8)")
    about = "network between nodes: ib400 (default), roce200, ..., or the GB/s that a GPU receives"
    command.add_argument("--fabric", metavar="NAME", default="ib400", help=about)
    about = f"memory of a node's host for offloading (default {HOST_GIB:.0f})"
    command.add_argument("--host-gib", metavar="GIB", type=float, default=HOST_GIB, help=about)
    command.add_argument("--seq-length", metavar="N", type=int, help="tokens of a pack; default: those of the recipe")
    about = "lengths of documents: data (those of the recipe), or LENGTH:SHARE,...; default: as long as packs"
    command.add_argument("--lengths", metavar="L", help=about)
    command.add_argument("--lora", action="store_true", help="train LoRA adapters of rank 16")
    batch = command.add_mutually_exclusive_group()
    batch.add_argument("--global-batch-size", metavar="N", type=int, help="packs of a step")
    batch.add_argument("--tokens-per-step", metavar="N", type=int, help="instead; default for a model 1048576")
    about = "tokens of the whole run, such as 2e9, for GPU hours; with --lengths data those of the data"
    command.add_argument("--tokens", metavar="N", type=float, help=about)
    command.add_argument("--top", metavar="N", type=int, default=_TOP, help=f"proposals to show (default {_TOP})")
    command.add_argument("--write", metavar="FILE", type=Path, help="write the best proposal as a recipe")
    command.add_argument("--json", action="store_true", help="print one JSON object (docs/how-to/plan.md)")
    command.add_argument(
        "--picture", metavar="FILE", type=Path, help="draw memory and time of the proposals: .png, .svg"
    )
    about = "measure the constants of predictions on this device, a minute; alone or under torchrun (docs/calibrate.md)"
    command.add_argument("--calibrate", action="store_true", help=about)


def plan(arguments: Namespace) -> int:
    """Run `sft plan`.  Returns 2 if nothing fits on the last number of GPUs, else 0."""
    if arguments.calibrate:
        from sft.commands.calibrate import calibrate

        return calibrate(arguments)
    counts = _counts(arguments)
    _check(arguments, counts)

    from sft.planner.propose import propose
    from sft.planner.subject import recipe_of

    recipe = recipe_of(
        arguments.model,
        seq_length=arguments.seq_length,
        packs=arguments.global_batch_size,
        tokens_per_step=arguments.tokens_per_step,
        is_lora=arguments.lora,
        overrides=arguments.overrides,
    )
    task = _task(recipe, arguments)
    reports = [propose(task, count, arguments.top) for count in counts]
    if arguments.json:
        print(json.dumps({"version": 1, "numbers_of_gpus": [report.json() for report in reports]}, indent=1))
    else:
        for report in reports:
            for name, lines in report.lines(datetime.now()).items():
                print_group(name, lines)
    if arguments.picture is not None:
        _draw(reports, arguments.picture)
    if arguments.write is not None and reports[0].proposals:
        _write(recipe, reports[0], arguments)
    return 0 if reports[-1].proposals else 2


def _counts(arguments: Namespace) -> list[int]:
    for name in ("model", "gpus"):
        if getattr(arguments, name) is None:
            arguments.parser.error(f"the following arguments are required: --{name}")
    words = arguments.gpus.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"--gpus {arguments.gpus} is no list of numbers of GPUs.  Write --gpus 8 or --gpus 8,64.")
    return [int(word) for word in words]


def _check(arguments: Namespace, counts: list[int]) -> None:
    """Raise ConfigError if arguments cannot be used together, before anything is computed."""
    for name in ("gpus_per_node", "seq_length", "global_batch_size", "tokens_per_step", "top", "tokens"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} {value} is not above 0.")
    partial = [count for count in counts if count > arguments.gpus_per_node and count % arguments.gpus_per_node]
    if partial:
        raise ConfigError(
            f"--gpus {partial[0]} is no multiple of --gpus-per-node {arguments.gpus_per_node}.  A run on several nodes "
            "uses all their GPUs."
        )
    if arguments.write is not None and len(counts) > 1:
        raise ConfigError(f"--write writes one recipe, but --gpus {arguments.gpus} names several sizes.  Give one.")
    if arguments.picture is not None:
        if arguments.picture.suffix not in (".png", ".svg"):
            raise ConfigError(f"--picture {arguments.picture} does not end in .png or .svg.")
        need_matplotlib("--picture")


def _task(recipe: "Recipe", arguments: Namespace) -> "Task":
    from sft.commands.arguments import read_tokenizer
    from sft.estimate import gpus
    from sft.estimate.constants import constants_of
    from sft.estimate.lengths import Lengths
    from sft.hf.trained_weights import trained_weights
    from sft.parallel.layout import vocab_rows
    from sft.planner.task import Hardware, Task

    config, gpu, fabric_gb_s = recipe.config, gpus.gpu(arguments.gpu), gpus.fabric(arguments.fabric)
    rows = config.model.vocab_size or vocab_rows(config.model, read_tokenizer(recipe).vocab_size)
    lengths, tokens = Lengths.all_of(config.data.seq_length), arguments.tokens
    if arguments.lengths == "data":
        corpus = _lengths_of_data(recipe)
        lengths = Lengths.of_corpus(corpus)
        tokens = tokens or float(corpus.sum()) * (config.train.num_epochs or 1)
    elif arguments.lengths is not None:
        lengths = Lengths.read(arguments.lengths)
    if tokens is None and config.train.num_steps is not None:
        tokens = float(config.train.num_steps * config.train.global_batch_size * config.data.seq_length)
    hardware = Hardware(
        gpu=gpu,
        gpus_per_node=arguments.gpus_per_node,
        fabric=arguments.fabric,
        constants=constants_of(gpu, fabric_gb_s),
        host_bytes=arguments.host_gib * GIB,
    )
    return Task.of(
        config.model.hf or arguments.model,
        config,
        vocab_size=rows,
        trained=trained_weights(config, rows),
        lengths=lengths,
        hardware=hardware,
        tokens=tokens,
    )


def _lengths_of_data(recipe: "Recipe") -> "np.ndarray":
    """The lengths of the documents of the recipe's data, which is tokenised if it was not yet."""
    from sft.commands.arguments import check_paths, read_tokenizer
    from sft.data.cache.prepare import prepare_train

    check_paths(recipe)
    return prepare_train(recipe.config, read_tokenizer(recipe), progress()).lengths


def _draw(reports: "list[Report]", file: Path) -> None:
    from sft.planner.picture import draw

    try:
        draw(reports, file)
    except OSError as error:
        raise ConfigError(f"--picture {file} cannot be written: {error.strerror}.") from error
    progress().say(f"picture {file}")


def _write(recipe: "Recipe", report: "Report", arguments: Namespace) -> None:
    from sft.planner.written import recipe_text

    is_recipe = arguments.model.endswith((".yaml", ".yml"))
    sibling = f"{arguments.model}, from which it was planned." if is_recipe else "recipes/ has others."
    text = recipe_text(recipe, report.task, report.proposals[0], path=str(arguments.write), sibling=sibling)
    try:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {arguments.write} cannot be written: {error.strerror}.") from error
    progress().say(f"recipe {arguments.write}; `sft check {arguments.write}` shows what it does")
