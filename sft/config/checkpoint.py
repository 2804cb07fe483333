"""Keys of checkpoints: when to save, what to keep, where to resume."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from sft.config.section import Path, Positive, Section

# Metrics of held-out sets that `checkpoint.keep_best` may name, and whether less is better.
LOWER_IS_BETTER = {"lm loss": True, "sample loss": True, "perplexity/avg": True, "token accuracy": False}


class CheckpointConfig(Section):
    resume: Path = "auto"
    """auto: from the newest checkpoint, if any; must: require one; never: refuse a run that has one; or a folder."""
    verify: Literal["off", "size", "full"] = "full"
    """Check against the manifest before loading: off: none; size: file sizes; full: SHA-256 of all files."""
    allow_changes: list[str] = []
    """Keys that affect training and may still differ from the run that wrote the checkpoint: [run.seed, data]."""
    save_every: Positive | None = None
    """Steps between checkpoints; null means only after the last step."""
    save_every_minutes: Annotated[float, Field(gt=0.0)] | None = None
    """Also save after the first step that ends at least this many minutes after the last save."""
    save_last: bool = True
    """Save after the last step."""
    async_save: bool = False
    """Copy the state in memory and write the copy while training continues.  Needs memory for the copy."""
    keep_last: Annotated[int, Field(ge=2)] | None = None
    """Number of newest checkpoints to keep, at least 2 (the newest may be damaged); null keeps all."""
    keep_every: Positive | None = None
    """Also keep every checkpoint whose step is a multiple of this number."""
    keep_best: str | None = None
    """Also keep the best checkpoint by SET/METRIC, a metric of a held-out set evaluated at its step: eval/lm loss."""

    @property
    def best(self) -> tuple[str, str] | None:
        """(held-out set, metric) of keep_best."""
        if self.keep_best is None:
            return None
        name, _, metric = self.keep_best.partition("/")
        return name, metric

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.keep_last is None and (self.keep_every is not None or self.keep_best is not None):
            kept = "keep_every" if self.keep_every is not None else "keep_best"
            yield kept, "has no effect while keep_last is null, which keeps all; set keep_last, 2 or more"
        if self.best is not None and self.best[1] not in LOWER_IS_BETTER:
            yield "keep_best", f"is not SET/METRIC with a metric of {', '.join(LOWER_IS_BETTER)}"
