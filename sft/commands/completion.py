"""Completes commands, options, keys and values in a shell, with argcomplete (bash, zsh, fish).

The shell starts `sft` with `_ARGCOMPLETE` in the environment (docs/reference/cli.md says how to switch it on).
"""

import argparse
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Literal, get_args, get_origin


def complete(parser: argparse.ArgumentParser) -> None:
    """Print the completions and exit, if a shell asks for them.  Without argcomplete, exit with no completion."""
    if find_spec("argcomplete") is None:
        raise SystemExit(0)
    import argcomplete  # optional

    for command in _parsers(parser):
        for action in command._actions:
            if action.dest in _COMPLETERS:
                action.completer = _COMPLETERS[action.dest]  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser and all parsers of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _parsers(child)


def _keys(prefix: str, **unused: Any) -> list[str]:
    from sft.config.keys import leaves, named

    return [key for key in leaves() if not named(key) and key.startswith(prefix)]


def _settings(prefix: str, **unused: Any) -> list[str]:
    """KEY= for each key that begins with `prefix`, and KEY=VALUE for each value of a key with few values."""
    from sft.config.keys import in_schema, leaves, types_of

    key, equals, _ = prefix.partition("=")
    if not equals:
        return [f"{name}=" for name in _keys(prefix)]
    if in_schema(key) not in leaves():
        return []
    words = [word for kind in types_of(key) for word in _words(kind)]
    return [setting for word in words if (setting := f"{key}={word}").startswith(prefix)]


def _words(kind: Any) -> tuple[str, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    return {bool: ("true", "false"), type(None): ("null",)}.get(kind, ())


def _gpus(**unused: Any) -> list[str]:
    from sft.estimate.gpus import GPUS

    return [*GPUS]


def _fabrics(**unused: Any) -> list[str]:
    from sft.estimate.gpus import FABRICS

    return [*FABRICS]


_COMPLETERS = {"overrides": _settings, "explain": _keys, "gpu": _gpus, "fabric": _fabrics}
