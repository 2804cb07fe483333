"""Keys of training: how long, how much per step, what saves memory; the loss head, AdamW and its learning rates."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from sft.config.section import Fraction, NonNegative, Positive, Section


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

    def conflicts(self) -> Iterator[tuple[str, str]]:
        steps, epochs = self.num_steps, self.num_epochs
        if self.offload_fraction > 0.0 and self.recompute == "none":
            yield "offload_fraction", "needs recompute = selective or full: without, that is too much to move"
        if steps is None and epochs is None:
            yield "num_steps", "and num_epochs is null too; give one of them"
        if steps is not None and epochs is not None:
            yield "num_epochs", f"clashes with num_steps = {steps}; set one of them to null"


class LossConfig(Section):
    impl: Literal["fused", "chunked", "full"] = "fused"
    """fused never builds the logits and projects supervised rows only; full is megatron-core's own."""
    chunk_size: Positive | None | Literal["auto"] = "auto"
    """Rows projected at one time: supervised ones (fused) or all (chunked).  auto means 4096 and 1024; null, all."""
    reduction: Literal["token", "sample", "sqrt"] = "token"
    """Weight of each of a sample's n supervised tokens: 1, 1 / n (every sample counts the same) or 1 / sqrt(n)."""
    denominator: Literal["weights", "tokens"] = "weights"
    """What the weighted sum over the global batch is divided by: the sum of weights, or the supervised tokens."""
    z_loss_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Adds this times the squared log-sum-exp of the scores, which keeps them from drifting; 1e-4 is usual."""
    entropy_coef: float = 0.0
    """Subtracts this times the entropy from the loss: above 0 for flatter predictions, below 0 for sharper ones."""
    entropy: bool = False
    """Log the mean entropy of supervised tokens even where entropy_coef is 0; it has no gradient then."""

    @property
    def measures_entropy(self) -> bool:
        return self.entropy or self.entropy_coef != 0.0

    def chunk(self, num_rows: int) -> int:
        """Rows to take at once of `num_rows`; at least 1."""
        size = {"fused": 4096, "chunked": 1024}.get(self.impl) if self.chunk_size == "auto" else self.chunk_size
        return max(1, num_rows if size is None else min(size, num_rows))

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.impl == "full" and self.chunk_size not in ("auto", None):
            yield "chunk_size", "does nothing with impl = full; use null, or impl = fused or chunked"


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

    def conflicts(self) -> Iterator[tuple[str, str]]:
        steps, fraction = self.warmup_steps, self.warmup_fraction
        if steps is not None and fraction is not None:
            yield "warmup_fraction", f"clashes with warmup_steps = {steps}; give one of them"
        if self.min_lr > self.lr:
            yield "min_lr", f"is above the peak, lr = {self.lr}"
        if self.schedule == "constant" and self.min_lr > 0.0:
            yield "min_lr", "has no effect with schedule = constant; use another, or min_lr = 0"
        if self.schedule == "wsd" and (fraction or 0.0) + self.wsd_decay_fraction > 1.0:
            yield "wsd_decay_fraction", f"and warmup_fraction = {fraction} together exceed the run"
