"""States of an optimizer for each parameter, for the estimate and for checkpoints.  `mcore/optimizer` runs it."""

from dataclasses import dataclass

FP32 = 4  # bytes of a number


@dataclass(frozen=True)
class OptimizerStates:
    """moments: names of the fp32 numbers that it keeps for each parameter, as torch's optimizer names them"""

    moments: tuple[str, ...]

    @property
    def moment_bytes(self) -> int:
        """Bytes per parameter."""
        return FP32 * len(self.moments)

    @property
    def host_bytes(self) -> int:
        """Bytes per parameter in host memory: a weight, the moments, and the gradient in transfer."""
        return self.moment_bytes + 2 * FP32

    @property
    def moved_bytes(self) -> int:
        """Bytes per parameter that an update reads and writes: gradient, weight and moments in fp32 are read, and all
        but the gradient written."""
        return 2 * (self.moment_bytes + FP32) + FP32


ADAM = OptimizerStates(("exp_avg", "exp_avg_sq"))
