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
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from sft.errors import ConfigError, SftError

if TYPE_CHECKING:
    from sft.data.corpus import Corpus
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
    """Run one verb and return the exit code: 0, 1 where plans differ, 2 for a mistake of the user, 130 when
    interrupted."""
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        if arguments.verb == "train":
            _train(arguments)
        elif arguments.verb == "data":
            return _data_plan(arguments)
        else:
            _check(arguments)
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
    data = verbs.add_parser("data", help="look at what a recipe makes of its data")
    plan = data.add_subparsers(dest="what", required=True, metavar="WHAT").add_parser(
        "plan", help="tell packs, steps, shares and balance of an epoch"
    )
    for verb in (train, check, plan):
        optional = "?" if verb is plan else None
        verb.add_argument("recipe", metavar="RECIPE", nargs=optional, help="YAML file, as recipes/qwen3_8b_64k.yaml")
        verb.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help=_OVERRIDES)
    check.add_argument("--world-size", metavar="N", type=int, help="number of processes to lay out")
    check.add_argument("--explain", metavar="KEY", help="tell where a value came from and what it does")
    check.add_argument("--no-data", action="store_true", help="do not look at data files and tokenizer")
    plan.add_argument("--world-size", metavar="N", type=int, help="number of processes to balance over")
    plan.add_argument("--write", metavar="FILE", help="write the plan of the run, for --diff and data.plan")
    plan.add_argument("--diff", metavar=("A", "B"), nargs=2, help="tell where two written plans differ; exit code 1")
    # argparse gives up on settings that follow an option; they come back as the rest.
    arguments, rest = parser.parse_known_args(argv)
    if unknown := [word for word in rest if word.startswith("-")]:
        {"train": train, "check": check, "data": plan}[arguments.verb].error(f"unknown option {unknown[0]}")
    if arguments.recipe is None and arguments.diff is None:
        plan.error("a RECIPE is missing")
    arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _train(arguments: argparse.Namespace) -> None:
    from sft.recipe import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    _layout(recipe, _launched_world_size() or 1)
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
    _print_group("layout", layout.equations(recipe.config.data.seq_length))
    if arguments.no_data:
        built_in = recipe.config.data.tokenizer == "byte"
        _print_group("model", [_parameters(recipe, _tokenizer(recipe).vocab_size if built_in else None)])
        _print_group("data", ["not looked at (--no-data)"])
    else:
        _require_data(recipe)
        _check_data(recipe, layout)


def _data_plan(arguments: argparse.Namespace) -> int:
    from sft.data.replay import compare_plans

    if arguments.diff is not None:
        lines = compare_plans(*map(Path, arguments.diff))
        print("\n".join(lines) or "the plans are equal")
        return 1 if lines else 0

    from sft.data.forecast import forecast, write_run
    from sft.layout import smallest_world
    from sft.recipe import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    layout = _layout(recipe, smallest_world(recipe.config) if arguments.world_size is None else arguments.world_size)
    _require_data(recipe)
    corpus = _corpus(recipe, _tokenizer(recipe))
    for name, lines in forecast(recipe.config, layout, corpus).items():
        _print_group(name, lines)
    if arguments.write is not None:
        _print_group("written", [write_run(Path(arguments.write), recipe.config, layout, corpus)])
    return 0


def _corpus(recipe: "Recipe", tokenizer: "ChatTokenizer") -> "Corpus":
    from sft.data.corpus import prepare

    data = recipe.config.data
    cache_dir = Path(data.cache_dir or f"{recipe.config.run.dir}/cache")
    return prepare(data.train_files, data, tokenizer, cache_dir, _progress, data.train_names)


def _check_data(recipe: "Recipe", layout: "Layout") -> None:
    from sft.data.corpus import prepare
    from sft.data.forecast import loader_of

    data, train = recipe.config.data, recipe.config.train
    tokenizer = _tokenizer(recipe)
    _print_group("model", [_parameters(recipe, tokenizer.vocab_size)])
    cache_dir = Path(data.cache_dir or f"{recipe.config.run.dir}/cache")
    corpus = _corpus(recipe, tokenizer)
    plan = loader_of(recipe.config, layout, corpus).plan(0)
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
    for name, files in data.eval_sets.items():
        _print_group(name, prepare(files, data, tokenizer, cache_dir, _progress).summary().splitlines())


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
    paths = [(key, path) for key, files in data.train_keys.items() for path in files]
    paths += [("data.eval", path) for files in data.eval_sets.values() for path in files]
    paths += [] if data.tokenizer == "byte" else [("data.tokenizer", data.tokenizer)]
    paths += [] if data.chat_template is None else [("data.chat_template", data.chat_template)]
    paths += [] if data.plan is None else [("data.plan", data.plan)]
    missing = [
        f"{key} = {path} ({recipe.origins[key]}) does not exist in {Path.cwd()}; give {key}=PATH."
        for key, path in paths
        if not Path(path).exists()
    ]
    if missing:
        from sft.config import listed

        raise ConfigError(listed(missing))


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


def _print_group(name: str, lines: Sequence[str]) -> None:
    for label, line in zip([name, *[""] * len(lines)], lines, strict=False):
        print(f"{label:8}{line}", flush=True)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
