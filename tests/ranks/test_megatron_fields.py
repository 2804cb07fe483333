"""Each field that model.megatron may set has its value in megatron-core's config during a training step."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from sft.config import megatron_fields
from sft.config.megatron_fields import ALLOWED, ROLES, UNUSED
from sft.mcore.model import core_config
from tests.ranks import scenarios
from tests.ranks.pool import Ranks

EXPERTS = [
    "run.precision=bf16",
    "model.moe={num_experts: 4, top_k: 2, ffn_hidden_size: 32, shared_ffn_hidden_size: 32}",
    "model.moe.aux_loss_coef=0.01",
    "model.moe.z_loss_coef=0.01",
]
LINEAR = "model.linear_attention={layers: [1, 2], num_key_heads: 2, num_value_heads: 4, key_head_dim: 8}"
FIELDS = [(name, value) for name, entry in ALLOWED.items() for value in entry.values]


class Recorded(TransformerConfig):  # type: ignore[misc]
    """A config of megatron-core that records the fields that are read after its construction."""

    read: set[str] = set()

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        Recorded.read = set()

    def __getattribute__(self, name: str) -> Any:
        Recorded.read.add(name)
        return super().__getattribute__(name)


def step(overrides: Sequence[str], name: str = "hidden_size") -> tuple[Any, float | None, float, bool, set[str]]:
    """One step: the value of a field of megatron-core, loss and norm, torch's switch for reduced-precision sums, and
    the fields read."""
    reduced = torch.backends.cuda.matmul
    before = reduced.allow_bf16_reduced_precision_reduction
    try:
        with mock.patch.object(core_config, "TransformerConfig", Recorded), scenarios.running(overrides) as engine:
            (result,) = scenarios.train_steps(engine, [0])
            read, value = set(Recorded.read), getattr(engine.core_config, name)
            return value, result.lm_loss, result.grad_norm, reduced.allow_bf16_reduced_precision_reduction, read
    finally:
        reduced.allow_bf16_reduced_precision_reduction = before


def test_a_step_with_each_field(ranks: Ranks) -> None:
    """The fields choose kernels of a GPU, so the numbers on a CPU stay the same."""
    ((_, *plain, _, read),) = ranks(1).run(step, EXPERTS)
    assert plain == [pytest.approx(5.711, abs=0.01), pytest.approx(0.5, abs=0.1)]
    assert_unused(read)
    for name, value in FIELDS:
        ((found, *measured, is_reduced, _),) = ranks(1).run(
            step, [*EXPERTS, f"model.megatron.{name}={str(value).lower()}"], name
        )
        assert found is value and measured == plain, name
        assert is_reduced is not (name == megatron_fields.REDUCED_MATMUL and value), name


@pytest.mark.parametrize("overrides", [[LINEAR], ["train.recompute=full"]], ids=str)
def test_what_has_no_effect_is_read_by_nothing(ranks: Ranks, overrides: list[str]) -> None:
    ((_, _, _, _, read),) = ranks(1).run(step, overrides)
    assert_unused(read)


def assert_unused(read: set[str]) -> None:
    assert "hidden_size" in read and len(read) > 50
    assert read & {name for name, role in ROLES.items() if role == UNUSED} == set()
