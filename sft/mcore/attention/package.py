"""A package with kernels of attention that need not be installed, and whose inner functions are called."""

import importlib
import importlib.metadata
import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

SEQUENCES = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


@dataclass(frozen=True)
class Package:
    """name: for pip; module: with the functions; functions: arguments by name that they must take"""

    name: str
    module: str
    functions: tuple[tuple[str, Sequence[str]], ...]

    def absent(self) -> str | None:
        """The reason why the package cannot be used, if it is not installed; else None."""
        return None if _release(self.name) else f"{self.name} is not installed"

    def broken(self) -> str | None:
        """The reason why the installed package cannot be used; None if it can."""
        return _broken(self)

    def function(self, name: str) -> Any:
        return getattr(_imported(self.module), name)


def shared_arguments(sequences: Sequence[Tensor | int], scale: float) -> Mapping[str, Any]:
    """Arguments that forward and backward of a package have in common."""
    return dict(zip(SEQUENCES, sequences, strict=True)) | {"softmax_scale": scale, "causal": True}


def _release(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _broken(package: Package) -> str | None:
    of_release = f"{package.name} {_release(package.name)}"
    try:
        module = _imported(package.module)
    except Exception as error:  # of any kind: releases of its parts that do not fit each other raise what they will
        return f"{of_release} cannot be imported ({error})"
    for name, arguments in package.functions:
        if not hasattr(module, name):
            return f"{of_release} has no function {name}"
        if lacking := sorted({*arguments} - set(inspect.signature(getattr(module, name)).parameters)):
            return f"the function {name} of {of_release} takes no {' and no '.join(lacking)}"
    return None


@cache
def _imported(module: str) -> Any:
    with (
        warnings.catch_warnings()
    ):  # ffpa-attn warns that the cache of flash-attn-4, which a run turns on, is not its own
        warnings.filterwarnings("ignore", message="FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED")
        return importlib.import_module(module)
