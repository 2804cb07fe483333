"""Keys of AdamW and its learning-rate schedule."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from sft.config.section import Fraction, NonNegative, Section, refuse


class OptimConfig(Section):
    lr: Annotated[float, Field(gt=0.0)]
    """Peak learning rate."""
    min_lr: Annotated[float, Field(ge=0.0)] = 0.0
    """Learning rate at the last step (all schedules but constant)."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Decay after warm-up; wsd holds the peak and decays over the last wsd_decay_fraction of the run."""
    warmup_steps: NonNegative | None = None
    """Steps of linear warm-up; give this or warmup_fraction or neither (no warm-up)."""
    warmup_fraction: Fraction | None = None
    """Warm-up as a fraction of all steps."""
    wsd_decay_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """Share of the run in which wsd decays (linearly)."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Decoupled weight decay; biases and norms are excluded."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Adam's first-moment decay."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Adam's second-moment decay."""
    epsilon: Annotated[float, Field(gt=0.0)] = 1e-8
    """Adam's epsilon."""
    clip_grad: Annotated[float, Field(ge=0.0)] = 1.0
    """Largest gradient norm; 0 switches clipping off."""
    offload_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of Adam's states and update in host memory, 16 bytes a parameter; needs bf16 and distributed_optimizer."""

    @model_validator(mode="after")
    def _schedule_is_possible(self) -> "OptimConfig":
        steps, fraction = self.warmup_steps, self.warmup_fraction
        both = steps is not None and fraction is not None
        unused = self.schedule == "constant" and self.min_lr > 0.0
        too_long = self.schedule == "wsd" and (fraction or 0.0) + self.wsd_decay_fraction > 1.0
        refuse(
            (both, "warmup_fraction", f"clashes with warmup_steps = {steps}; give one of them"),
            (self.min_lr > self.lr, "min_lr", f"is above the peak, lr = {self.lr}"),
            (unused, "min_lr", "has no effect with schedule = constant; use another, or min_lr = 0"),
            (too_long, "wsd_decay_fraction", f"and warmup_fraction = {fraction} together exceed the run"),
        )
        return self
