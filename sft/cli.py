"""The command line: `sft train`, `sft check` and `sft data`.

Decides what the verbs print, and how an error a user can cause ends: one paragraph on rank 0, exit code 2.
Everything heavy is imported where it is first used, so that help and mistakes answer at once.
"""

import argparse
import atexit
import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from sft.console import Console, size
from sft.errors import ConfigError, SftError

if TYPE_CHECKING:
    from sft.data.tokenizer import ChatTokenizer
    from sft.layout import Layout
    from sft.recipe import Recipe

_SECONDS_FOR_RANK_0 = 10.0
_OVERRIDES = "settings that replace the recipe's, such as parallel.cp=4 data.train=my.jsonl"


def run() -> NoReturn:
    """The process: `main`, and its end without taking the interpreter down.

    The threads of a process group drop the tensors of its last collective after that has returned.  One that does
    so while the interpreter is being taken down aborts the process: exit code -6 in place of ours.
    """
    code = main()
    atexit._run_exitfuncs()  # ends the helpers that saved checkpoints, among others
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code: 0, 2 for a mistake of the user, 130 when interrupted."""
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        arguments.action(arguments)
    except SftError as error:
        _tell(error)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _tell(error: SftError) -> None:
    """Print `error` on rank 0: every rank finds the same mistake, and one of them tells it.

    torchrun ends all processes when the first one is gone, so under torchrun the others wait for that: rank 0
    might not have spoken yet.
    """
    if os.environ.get("RANK", "0") == "0":
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(2))
        time.sleep(_SECONDS_FOR_RANK_0)
        # Still here: rank 0 did not find this mistake, so nobody else will tell it.
        print(f"rank {os.environ['RANK']}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}.\n{self.format_usage().strip()}")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="sft", description="Supervised fine-tuning on Megatron for long context.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    train = verbs.add_parser("train", help="train a recipe; start one process per GPU with torchrun")
    check = verbs.add_parser("check", help="resolve and validate a recipe on any machine, without a GPU")
    data = verbs.add_parser("data", help="work on a recipe's data, without a model or a GPU")
    tasks = data.add_subparsers(dest="task", required=True, metavar="TASK")
    prepare = tasks.add_parser("prepare", help="tokenise the data once; continues where it was killed")
    for verb, action in ((train, _train), (check, _check), (prepare, _prepare)):
        verb.set_defaults(action=action, parser=verb)
        verb.add_argument("recipe", metavar="RECIPE", help="YAML file, for example recipes/qwen3_8b_64k.yaml")
        verb.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help=_OVERRIDES)
    check.add_argument("--world-size", metavar="N", type=int, help="number of processes to lay out")
    check.add_argument("--explain", metavar="KEY", help="tell where a value came from and what it does")
    check.add_argument("--no-data", action="store_true", help="do not look at data files and tokenizer")
    prepare.add_argument("--workers", metavar="N", help="processes that tokenise; same as data.num_workers=N")
    prepare.add_argument("--verify", action="store_true", help="read all that is prepared, and mend what is damaged")
    prepare.add_argument("--sweep", action="store_true", help="then remove what the cache holds for other settings")
    # argparse gives up on settings that follow an option; they come back as the rest.
    arguments, rest = parser.parse_known_args(argv)
    if unknown := [word for word in rest if word.startswith("-")]:
        arguments.parser.error(f"unknown option {unknown[0]}")
    arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _train(arguments: argparse.Namespace) -> None:
    from sft.recipe import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    _layout(recipe, _launched_world_size() or 1)
    _require_wandb(recipe)
    _require_data(recipe)

    from sft.train import main as train

    train(recipe)


def _check(arguments: argparse.Namespace) -> None:
    from sft.layout import smallest_world
    from sft.recipe import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if arguments.explain is not None:
        print(explain(recipe, arguments.explain))
        return
    world_size = arguments.world_size if arguments.world_size is not None else _launched_world_size()
    layout = _layout(recipe, smallest_world(recipe.config) if world_size is None else world_size)
    _require_wandb(recipe)
    _print_group("layout", layout.equations(recipe.config.data.seq_length))
    if arguments.no_data:
        built_in = recipe.config.data.tokenizer == "byte"
        _print_group("model", [_parameters(recipe, _tokenizer(recipe).vocab_size if built_in else None)])
        _print_group("data", ["not looked at (--no-data)"])
    else:
        _require_data(recipe)
        _check_data(recipe)


def _prepare(arguments: argparse.Namespace) -> None:
    from sft.recipe import load_recipe

    workers = [] if arguments.workers is None else [f"data.num_workers={arguments.workers}"]
    recipe = load_recipe(arguments.recipe, [*arguments.overrides, *workers])
    _require_data(recipe)

    from sft.data.prepare import cache_folder, prepare_recipe, sweep_recipe

    tokenizer = _tokenizer(recipe)
    corpora = prepare_recipe(recipe.config, tokenizer, _told(), verify=arguments.verify)
    for name, corpus in corpora.items():
        _print_group(name, corpus.summary().splitlines())
    if arguments.sweep:
        stale = sweep_recipe(recipe.config, tokenizer)
        freed = sum(folder.num_bytes for folder in stale)
        lines = [f"removed {folder.folder} ({size(folder.num_bytes)})" for folder in stale]
        _print_group("sweep", [*lines, f"{cache_folder(recipe.config)}: {size(freed)} freed"])


def _check_data(recipe: "Recipe") -> None:
    from sft.data.pack import plan_epoch
    from sft.data.prepare import prepare_recipe

    data, train = recipe.config.data, recipe.config.train
    tokenizer = _tokenizer(recipe)
    _print_group("model", [_parameters(recipe, tokenizer.vocab_size)])
    corpora = prepare_recipe(recipe.config, tokenizer, _told())
    corpus = corpora.pop("train")
    plan = plan_epoch(
        corpus.lengths,
        capacity=data.seq_length,
        doc_multiple=data.doc_multiple,
        seed=recipe.config.run.seed,
        epoch=0,
        shuffle=data.shuffle,
    )
    steps = -(-len(plan) // train.global_batch_size)
    lines = [
        *corpus.summary().splitlines(),
        f"{len(plan):,} packs of at most {data.seq_length:,} tokens, {plan.fill:.1%} full, "
        f"of which {plan.alignment_waste:.1%} is padding inside documents",
        f"steps per epoch {steps:,} = {len(plan):,} packs / global_batch_size {train.global_batch_size}, " "rounded up",
    ]
    if train.num_steps:
        lines.append(f"num_steps {train.num_steps:,} = {train.num_steps / steps:.2f} epochs")
    _print_group("data", lines)
    for name, held_out in corpora.items():
        _print_group(name, held_out.summary().splitlines())


def explain(recipe: "Recipe", key: str) -> str:
    """What `key` is, where it came from and what it does; every key below it where it names a group.

    model.head_dim = 128
        from     derived: hidden_size / num_attention_heads
        type     a whole number of at least 1 or null; default null
        meaning  Width of a head; null means hidden_size / num_attention_heads.
    """
    from sft.keys import OPEN, expected, leaves, show, unknown, values
    from sft.recipe import derived

    current, substitutes = values(recipe.config), derived(recipe.config)
    paragraphs = []
    for name in (k for k in current if k == key or k.startswith(f"{key}.")):
        value = substitutes[name][0] if name in substitutes else current[name]
        info = leaves()[name if name in leaves() else OPEN]
        default = "; required" if info.is_required() else f"; default {show(info.default)}"
        paragraphs.append(
            f"{name} = {show(value)}\n    from     {recipe.origins[name]}\n"
            f"    type     {expected(name)}{default if name in leaves() else ''}\n"
            f"    meaning  {info.description}"
        )
    if not paragraphs:
        raise ConfigError(unknown(key, f"command line: --explain {key}"))
    return "\n".join(paragraphs)


def _layout(recipe: "Recipe", world_size: int) -> "Layout":
    """The layout, or its problems together with where their keys were set."""
    from sft.keys import leaves
    from sft.layout import Layout

    if world_size < 1:
        raise ConfigError(f"{world_size} processes cannot hold a model; the world size is at least 1.")
    try:
        return Layout.resolve(recipe.config, world_size)
    except ConfigError as error:
        named = [key for key in leaves() if f"{key} = " in str(error)]
        places = ", ".join(f"{key} ({recipe.origins[key]})" for key in named)
        raise ConfigError(f"{error}\n  Set in: {places}." if named else str(error)) from None


def _require_data(recipe: "Recipe") -> None:
    """Refuse paths that are not there before anything heavy is imported."""
    data = recipe.config.data
    paths = [("data.train", path) for path in data.train]
    paths += [("data.eval", path) for files in data.eval_sets.values() for path in files]
    paths += [] if data.tokenizer == "byte" else [("data.tokenizer", data.tokenizer)]
    paths += [] if data.chat_template is None else [("data.chat_template", data.chat_template)]
    missing = [
        f"{key} = {path} ({recipe.origins[key]}) does not exist in {Path.cwd()}; give {key}=PATH."
        for key, path in paths
        if not Path(path).exists()
    ]
    if missing:
        from sft.config import listed

        raise ConfigError(listed(missing))


def _require_wandb(recipe: "Recipe") -> None:
    """Refuse a recipe that logs to W&B where its package is not installed."""
    project = recipe.config.log.wandb
    found = None if project is None else find_spec("wandb")
    if project is not None and (found is None or found.origin is None):  # no origin: a mere folder named wandb
        raise ConfigError(
            f"log.wandb = {project} ({recipe.origins['log.wandb']}) needs the package wandb, which is not installed "
            "here: pip install wandb; or go without: log.wandb=null."
        )


def _launched_world_size() -> int | None:
    """What torchrun says; None where nothing was launched."""
    text = os.environ.get("WORLD_SIZE")
    if text is not None and not text.isdecimal():
        raise ConfigError(f'environment variable WORLD_SIZE = "{text}" is not a number of processes; unset it.')
    return None if text is None else int(text)


def _tokenizer(recipe: "Recipe") -> "ChatTokenizer":
    from sft.data.tokenizer import load_tokenizer

    return load_tokenizer(recipe.config.data)


def _parameters(recipe: "Recipe", tokenizer_size: int | None) -> str:
    from sft.layout import num_parameters, vocab_rows

    model = recipe.config.model
    if model.vocab_size is None and tokenizer_size is None:
        return "parameters unknown: the tokenizer gives model.vocab_size, and was not looked at"
    rows = vocab_rows(model, tokenizer_size or 0)
    return f"parameters {num_parameters(model, rows):,} with a vocabulary of {rows:,}"


def _told() -> "Console":
    """Says how far work is on stderr: stdout is for what was asked."""
    return Console(0, sys.stderr)


def _print_group(name: str, lines: Sequence[str]) -> None:
    for label, line in zip([name, *[""] * len(lines)], lines, strict=False):
        print(f"{label:8}{line}", flush=True)
