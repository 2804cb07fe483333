"""Keys of training: how long, how much per step, and what saves memory."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from sft.config.section import NonNegative, Positive, Section, refuse


class TrainConfig(Section):
    num_steps: Positive | None = None
    """Optimizer updates; give this or num_epochs."""
    num_epochs: Positive | None = None
    """Passes over the data; give this or num_steps."""
    global_batch_size: Positive
    """Packs per optimizer step, over all data-parallel ranks."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations to recompute in backward: none; norms and the MLP or experts (selective); or whole layers (full)."""
    mlp_tile: Positive | None = None
    """Tokens of a rank that the MLP takes at one time; it is then recomputed in backward.  null takes all."""
    offload_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of a rank's layers, the first ones, whose activations are offloaded to host memory; needs recompute."""
    eval_every: Positive | None = None
    """Steps between evaluations; null means before the first step and at the end only."""
    max_nonfinite_steps: NonNegative = 2
    """Steps in a row that may be skipped because a loss or gradient is not finite; one more ends the run."""

    @model_validator(mode="after")
    def _one_length(self) -> "TrainConfig":
        steps, epochs = self.num_steps, self.num_epochs
        neither, both = steps is None and epochs is None, steps is not None and epochs is not None
        too_much = self.offload_fraction > 0.0 and self.recompute == "none"
        refuse(
            (too_much, "offload_fraction", "needs recompute = selective or full: without, that is too much to move"),
            (neither, "num_steps", "and num_epochs is null too; give one of them"),
            (both, "num_epochs", f"clashes with num_steps = {steps}; set one of them to null"),
        )
        return self
