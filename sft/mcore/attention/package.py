"""Finds out whether an optional package with attention kernels is installed and works, and gives its functions."""

import importlib
import importlib.metadata
import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

from torch import Tensor

SEQUENCES = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


@dataclass(frozen=True)
class Package:
    """A package that a run uses if it is installed.

    name       the name of the package for pip
    module     the module that has the functions
    functions  name of each function or operator of torch, and the names of arguments that it must have
    """

    name: str
    module: str
    functions: tuple[tuple[str, Sequence[str]], ...]

    def absent(self) -> str | None:
        """A message if the package is not installed; else None."""
        return None if _release(self.name) else f"{self.name} is not installed"

    def broken(self) -> str | None:
        """The reason why this trainer cannot use the installed package; None if it can."""
        return _broken(self)

    def function(self, name: str) -> Any:
        """The function; a name may have dots, as in "flash_attn_3_gpu.fwd"."""
        return attrgetter(name)(_imported(self.module))


def shared_arguments(sequences: Sequence[Tensor | int], scale: float, causal: bool) -> Mapping[str, Any]:
    """Arguments by name that the forward and backward functions of a package have in common.

    sequences: the values of SEQUENCES, in this order
    """
    return dict(zip(SEQUENCES, sequences, strict=True)) | {"softmax_scale": scale, "causal": causal}


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
    except Exception as error:  # any error: dependencies whose releases do not fit each other raise all kinds of errors
        return f"{of_release} cannot be imported ({error})"
    for name, arguments in package.functions:
        try:
            function = attrgetter(name)(module)
        except AttributeError:
            return f"{of_release} has no function {name}"
        if lacking := sorted({*arguments} - _arguments(function)):
            return f"the function {name} of {of_release} takes no {' and no '.join(lacking)}"
    return None


def _arguments(function: Any) -> set[str]:
    """The names of the arguments of a function, or of an operator that a library registers with torch."""
    if overload := getattr(function, "default", None):
        return {argument.name for argument in overload._schema.arguments}
    return set(inspect.signature(function).parameters)


@cache
def _imported(module: str) -> Any:
    with (
        warnings.catch_warnings()
    ):  # ffpa-attn warns that the cache of flash-attn-4, which a run turns on, is not its own
        warnings.filterwarnings("ignore", message="FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED")
        return importlib.import_module(module)
