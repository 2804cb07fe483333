"""Keys of the loss head."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from sft.config.section import Positive, Section, refuse


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

    @model_validator(mode="after")
    def _full_has_no_chunks(self) -> "LossConfig":
        useless = self.impl == "full" and self.chunk_size not in ("auto", None)
        refuse((useless, "chunk_size", "does nothing with impl = full; use null, or impl = fused or chunked"))
        return self
