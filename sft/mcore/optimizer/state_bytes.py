"""Bytes of weights, gradients and optimizer states of a parameter.  Arithmetic only, no torch; sft/estimate sums them.

With bf16 weights 18 bytes a parameter; with the distributed optimizer 6 + 12 / (dp x cp), and of an expert
6 + 12 / its copies.
"""

from dataclasses import dataclass

MAIN_GRADIENT = 4  # fp32
MOMENTS = 8  # two, fp32
MAIN_WEIGHT = 4  # fp32, where the weight itself is narrower
OFFLOADED = 16  # in host memory: main weight, moments, and the gradient in transfer


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Of one rank."""

    weights: float
    gradients: float
    optimizer: float
    host: float  # what optim.offload_fraction moves there

    @staticmethod
    def of(*, parameters: float, owned: float, width: int, offload_fraction: float) -> "StateBytes":
        """parameters: on this rank; owned: those whose states it has; width: bytes of a weight."""
        state = MOMENTS + (MAIN_WEIGHT if width < MAIN_WEIGHT else 0)
        return StateBytes(
            weights=width * parameters,
            gradients=MAIN_GRADIENT * parameters,
            optimizer=(1 - offload_fraction) * state * owned,
            host=offload_fraction * OFFLOADED * owned,
        )
