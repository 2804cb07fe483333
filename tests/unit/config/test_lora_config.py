"""Recipe keys of LoRA: the scale, and values that are refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from sft.config.lora import LoraConfig


def test_the_scale() -> None:
    assert LoraConfig(rank=16, alpha=32.0).scale == 2.0
    assert LoraConfig(rank=16, alpha=32.0, rslora=True).scale == 8.0


@pytest.mark.parametrize(
    "keys, message",
    [
        (dict(rank=0), "greater than or equal to 1"),
        (dict(alpha=16.0), "rank: trains without adapters, but lora.alpha is set; set lora.rank"),
        (dict(alpha=0.0), "greater than 0"),
        (dict(lr_ratio=0.0), "greater than 0"),
        (dict(rank=1, targets=[]), "targets: is empty, and so is target_parameters"),
        (dict(rank=1, target_parameters=["experts.*"]), 'target_parameters: contains "experts.*", which is no name of'),
        (dict(target_parameters=["experts.down_proj"]), "rank: trains without adapters, but lora.target_parameters is"),
        (dict(rank=1, dropout=0.1), "dropout: is not supported: the random mask of a token would depend on the layout"),
        (
            dict(rank=1, targets=[r".*\.q_proj"]),
            r'targets: contains ".*\.q_proj", which is no name or pattern of modules',
        ),
        (
            dict(rank=1, exclude=["(q|k)_proj"]),
            'exclude: contains "(q|k)_proj", which is no name or pattern of modules',
        ),
        (dict(rank=1, targets=["q_proj", "k_proj", "q_proj"]), "targets: contains q_proj twice; remove one"),
        (dict(rank=1, targets=["q_proj"], exclude=["q_proj"]), "exclude: names q_proj, which targets name, too"),
        (dict(rank=1, targets=["q_proj"], exclude=["all-linear"]), "exclude: cannot be all-linear"),
    ],
)
def test_values_that_cannot_be_used(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        LoraConfig(**keys)
    assert message in str(error.value)


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "*.experts.*.down_proj", "model.layers.1?.mlp.*"]])
def test_names_and_patterns(targets: list[str]) -> None:
    assert LoraConfig(rank=1, targets=targets, exclude=["lm_head"]).targets == targets


def test_a_run_without_adapters_writes_a_recipe_that_can_be_loaded() -> None:
    """The recipe.yaml of a run contains every key."""
    defaults = LoraConfig().model_dump()
    assert defaults["alpha"] == 32.0
    assert not LoraConfig(**defaults).is_used
