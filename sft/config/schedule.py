"""Computes the learning rate of each step, from the keys of optim and the number of steps of the run."""

import math
from dataclasses import dataclass
from decimal import Decimal

from sft.config.train import OptimConfig
from sft.errors import ConfigError

# The keys of optim that decide the rates, beside the number of steps.
KEYS = ("lr", "min_lr", "schedule", "warmup_steps", "warmup_fraction", "wsd_decay_fraction", "wsd_decay")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A learning-rate schedule: numbers of steps of the run, of its warm-up, and of its final decay (wsd)."""

    num_steps: int
    warmup_steps: int
    wsd_decay_steps: int

    @staticmethod
    def resolve(optim: OptimConfig, num_steps: int) -> "Schedule":
        """The schedule of a run; fractions of the run become steps.  Raises ConfigError if warm-up fills the whole run.

        num_steps 100, warmup_fraction 0.03, wsd_decay_fraction 0.1 -> warm-up 3, decay 10
        """
        warmup = optim.warmup_steps or math.ceil(_product(optim.warmup_fraction or 0.0, num_steps))
        if warmup and warmup >= num_steps:
            raise ConfigError(
                f"warm-up of {warmup} steps does not fit a run of {num_steps} steps, because the run would never "
                f"reach the peak learning rate.  Use optim.warmup_steps below {num_steps}."
            )
        decay = max(1, round(_product(optim.wsd_decay_fraction, num_steps)))
        return Schedule(num_steps=num_steps, warmup_steps=warmup, wsd_decay_steps=min(decay, num_steps - warmup))

    def rate(self, optim: OptimConfig, step: int) -> float:
        """The learning rate of update `step`, counted from 1 to `num_steps`, as megatron-core's scheduler sets it.

        cosine from 1e-3 to 1e-5 over 12 steps, step 7 -> 3.77e-4
        """
        if self.warmup_steps and step <= self.warmup_steps:
            return optim.lr * step / self.warmup_steps
        if optim.schedule == "constant":
            return optim.lr
        if optim.schedule == "wsd":
            left = min(1.0, (self.num_steps - step) / self.wsd_decay_steps)
            shape = optim.wsd_decay
        else:
            left = (self.num_steps - step) / (self.num_steps - self.warmup_steps)
            shape = optim.schedule
        share = left
        if shape == "cosine":
            share = 0.5 * (1.0 - math.cos(math.pi * left))
        elif shape == "minus_sqrt":
            share = 1.0 - math.sqrt(1.0 - left)
        return optim.min_lr + share * (optim.lr - optim.min_lr)


def _product(fraction: float, num_steps: int) -> Decimal:
    """fraction * num_steps in decimal arithmetic.  In floats, 0.07 * 100 is 7.000000000000001, whose ceiling is 8."""
    return Decimal(repr(float(fraction))) * num_steps
