"""Keys of checkpoints: saving, deleting and loading."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from sft.config.section import Path, Positive, Section
from sft.files import object_store

ExportFormat = Literal["as_source", "bf16", "fp8_block", "mxfp4", "nvfp4", "int4"]
# Metrics of held-out sets that `checkpoint.keep_best` may name, and whether a lower value is better.
LOWER_IS_BETTER = {"lm loss": True, "sample loss": True, "perplexity/avg": True, "token accuracy": False}


class CheckpointConfig(Section):
    resume: Path = "auto"
    """auto: resume if a checkpoint exists.  must: require one.  never: refuse to start if there is one.  Or a folder
    with checkpoints."""
    verify: Literal["off", "size", "full"] = "full"
    """Check of a checkpoint before loading: none (off), sizes of files (size), SHA-256 of all files (full)."""
    allow_changes: list[str] = []
    """Keys that affect training and may change when a run resumes: [run.seed, data]."""
    save_every: Positive | None = None
    """Steps between checkpoints; null: only after the last step."""
    save_every_minutes: Annotated[float, Field(gt=0.0)] | None = None
    """Also save after the first step that ends this many minutes after the last save; null: never."""
    save_last: bool = True
    """Save after the last step."""
    async_save: bool = True
    """true: copy the state in host memory, and write the copy while training continues.  false: training waits for
    saves."""
    remote: Path | None = None
    """Place in an object store to which every checkpoint is copied, and from which the run resumes if run.dir has no
    newer one: s3://BUCKET/PATH.  The nodes of a run then need no shared disk."""
    keep_last: Annotated[int, Field(ge=2)] | None = None
    """Number of newest checkpoints to keep, at least 2 because the newest may be damaged; null: all."""
    keep_every: Positive | None = None
    """Also keep every checkpoint whose step is a multiple of this number."""
    keep_best: str | None = None
    """Also keep the best checkpoint by SET/METRIC, a metric of a held-out set, such as eval/lm loss."""
    export_hf: Literal["none", "last", "best", "every"] = "none"
    """Checkpoints that the run exports while it trains, as Hugging Face folders in run.dir/hf_exports."""

    export_format: ExportFormat = "bf16"
    """Format of exports.  bf16: not quantised, each tensor in the type of the original model.  as_source: quantised as
    the original model.  The others quantise the Linears of layers."""

    @property
    def best(self) -> tuple[str, str] | None:
        """Held-out set and metric of keep_best: eval/lm loss -> ("eval", "lm loss")."""
        if self.keep_best is None:
            return None
        name, _, metric = self.keep_best.partition("/")
        return name, metric

    @property
    def copies_state(self) -> bool:
        """Whether saves during training copy the state in host memory."""
        return self.async_save and (self.save_every is not None or self.save_every_minutes is not None)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.remote is not None and (reason := object_store.refusal(self.remote)):
            yield "remote", reason
        has_no_effect = self.keep_best is not None and self.export_hf != "best"
        if self.keep_last is None and (self.keep_every is not None or has_no_effect):
            kept = "keep_every" if self.keep_every is not None else "keep_best"
            yield kept, "has no effect with keep_last = null, which keeps all checkpoints; set keep_last to 2 or more"
        if self.best is not None and self.best[1] not in LOWER_IS_BETTER:
            yield "keep_best", f"is not SET/METRIC with a metric of {', '.join(LOWER_IS_BETTER)}"
        if self.export_hf == "best" and self.keep_best is None:
            yield "export_hf", "= best needs keep_best, which says what is best, for example eval/lm loss"
        if self.export_hf == "last" and not self.save_last:
            yield "export_hf", "= last needs save_last = true"
