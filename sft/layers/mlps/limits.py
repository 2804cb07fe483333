"""Says which layers have limits of SwiGLU (model.swiglu_limits, model.moe.swiglu_limits), and which limits."""

import math
from collections.abc import Sequence

from sft.config import ModelConfig


def limits_of(model: ModelConfig, layer_number: int) -> tuple[float, float]:
    """The limits of a layer, counted from 1: (of its MLP or shared expert, of its experts).  infinity: no limit"""

    def limit(limits: Sequence[float]) -> float:
        return (limits[layer_number - 1 : layer_number] or [0.0])[0] or math.inf

    return limit(model.swiglu_limits), limit(model.moe.swiglu_limits)


def has_plain_swiglu(model: ModelConfig) -> bool:
    """Whether the activation is SwiGLU without limits, which core computes."""
    return model.activation == "swiglu" and not any((*model.swiglu_limits, *model.moe.swiglu_limits))
