"""`sft compare` and `sft plot`: what finished and running runs have measured."""

import argparse
import math
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

from sft.commands.output import need_matplotlib, picture_file, show
from sft.errors import ConfigError

RTOL = 1e-6  # of --exact
_PICTURES = (".png", ".svg", ".pdf")


def add(commands: Any) -> None:
    about = "say what differs between two runs, and which one is better; with --exact, at which step they part"
    compare_ = commands.add_parser("compare", help=about)
    for name in ("a", "b"):
        compare_.add_argument(name, type=Path, metavar=name.upper(), help="run folder, or its metrics.jsonl")
    about = "find the first step at which a number differs (exit code 1); the other options need it"
    compare_.add_argument("--exact", action="store_true", help=about)
    compare_.add_argument("--rtol", type=_number, help=f"relative tolerance of floats ({RTOL:g})")
    compare_.add_argument("--atol", type=_number, help="absolute tolerance of floats (0)")
    compare_.add_argument("--all", action="store_true", help="also compare metrics of time and memory")
    about = "ignore metrics and steps that only one run has"
    compare_.add_argument("--ignore-missing", action="store_true", help=about)
    compare_.set_defaults(action=compare, parser=compare_)

    plot_ = commands.add_parser("plot", help="draw the curves of one or several runs into one picture")
    plot_.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder (with metrics.jsonl)")
    about = "picture to write, .png, .svg or .pdf; default: plot.png in the folder of the first run"
    plot_.add_argument("--out", metavar="FILE", type=Path, help=about)
    about = "token accuracy of a guess, from 0 to 1; drawn as a line where held-out token accuracy is drawn"
    plot_.add_argument("--chance", metavar="SHARE", type=partial(_number, most=1), help=about)
    plot_.set_defaults(action=plot, parser=plot_)


def compare(arguments: Namespace) -> int:
    """Run `sft compare`.  Returns 1 if the runs differ and --exact is given, else 0."""
    if not arguments.exact:
        for option in ("rtol", "atol", "all", "ignore_missing"):
            if getattr(arguments, option) not in (None, False):
                raise ConfigError(f"--{option.replace('_', '-')} has an effect only with --exact; add --exact.")
        return _compare_experiments(arguments)

    from sft.metrics.results.compare import Tolerance, report
    from sft.metrics.results.records import read_metrics

    rtol = RTOL if arguments.rtol is None else arguments.rtol
    tolerance = Tolerance(rtol=rtol, atol=arguments.atol or 0.0)
    a, b = read_metrics(arguments.a), read_metrics(arguments.b)
    lines, is_different = report(a, b, tolerance, ignore_missing=arguments.ignore_missing, compare_all=arguments.all)
    show("\n".join(lines))
    return int(is_different)


def _compare_experiments(arguments: Namespace) -> int:
    from sft.metrics.results.experiments import Experiment, report

    show("\n".join(report(Experiment.read(arguments.a), Experiment.read(arguments.b))))
    return 0


def plot(arguments: Namespace) -> None:
    need_matplotlib("sft plot")

    from sft.metrics.results.curves import read_run
    from sft.metrics.results.plot import draw

    out = arguments.out or arguments.runs[0] / "plot.png"
    if out.suffix.lower() not in _PICTURES:
        raise ConfigError(f"--out {out} does not end in {', '.join(_PICTURES[:-1])} or {_PICTURES[-1]}.")
    runs = [read_run(folder) for folder in arguments.runs]
    with picture_file("--out", out) as temporary:
        draw(runs, temporary, arguments.chance)
    show(str(out))


def _number(text: str, most: float = math.inf) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        bounds = "of at least 0" if most == math.inf else f"from 0 to {most:g}"
        raise argparse.ArgumentTypeError(f"must be a number {bounds}, got {text!r}")
    return value
