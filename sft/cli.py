"""The command line of sft, its arguments and exit codes.

After an error that the user can cause, rank 0 prints one paragraph, and the exit code is 2.  sft/commands.py implements
the commands.
"""

import argparse
import atexit
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from sft import commands
from sft.errors import ConfigError, SftError, StorageError

_SECONDS_FOR_RANK_0 = 10.0
_OVERRIDES = "settings that replace those of the recipe, for example parallel.cp=4 data.train=my.jsonl"


def run() -> NoReturn:
    """Run `main` and exit without shutting the interpreter down.

    A thread of the process group frees the tensors of the last collective after the collective has returned.  If the
    interpreter shuts down at that moment, the process aborts with exit code -6 instead of the exit code of `main`.
    """
    try:
        code = main()
    except Exception:  # a bug, or a lost rank; threads of the process group must not keep this process alive
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()  # libraries flush and clean up here
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code.

    0: done.  1: plans differ, or a disk failed.  2: a mistake of the user.  75: start the run again.  130: interrupted.
    """
    for stream in (sys.stdout, sys.stderr):  # escapes characters that the terminal cannot show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    words = sys.argv[1:] if argv is None else argv
    try:
        arguments = _parse(words)
        code: int = arguments.action(arguments) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, `head` for instance, has closed the pipe
        if words[:1] == ["train"]:  # the console handles a closed stdout, so this is another pipe
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SftError as error:
        _report(
            error, is_run=words[:1] in (["train"], ["probe"])
        )  # other commands have one process, even if RANK is set
        return 1 if isinstance(error, StorageError) else 2
    except KeyboardInterrupt:
        return 130


def _report(error: SftError, *, is_run: bool) -> None:
    """Print `error`.  In a run only rank 0 prints, because every rank finds the same mistake.

    torchrun ends all processes when the first one exits.  So under torchrun the other ranks wait before they exit,
    because rank 0 might not have printed `error` yet.
    """
    if not is_run or os.environ.get("RANK", "0") == "0":
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(2))
        time.sleep(_SECONDS_FOR_RANK_0)
        # torchrun has not ended this process, so rank 0 did not find this mistake: this rank reports it.
        print(f"rank {os.environ['RANK']}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}.\n{self.format_usage().strip()}")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="sft", description="Supervised fine-tuning on Megatron for long context.")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = subcommands.add_parser("train", help="train a recipe; start one process per GPU with torchrun")
    check = subcommands.add_parser("check", help="resolve and validate a recipe on any machine, without a GPU")
    status = subcommands.add_parser(
        "status", help="show how a run ended, and whether to start the run again (exit code 0, 75 or 2)"
    )
    data = subcommands.add_parser("data", help="tokenise, show or pack data, without a model or a GPU")
    data_commands = data.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    prepare = data_commands.add_parser("prepare", help="tokenise the data once; after a kill, repeat the command")
    inspect = data_commands.add_parser("inspect", help="show lengths, masks, duplicates, and samples that fit")
    plan = data_commands.add_parser("plan", help="show packs, steps, source shares and balance of an epoch")
    actions = {
        train: commands.train,
        check: commands.check,
        status: commands.status,
        prepare: commands.prepare,
        inspect: commands.inspect,
        plan: commands.plan,
        **dict.fromkeys(_add_probes(subcommands), commands.probe),
    }
    for command, action in actions.items():
        command.set_defaults(action=action, parser=command)
        number = "?" if command is plan else None
        command.add_argument("recipe", metavar="RECIPE", nargs=number, help="YAML file, e.g. recipes/qwen3_8b_64k.yaml")
        command.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help=_OVERRIDES)
    check.add_argument("--world-size", metavar="N", type=int, help="number of processes of the run")
    check.add_argument("--explain", metavar="KEY", help="show where the value of KEY came from, and what KEY does")
    check.add_argument("--no-data", action="store_true", help="do not read data files or tokenizer")
    prepare.add_argument("--workers", metavar="N", help="number of processes that tokenise; same as data.num_workers=N")
    prepare.add_argument("--verify", action="store_true", help="read all prepared data, and replace damaged data")
    prepare.add_argument(
        "--sweep", action="store_true", help="afterwards remove the data of other settings from the cache"
    )
    inspect.add_argument("--json", action="store_true", help="print one JSON object (docs/inspect.md)")
    inspect.add_argument(
        "--png", metavar="FILE", type=Path, help="draw lengths, retention and supervised shares into FILE"
    )
    inspect.add_argument(
        "--samples",
        metavar="N",
        type=int,
        default=2,
        help="number of samples to show, in addition to the longest answer (default 2)",
    )
    plan.add_argument("--world-size", metavar="N", type=int, help="number of processes over which packs are balanced")
    plan.add_argument("--write", metavar="FILE", help="write the plan of the run to FILE, for --diff and data.plan")
    plan.add_argument(
        "--diff", metavar=("A", "B"), nargs=2, help="show where two plan files differ; exit code 1 if they differ"
    )
    # argparse does not assign settings that follow an option to `overrides`; it returns them in `rest`.
    arguments, rest = parser.parse_known_args(argv)
    if unknown := [word for word in rest if word.startswith("-")]:
        arguments.parser.error(f"unknown option {unknown[0]}")
    if arguments.recipe is None and arguments.diff is None:
        plan.error("a RECIPE is missing")
    arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _add_probes(subcommands: Any) -> list[argparse.ArgumentParser]:
    """The parsers of `sft probe leak | parity | data`."""
    probe = subcommands.add_parser("probe", help="answer a question about a recipe, its data and its weights")
    probes = probe.add_subparsers(dest="probe", required=True, metavar="QUESTION")
    leak = probes.add_parser("leak", help="does one document of a pack change anything in the others?")
    parity = probes.add_parser("parity", help="do two layouts or backends compute the same loss and gradients?")
    data = probes.add_parser("data", help="show what every rank receives as text, and check it against the samples")
    for command in (leak, parity, data):
        command.add_argument("--step", metavar="N", type=int, default=1, help="the step whose data is used (default 1)")
        command.add_argument("--json", metavar="FILE", type=Path, help="write the result into FILE (docs/probes.md)")
    leak.add_argument("--document", metavar="N", type=int, help="document to change, from 0 (default: in the middle)")
    parity.add_argument(
        "--against",
        metavar="KEY=VALUE,...",
        required=True,
        help="settings of the second layout, for example parallel.cp=1,parallel.tp=2",
    )
    data.add_argument("--full", action="store_true", help="do not shorten long documents")
    return [leak, parity, data]
