"""Makes docs/reference/cli.md and the table of docs/reference/errors.md from the parsers and the classes of the code.

A section of cli.md is one command: its usage, arguments, options, and the exit codes that EXIT_CODES lists.
"""

import argparse
import inspect
import re
from collections.abc import Iterator
from typing import Any

from sft import cli, errors
from tools import page_text

_INTRO = """\
# The command line

`sft COMMAND --help` prints the same. A setting (`KEY=VALUE`) replaces a [key of the recipe](config.md):
`optim.lr=1e-5`. Settings and options may stand in any order after the recipe. tools/cli_docs.py generates this page
from the parsers of the commands.

A shell completes commands, options, keys and values: `pip install argcomplete`, then
`eval "$(register-python-argcomplete sft)"` in ~/.bashrc, the same with `--shell zsh` in ~/.zshrc, or
`register-python-argcomplete --shell fish sft | source` in fish's configuration. The tests have bash; zsh 5.9 was tried
by hand (commands, keys and values), fish was not.

"""
# The meaning of exit codes for all commands; EXIT_CODES has the further meanings for some commands.
_ALL = """\
| exit code | meaning |
|---|---|
| 0 | done |
| 1 | a disk failed, a rank was lost, or the code has a bug: `sft status` says whether to start the run again |
| 2 | a mistake in recipe, data, checkpoint or arguments: one paragraph says what, where, and what would work |
| 130 | interrupted by Ctrl-C |

`sft train --processes` ends with the code of its first process that failed. torchrun turns every nonzero exit code into
1; `sft status` reads how the run ended from its folder
([launch](../how-to/launch.md#how-a-job-ends-and-whether-it-starts-again)).

"""
EXIT_CODES = {
    "train": "75 if the run was asked to stop and saved; 128 + N after a second signal N.",
    "plan": "2 if nothing fits the last number of GPUs.",
    "status": "0 if the run is done, 75 if it should be started again, 2 if the cause must be found first.",
    "data plan": "1 if the two plans of `--diff` differ.",
    "probe leak": "1 if the probe found a fault.",
    "probe parity": "1 if the probe found a fault.",
    "probe data": "1 if the probe found a fault.",
    "compare": "1 if the runs differ and --exact is given.",
}
_OVERRIDES = ("recipe", "overrides")  # the introduction describes them


def page(before: str) -> str:
    """The whole page; `before` is not read."""
    listed = commands(cli.whole_parser())
    return _INTRO + _ALL + "\n".join(line for command in listed for line in _section(*command))


def commands(
    parser: argparse.ArgumentParser, name: str = "", about: str = ""
) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """The name, the description in `sft --help` and the parser of each command without subcommands, in order."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield name, about, parser
    for group in groups:
        helps = {action.dest: action.help or "" for action in group._choices_actions}
        for word, child in group.choices.items():
            yield from commands(child, f"{name} {word}".strip(), helps[word])


def _section(name: str, about: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"## sft {name}\n"
    yield from page_text.folded(f"{about[:1].upper()}{about[1:]}" + ("" if about.endswith("?") else "."))
    yield f"\n```text\n{_usage(name, parser)}\n```\n"
    for action in parser._actions:
        if action.dest not in ("help", *_OVERRIDES):
            yield from page_text.folded(f"- {_named(action)}: {_about(action)}")
    if name in EXIT_CODES:
        yield from page_text.folded(f"- exit code: {EXIT_CODES[name]}")
    yield ""


def _usage(name: str, parser: argparse.ArgumentParser) -> str:
    """`sft train [OPTIONS] RECIPE [KEY=VALUE ...]`; only options that a command needs are named."""
    actions = [action for action in parser._actions if action.dest != "help"]
    words = ["sft", name]
    if any(action.option_strings and not action.required for action in actions):
        words.append("[OPTIONS]")
    words += [f"{action.option_strings[0]} {action.metavar}" for action in actions if _is_needed_option(action)]
    formats: dict[Any, str] = {None: "{0}", "?": "[{0}]", "*": "[{0} ...]", "+": "{0} [{0} ...]"}
    positionals = [action for action in actions if not action.option_strings]
    words += [formats[action.nargs].format(action.metavar or action.dest.upper()) for action in positionals]
    return " ".join(words)


def _is_needed_option(action: argparse.Action) -> bool:
    return bool(action.option_strings) and action.required


def _named(action: argparse.Action) -> str:
    """An argument as the page names it: `--world-size N`, `SRC`."""
    metavar = action.metavar if action.metavar is not None else action.dest.upper()
    words = " ".join(metavar) if isinstance(metavar, tuple) else metavar
    if action.choices is not None:
        words = "|".join(map(str, action.choices))
    takes = action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
    names = ", ".join(f"{option} {words}" if takes else option for option in action.option_strings)
    return f"`{names or words}`"


def _about(action: argparse.Action) -> str:
    about = (action.help or "").replace("%%", "%").replace("%(default)s", str(action.default))
    return re.sub(r"docs/([\w/-]+\.md)", r"[\1](../\1)", about)


def errors_page(before: str) -> str:
    """errors.md with a new table of the classes."""
    return page_text.replaced(before, "<!-- classes -->\n", "<!-- end -->", error_table())


def error_table() -> str:
    rows = ["| class | exit code | meaning |", "|---|---|---|"]
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.SftError) and kind is not errors.SftError:
            code = 1 if kind in errors.MAY_SUCCEED else 2
            about = " ".join(inspect.cleandoc(kind.__doc__ or "").split()).partition(". ")[0].rstrip(".")
            rows.append(f"| `{name}` | {code} | {about} |")
    return "\n".join(rows) + "\n"
