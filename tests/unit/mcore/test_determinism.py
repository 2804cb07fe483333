"""The environment variables that run.deterministic sets, and the values that it refuses."""

import pytest
import torch

from sft.errors import ConfigError
from sft.mcore import determinism

RING = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring"}
OTHERS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "^NVLS"}


@pytest.mark.parametrize(("before", "after"), [({}, RING), (OTHERS, OTHERS), ({"NCCL_ALGO": "Ring"}, RING)])
def test_variables(before: dict[str, str], after: dict[str, str]) -> None:
    environ = before.copy()
    try:
        determinism.set_mode(True, environ)
        assert environ == after and torch.are_deterministic_algorithms_enabled()
    finally:
        determinism.set_mode(False, environ)
    assert environ == after and not torch.are_deterministic_algorithms_enabled()


def test_without_it_nothing_is_set() -> None:
    environ = {"NCCL_ALGO": "Tree"}
    determinism.set_mode(False, environ)
    assert environ == {"NCCL_ALGO": "Tree"}


@pytest.mark.parametrize(
    ("name", "value", "values"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", ":4096:8 or :16:8"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1", "0"),
        ("NCCL_ALGO", "Tree", "Ring or CollnetDirect or CollnetChain or ^NVLS"),
    ],
)
def test_a_variable_that_asks_for_other_algorithms(name: str, value: str, values: str) -> None:
    with pytest.raises(ConfigError) as caught:
        determinism.set_mode(True, {name: value})
    assert str(caught.value) == (
        f"run.deterministic = true, but the environment has {name}={value}, with which results differ from run to run."
        f"  Unset it, or use {values}."
    )
    assert not torch.are_deterministic_algorithms_enabled()
