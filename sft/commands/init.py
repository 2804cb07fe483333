"""`sft init`: lists the recipes that come with sft, copies one, or writes a new one for a model."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from sft.commands.arguments import count
from sft.commands.output import print_group, show
from sft.errors import ConfigError

_SEQ_LENGTH = 32768  # of a new recipe, unless the model was trained on fewer positions


def add(commands: Any) -> None:
    about = "write a recipe for a model, or copy one that comes with sft; without arguments, list those"
    command = commands.add_parser("init", help=about)
    command.set_defaults(action=init, parser=command)
    command.add_argument("name", metavar="NAME", nargs="?", help="a recipe that comes with sft, such as demo")
    command.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help="settings of the new recipe")
    command.add_argument("--model", metavar="M", help="write a recipe for this folder or name on the hub")
    command.add_argument("--gpus", metavar="N", type=int, default=8, help="number of GPUs (default 8)")
    command.add_argument("--gpu", metavar="TYPE", default="h100", help="type of GPU, such as h200 (default h100)")
    about = f"tokens of a pack (default {_SEQ_LENGTH}, or fewer if the model was trained on fewer)"
    command.add_argument("--seq-length", metavar="N", type=count, help=about)
    command.add_argument("--lora", action="store_true", help="train LoRA adapters of rank 16")
    command.add_argument("--out", metavar="FILE", type=Path, help="file to write (default: NAME.yaml in this folder)")


def init(arguments: Namespace) -> int:
    """Run `sft init`.  Returns 2 if no layout of the model fits the GPUs, else 0."""
    if arguments.name is not None and "=" in arguments.name:  # argparse takes the first setting as the name
        arguments.overrides.insert(0, arguments.name)
        arguments.name = None
    if arguments.model is not None:
        if arguments.name is not None:
            raise ConfigError(f"{arguments.name} and --model {arguments.model} both name a recipe to write.  Give one.")
        return _plan(arguments)
    if arguments.overrides:
        raise ConfigError(f"{arguments.overrides[0]}: settings need --model; edit the copy of a recipe instead.")
    if arguments.name is None:
        _list()
    else:
        _copy(arguments)
    return 0


def _list() -> None:
    from sft.recipe.library import recipes

    listed = recipes()
    width = max(len(recipe.name) for recipe in listed)
    for recipe in listed:
        purpose = recipe.header.get("Purpose", "").removeprefix("trains ").partition("; `sft plan`")[0]
        facts = "; ".join(text.strip().rstrip(".") for text in (purpose, recipe.header.get("Hardware", "")))
        show(f"{recipe.name:{width}}  {_shortened(facts, 118 - width)}")
    show("\nsft init NAME copies one; sft init --model MODEL writes a new one")


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _copy(arguments: Namespace) -> None:
    from sft.recipe.library import find

    recipe = find(arguments.name)
    file = _new_file(arguments.out, recipe.name)
    _write(file, recipe.path.read_text(encoding="utf-8").replace(f"recipes/{_below(recipe.path)}", str(file)))
    print_group("recipe", [f"{file}, a copy of {recipe.name}"])
    _say_next(file)


def _below(path: Path) -> str:
    return f"planned/{path.name}" if path.parent.name == "planned" else path.name


def _plan(arguments: Namespace) -> int:
    from sft.api.plans import PlanOptions, plan
    from sft.hf.pretrained import read_pretrained
    from sft.planner.subject import slug

    seq_length = arguments.seq_length
    if seq_length is None:
        trained = read_pretrained(arguments.model, shown=arguments.model)[0].max_positions
        seq_length = min(_SEQ_LENGTH, trained or _SEQ_LENGTH)
    name = f"{slug(arguments.model)}{'_lora' * arguments.lora}"
    file = _new_file(arguments.out, name)
    options = PlanOptions(gpu=arguments.gpu, seq_length=seq_length, lora=arguments.lora, top=1)
    result = plan(arguments.model, arguments.gpus, options, arguments.overrides)
    if result.best is None:
        from datetime import datetime

        for group, lines in result.reports[0].lines(datetime.now()).items():
            print_group(group, lines)
        return 2
    result.write(file, has_comments=True)
    print_group("recipe", [f"{file}, for {arguments.gpus} x {arguments.gpu} (predicted, not measured)"])
    _say_next(file, f" --world-size {arguments.gpus} --gpu {arguments.gpu}")
    return 0


def _new_file(out: Path | None, name: str) -> Path:
    file = Path(f"{name}.yaml") if out is None else out
    if file.exists():
        raise ConfigError(f"{file} exists, and is not overwritten.  Give another file with --out.")
    return file


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}.") from error


def _say_next(file: Path, options: str = "") -> None:
    print_group("next", [f"set data.train in {file}, and run: sft check {file}{options}"])
