"""Keys of what is written and logged while training."""

from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from sft.config.section import Positive, Section, refuse


class LogConfig(Section):
    every: Positive = 1
    """Steps between lines on the console; metrics.jsonl and TensorBoard get every step."""
    tensorboard: bool = True
    """Write TensorBoard events to run.dir/tensorboard."""
    wandb: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Project at Weights & Biases to log to; WANDB_* variables hold the rest.  null logs nothing there."""
    position_edges: list[Positive] = [4096, 16384, 65536]
    """The loss is also logged by position in the document: below the first edge, between two, above the last."""
    peak_tflops: Annotated[float, Field(gt=0.0)] | None = None
    """Dense peak of one GPU in the run's precision (H100 SXM bf16: 989), for MFU; null leaves MFU out."""

    @model_validator(mode="after")
    def _edges_increase(self) -> "LogConfig":
        edges = self.position_edges
        wrong = edges != sorted(set(edges))
        refuse((wrong, "position_edges", "must increase, as in [4096, 16384]"))
        return self
