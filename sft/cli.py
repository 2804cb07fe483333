# PYTHON_ARGCOMPLETE_OK
"""The command line of sft, its arguments and exit codes.

After an error that the user can cause, rank 0 prints one paragraph, and the exit code is 2.  sft/commands/ implements
the commands.
"""

import argparse
import atexit
import difflib
import importlib.metadata
import io
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from sft import __version__
from sft.commands import (
    check,
    completion,
    convert,
    data,
    evaluate,
    explain,
    generate,
    init,
    launch,
    plan,
    probe,
    results,
    schema,
    score,
    status,
    train,
)
from sft.errors import MAY_SUCCEED, ConfigError, SftError
from sft.files.atomic_files import explained

_UNKNOWN_COMMAND = re.compile(r"argument \w*COMMAND: invalid choice: '([\w-]+)' \(choose from (.*)\)$")
_SECONDS_FOR_RANK_0 = 10.0
_RUNS = (["train"], ["eval"], ["score"], ["probe"])  # other commands have one process, even if RANK is set
# In the order of `sft --help`.
_COMMANDS = (
    *(init, check, explain, plan, train, launch, status, evaluate, generate),
    *(score, data, probe, convert, results, schema),
)


def run() -> NoReturn:
    """Run `main` and exit without shutting the interpreter down.

    A thread of the process group frees the tensors of the last collective after the collective has returned.  If the
    interpreter shuts down at that moment, the process aborts with exit code -6 instead of the exit code of `main`.
    """
    try:
        code = main()
    except Exception:  # a bug, or a lost rank.  Threads of the process group would keep this process alive
        traceback.print_exc()
        _report_to_torchrun(traceback.format_exc())
        code = 1
    atexit._run_exitfuncs()  # libraries flush and clean up here
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a closed terminal; `main` has flushed the output of a command
            stream.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code.

    0    the command is done
    1    plans or runs differ, a probe found a fault, or a disk or another rank failed
    2    a mistake of the user; no layout fits (`plan`); the run should not start again (`status`)
    75   the run stopped before its end, or `status` advises to start it again
    130  interrupted
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):  # escapes characters that the terminal cannot show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    words = sys.argv[1:] if argv is None else argv
    if "_ARGCOMPLETE" in os.environ:
        completion.complete(whole_parser())
    try:
        arguments = _parse(words)
        with explained():
            code: int = arguments.action(arguments) or 0
            if words[:1] != ["train"]:
                sys.stdout.flush()  # raises an error if the output cannot be written; a run goes on without its output
        if code == 75:
            _report_to_torchrun(
                "The run was asked to stop and has saved a checkpoint.  The same command resumes the run."
            )
        return code
    except BrokenPipeError:  # the reader, `head` for instance, has closed the pipe
        if words[:1] == ["train"]:  # the console handles a closed stdout, so this is another pipe
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SftError as error:
        _report(error, is_run=words[:1] in _RUNS)
        return _exit_code(error)
    except KeyboardInterrupt:
        return 130


def _open_closed_streams() -> None:
    """Open standard streams that the shell has closed (`>&-`) on the null device.

    Otherwise the next opened files would get their file descriptors.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(1 if name == "stdout" else 2, "w", encoding="utf-8", closefd=False))


def _exit_code(error: SftError) -> int:
    return 1 if isinstance(error, MAY_SUCCEED) else 2


def _report(error: SftError, *, is_run: bool) -> None:
    """Print `error`.  In a run only rank 0 prints, because every rank finds the same mistake.

    torchrun ends all processes when the first one exits.  So under torchrun the other ranks wait before they exit,
    because rank 0 might not have printed `error` yet.
    """
    if not is_run or os.environ.get("RANK", "0") == "0":
        with suppress(OSError):  # a closed terminal
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        _report_to_torchrun(f"{type(error).__name__}: {error}")
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(_exit_code(error)))
        time.sleep(_SECONDS_FOR_RANK_0)
        # torchrun has not ended this process, so rank 0 did not find this mistake: this rank reports it.
        print(f"rank {os.environ['RANK']}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        _report_to_torchrun(f"{type(error).__name__}: {error}")


def _report_to_torchrun(message: str) -> None:
    """Write `message` into the file from which torchrun takes the last lines that it prints, its "Root Cause".

    Without this file, torchrun's last line is "To enable traceback see ...", and `message` is 40 lines further up.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        facts = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError):  # a full disk: the message is on stderr, too
            Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": facts}}))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if unknown := _UNKNOWN_COMMAND.match(message):
            commands = re.findall(r"[\w-]+", unknown[2])
            close = difflib.get_close_matches(unknown[1], commands, n=1)
            advice = f"Did you mean {self.prog} {close[0]}?" if close else f"Commands: {', '.join(commands)}."
            raise ConfigError(f"unknown command {self.prog} {unknown[1]}.  {advice}")
        end = "" if message.endswith("?") else "."
        raise ConfigError(f"{message}{end}\n{self.format_usage().strip()}")


class _Version(argparse.Action):
    """Prints the versions of sft and of the packages on which the results depend, for reports of errors."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(nargs=0, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *unused: Any) -> NoReturn:
        versions = [f"sft {__version__}", f"Python {sys.version.split()[0]}"]
        for package in ("torch", "megatron-core", "transformers", "transformer-engine"):
            try:
                versions.append(f"{package} {importlib.metadata.version(package)}")
            except importlib.metadata.PackageNotFoundError:
                versions.append(f"{package} not installed")
        print(", ".join(versions))
        parser.exit()


def whole_parser() -> argparse.ArgumentParser:
    """The parser of the command line with all commands."""
    parser = _Parser(prog="sft", description="Supervised fine-tuning on Megatron for long context.")
    parser.add_argument("--version", action=_Version, help="show the versions of sft and of the packages that it uses")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add(subcommands)
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    # argparse does not assign settings that follow an option to `overrides`; it returns them in `rest`.
    arguments, rest = whole_parser().parse_known_args(argv)
    if unknown := [word for word in rest if word.startswith("-")]:
        arguments.parser.error(f"unknown option {unknown[0]}{_meant(unknown[0], arguments.parser, argv)}")
    if rest and "overrides" not in arguments:
        arguments.parser.error(f"unexpected argument {rest[0]}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _meant(option: str, parser: argparse.ArgumentParser, argv: Sequence[str]) -> str:
    """Advice for an unknown option: a similar option, or the key of a recipe that other trainers give as an option.

    --lr 1e-4 -> ".  Settings are written without dashes: optim.lr=1e-4"
    """
    from sft.config import keys

    name, _, value = option.lstrip("-").partition("=")
    known = [known for action in parser._actions for known in action.option_strings]
    if close := difflib.get_close_matches(f"--{name.replace('_', '-')}", known, n=1, cutoff=0.8):
        return f".  Did you mean {close[0]}?"
    after = [*argv, ""][argv.index(option) + 1]
    value = value or ("VALUE" if not after or after.startswith("-") or "=" in after else after)
    key = name if name in keys.leaves() else keys.nearest(name.replace("-", "_"))
    return f".  Settings are written without dashes: {key}={value}" if key in keys.leaves() else ""
