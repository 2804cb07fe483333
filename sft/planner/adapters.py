"""The LoRA settings of proposals: adapters of rank 16 on every Linear of the model that can have one."""

from typing import Any

from pydantic import ValidationError

from sft.config import Config, ModelConfig
from sft.errors import ConfigError
from sft.planner.task import Task
from sft.weights.lora.targets import not_adaptable
from sft.weights.trained import trained_weights

_KEYS = {"rank": 16, "alpha": 32}


def lora_keys(model: ModelConfig) -> dict[str, Any]:
    """Keys of the section `lora`.  They exclude Linears that the targets name and that cannot have adapters.
    Qwen3.6-35B-A3B -> {"rank": 16, "alpha": 32, "exclude": ["shared_expert_gate"]}
    """
    excluded = not_adaptable(model)
    return _KEYS | ({"exclude": excluded} if excluded else {})


def with_adapters(task: Task) -> Task | None:
    """The task with LoRA instead of training all weights; None if the recipe refuses these settings."""
    sections = {name: getattr(task.config, name) for name in type(task.config).model_fields}
    try:
        config = Config.model_validate(sections | {"lora": lora_keys(task.config.model)})
        return task.changed(config=config, trained=trained_weights(config, task.vocab_size))
    except (ValidationError, ConfigError):
        return None
