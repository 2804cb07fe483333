"""`sft data prepare | inspect | plan`: tokenises, shows and packs data, without a model or a GPU."""

import json
import os
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sft.commands.arguments import add_quiet, read_recipe, recipe_command
from sft.commands.output import need_matplotlib, picture_file, print_group, progress, show, show_next
from sft.console import size
from sft.errors import ConfigError


def add(commands: Any) -> None:
    group = commands.add_parser("data", help="tokenise, show or pack data, without a model or a GPU")
    data = group.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    about = "tokenise the data once; after a kill, repeat the command"
    prepare_ = recipe_command(data, "prepare", prepare, about)
    prepare_.add_argument(
        "--workers", metavar="N", help="number of processes that tokenise; same as data.num_workers=N"
    )
    prepare_.add_argument("--verify", action="store_true", help="read all prepared data, and replace damaged data")
    prepare_.add_argument(
        "--sweep", action="store_true", help="afterwards remove the data of other settings from the cache"
    )
    add_quiet(prepare_)
    about = "show lengths, masks, duplicates, and samples that fit"
    inspect_ = recipe_command(data, "inspect", inspect, about)
    inspect_.add_argument("--json", action="store_true", help="print one JSON object (docs/how-to/inspect.md)")
    inspect_.add_argument(
        "--png", metavar="FILE", type=Path, help="draw lengths, retention and supervised shares into FILE"
    )
    inspect_.add_argument(
        "--samples",
        metavar="N",
        type=int,
        default=2,
        help="number of samples to show, in addition to the longest answer (default 2)",
    )
    about = "show packs, steps, source shares and balance of an epoch"
    plan_ = recipe_command(data, "plan", plan, about, is_required=False)
    plan_.add_argument("--world-size", metavar="N", type=int, help="number of processes over which packs are balanced")
    plan_.add_argument("--write", metavar="FILE", help="write the plan of the run to FILE, for --diff and data.plan")
    plan_.add_argument(
        "--png", metavar="FILE", type=Path, help="draw the packs of the first step into FILE, with parallel.dynamic_cp"
    )
    plan_.add_argument(
        "--diff", metavar=("A", "B"), nargs=2, help="show where two plan files differ; exit code 1 if they differ"
    )


def prepare(arguments: Namespace) -> None:
    if arguments.workers is not None:
        arguments.overrides.append(f"data.num_workers={arguments.workers}")
    recipe = read_recipe(arguments)

    from sft.api.data import prepare as prepare_data
    from sft.recipe.layout import train_command

    prepared = prepare_data(recipe, verify=arguments.verify, sweep=arguments.sweep, quiet=arguments.quiet)
    if arguments.sweep:
        lines = [f"removed {folder} ({size(num_bytes)})" for folder, num_bytes in prepared.removed.items()]
        freed = sum(prepared.removed.values())
        print_group("sweep", [*lines, f"{prepared.cache_dir}: {size(freed)} freed"])
    if not arguments.quiet:
        show_next(train_command(recipe))


def inspect(arguments: Namespace) -> None:
    from sft.recipe.needs import check_paths

    picture: Path | None = arguments.png
    recipe = read_recipe(arguments)
    check_paths(recipe)
    if arguments.samples < 0:
        raise ConfigError(f"--samples {arguments.samples} is not a number of samples.  Give 0 or more.")
    if picture is not None:
        _check_picture(picture)

    from sft.data.inspect.report import survey_lines
    from sft.data.inspect.survey import take_survey
    from sft.recipe.tokenizer import tokenizer_of

    data, cache_dir, console = recipe.config.data, Path(recipe.config.cache_dir), progress()
    survey = take_survey(recipe.path, data, tokenizer_of(recipe.config), cache_dir, arguments.samples, console)
    if picture is not None:
        from sft.data.inspect.picture import draw

        with picture_file("--png", picture) as temporary:
            draw(survey, temporary)
        console.say(f"picture {picture}")
    if arguments.json:
        text = json.dumps(asdict(survey), indent=1)
    else:
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        text = "\n".join(survey_lines(survey, color=color)).rstrip()
    print(text, flush=True)  # the text is ASCII, which every terminal can show


def plan(arguments: Namespace) -> int:
    """Run `sft data plan`.  Returns 1 if the two plans of --diff differ, else 0."""
    from sft.data.packing.plan_files import compare_plans

    if arguments.diff is not None:
        lines = compare_plans(*map(Path, arguments.diff))
        show("\n".join(lines) or "the plans are equal")
        return 1 if lines else 0

    from sft.data.cache.prepare import prepare_train
    from sft.data.inspect.forecast import forecast, write_run
    from sft.data.loader import make_loader
    from sft.recipe.layout import resolve_layout
    from sft.recipe.needs import check_paths
    from sft.recipe.tokenizer import tokenizer_of

    if arguments.recipe is None:
        arguments.parser.error("a RECIPE is missing")
    recipe = read_recipe(arguments)
    layout = resolve_layout(recipe, arguments.world_size)
    check_paths(recipe)
    if arguments.png is not None:
        _check_picture(arguments.png)
        if not layout.cp_sizes:
            raise ConfigError(
                f"--png draws packs of several CP sizes, but all packs of this run are on {layout.cp} "
                f"rank{'s' * (layout.cp > 1)}.  Give parallel.dynamic_cp=true, with parallel.cp above 1."
            )
    corpus = prepare_train(recipe.config, tokenizer_of(recipe.config), progress())
    loader = make_loader(recipe.config, layout, corpus, pad_id=0)
    for name, lines in forecast(recipe.config, loader).items():
        print_group(name, lines)
    if arguments.write is not None:
        print_group("written", [write_run(Path(arguments.write), recipe.config, loader)])
    if arguments.png is not None:
        from sft.data.inspect.cp_picture import draw_step

        with picture_file("--png", arguments.png) as temporary:
            line = draw_step(temporary, loader)
        print_group("picture", [f"{arguments.png}: {line}"])
    return 0


def _check_picture(path: Path) -> None:
    """Raise ConfigError if this picture cannot be drawn."""
    if path.suffix != ".png":
        raise ConfigError(f"--png {path} does not end in .png.  The picture is written as PNG.")
    need_matplotlib("--png")
