"""Process groups of context parallelism with a2a+p2p on real ranks: the ranks that exchange heads, and the ring."""

import contextlib
import importlib.util
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from sft.mcore.process_groups import _two_levels
from sft.parallel.layout import Layout
from sft.recipe.load import parse_recipe
from tests.ranks import scenarios
from tests.ranks.pool import Ranks

TWO = ["run.device=auto", "parallel.cp=4", "parallel.cp_comm=a2a+p2p", "parallel.cp_a2a=2"]


def rearrange(array: np.ndarray[Any, Any], pattern: str, **sizes: int) -> np.ndarray[Any, Any]:
    """Replaces the one function of einops that megatron-core calls."""
    assert pattern == "(l s u) -> (l u) s"
    outer, size, inner = (sizes[name] for name in "lsu")
    return array.reshape(outer, size, inner).transpose(0, 2, 1).reshape(outer * inner, size)


@contextlib.contextmanager
def einops() -> Iterator[None]:
    """Pretends that einops is installed, as it is together with Transformer Engine."""
    if importlib.util.find_spec("einops"):
        yield
        return
    stand_in = SimpleNamespace(rearrange=rearrange)
    with (
        mock.patch.object(parallel_state, "einops", stand_in, create=True),
        mock.patch.object(parallel_state, "HAVE_EINOPS", True),
        mock.patch.object(importlib.util, "find_spec", lambda name: ModuleSpec(name, None)),
    ):
        yield


def groups(overrides: list[str], with_einops: bool = True) -> tuple[list[int], list[list[int]] | None]:
    """The ranks of this rank's cp group, and those of the groups that Transformer Engine's attention gets."""
    with einops() if with_einops else contextlib.nullcontext(), scenarios.running(overrides) as engine:
        two = parallel_state.get_hierarchical_context_parallel_groups(check_initialized=False)
        assert engine.groups.collection.hcp == two  # core's layer takes these groups from parallel_state
        return (
            dist.get_process_group_ranks(engine.groups.collection.cp),
            None if two is None else [dist.get_process_group_ranks(group) for group in two],
        )


def test_neighbours_exchange_heads(ranks: Ranks) -> None:
    """[all-to-all, ring], the order in which TEDotProductAttention gets them."""
    assert ranks(4).run(groups, TWO) == [
        ([0, 1, 2, 3], [[0, 1], [0, 2]]),
        ([0, 1, 2, 3], [[0, 1], [1, 3]]),
        ([0, 1, 2, 3], [[2, 3], [0, 2]]),
        ([0, 1, 2, 3], [[2, 3], [1, 3]]),
    ]


def test_the_neighbours_come_first() -> None:
    """Tests levels of different sizes; with equal sizes, as above, the order of the levels does not show."""
    config = parse_recipe(
        scenarios.RECIPE, "tests", [*TWO, "parallel.cp=12", "data.doc_multiple=96", "data.seq_length=96"]
    )
    with einops():
        two = _two_levels(Layout.resolve(config.config, 12))
    assert two == {"hierarchical_context_parallel_sizes": [2, 6]}


@pytest.mark.parametrize("overrides", [TWO[:2], [*TWO, "attention.backend=portable"], ["parallel.cp=4", *TWO[2:]]])
def test_nobody_else_has_two_levels(ranks: Ranks, overrides: list[str]) -> None:
    """p2p, and recipes that exclude Transformer Engine by their backend or device, have one level."""
    assert ranks(4).run(groups, overrides) == [([0, 1, 2, 3], None)] * 4
