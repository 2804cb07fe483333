"""Chooses the library of modules of a run from `run.modules` and the software and devices of this machine."""

import importlib.metadata

import torch

from sft.config import Config
from sft.errors import ConfigError
from sft.mcore import fp8
from sft.mcore.modules.library import FusedNormLibrary, LocalLibrary, ModuleLibrary, TransformerEngineLibrary

INSTALL = 'Install it with: pip install --no-build-isolation "transformer-engine[pytorch]" (docs/start/install.md)'


def choose(config: Config, device_type: str) -> ModuleLibrary:
    """The library for layers with attention of the portable backend.

    run.modules = auto means te if Transformer Engine can compute this run's modules, else local.  Raises ConfigError if
    Transformer Engine cannot compute them, and the recipe names te or sets run.fp8, which only te has.
    """
    wanted, problem = config.run.modules, None
    if wanted == "local":
        problem = "run.modules = local"
    else:
        problem = unfit(config, device_type) or missing()
    if problem is None:
        check_fp8(config)
        return TransformerEngineLibrary(config, "norms stay torch's")
    if wanted == "te":
        raise ConfigError(f"run.modules = te: {problem}.  run.modules=local runs everywhere.")
    if config.run.fp8:
        raise ConfigError(
            f"run.fp8 = {config.run.fp8} needs Transformer Engine: {problem}.  run.fp8=null does not need it."
        )
    return LocalLibrary(config, "" if wanted == "local" or device_type == "cpu" else f"not te: {problem}")


def for_te_attention(config: Config) -> ModuleLibrary:
    """The library for layers with attention of Transformer Engine."""
    return FusedNormLibrary(config) if FusedNormLibrary.fits(config.model) else TransformerEngineLibrary(config)


def unfit(config: Config, device_type: str) -> str | None:
    """The reason why Transformer Engine's modules cannot compute this run on this device; None if they can."""
    if device_type != "cuda":
        return "Transformer Engine needs CUDA, but this run is on the CPU"
    if config.run.precision == "fp32":
        return "Transformer Engine's modules compute in bf16, but run.precision is fp32"
    return config.local_modules_only


def missing() -> str | None:
    """The reason why Transformer Engine cannot be imported, with advice; None if it can."""
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError as error:
        return f"transformer_engine cannot be imported ({error}).  {INSTALL}"
    return None


def check_fp8(config: Config) -> None:
    """Raise ConfigError if the installed release or this GPU cannot run the FP8 recipe."""
    if (recipe := config.run.fp8) is None:
        return
    gpu, cuda = torch.cuda.get_device_capability(), numbers(torch.version.cuda or "0.0")
    problem = fp8.why_not(recipe, te=release(), gpu=gpu, cuda=cuda)
    if problem:
        others = [name for name in fp8.recipes_for(gpu) if name != recipe]
        raise ConfigError(f"run.fp8 = {recipe}: {problem}.  This GPU can run: {', '.join([*others, 'null'])}.")


def release() -> tuple[int, int]:
    """The installed release of Transformer Engine."""
    return numbers(importlib.metadata.version("transformer-engine"))


def numbers(version: str) -> tuple[int, int]:
    """The first two numbers of a version: "2.20.2+abc" -> (2, 20)"""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
