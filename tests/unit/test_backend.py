"""Which attention a run gets, and what is said of it."""

import importlib.metadata
import sys
import types

import pytest

from sft.config import Config
from sft.errors import ConfigError
from sft.mcore.backend import choose
from sft.recipe import parse_recipe
from tests.unit.test_recipe import GOOD


def config(*overrides: str) -> Config:
    return parse_recipe(GOOD, "a.yaml", list(overrides)).config


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Transformer Engine 2.9 were there."""
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "2.9.0+abc")


def test_on_a_cpu() -> None:
    assert str(choose(config(), "cpu")) == "portable (plain torch, no flash kernel: it needs CUDA)"


def test_without_transformer_engine() -> None:
    """Not installed here."""
    found = choose(config(), "cuda")
    assert (found.name, found.by_flash) == ("portable", True)
    assert str(found).startswith("portable (torch's flash kernel; not te: transformer_engine does not import here (")
    assert str(choose(config("attention.backend=portable"), "cuda")) == "portable (torch's flash kernel)"
    with pytest.raises(ConfigError, match="attention.backend = te: transformer_engine does not import here"):
        choose(config("attention.backend=te"), "cuda")


def test_in_full_precision() -> None:
    assert str(choose(config("run.precision=fp32", "attention.backend=portable"), "cuda")) == (
        "portable (plain torch, no flash kernel: it computes in bf16 only)"
    )


def test_with_transformer_engine(te: None) -> None:
    assert str(choose(config(), "cuda")) == "te (Transformer Engine)"
    assert choose(config("attention.backend=portable"), "cuda").name == "portable"


@pytest.mark.parametrize("way, since", [("a2a", "2.10"), ("all_gather", "2.18")])
def test_a_release_that_cannot_is_refused(te: None, monkeypatch: pytest.MonkeyPatch, way: str, since: str) -> None:
    wanted = config(f"parallel.cp_comm={way}", "parallel.cp=2")
    with pytest.raises(ConfigError) as caught:
        choose(wanted, "cuda")
    assert str(caught.value) == (
        f"parallel.cp_comm = {way}: Transformer Engine 2.9.0+abc is here, and takes packed documents so from {since} "
        "on.  parallel.cp_comm=p2p works."
    )
    assert choose(config(f"parallel.cp_comm={way}", "parallel.cp=1"), "cuda").name == "te"  # nothing to move
    monkeypatch.setattr(importlib.metadata, "version", lambda package: f"{since}.1")
    assert choose(wanted, "cuda").name == "te"
