"""Keys of the run itself: its folder, its device and how long it may take."""

from typing import Annotated, Literal

from pydantic import Field

from sft.config.section import UNREPORTED, Path, Positive, Section


class RunConfig(Section):
    dir: Path = Field(json_schema_extra=UNREPORTED)
    """Folder of this run: recipe.yaml, data.json, metrics.jsonl, tensorboard/, checkpoints/.  One run, one folder."""
    device: Literal["auto", "cuda", "cpu"] = Field("auto", json_schema_extra=UNREPORTED)
    """auto takes CUDA where torch sees it.  The CPU runs every parallelism, on gloo."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16 keeps main parameters and gradients in fp32.  fp32 is for comparisons and CPU runs."""
    fp8: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None = None
    """FP8 recipe of the linear layers (not yet run on GPUs); needs Transformer Engine and precision bf16."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1234
    """Seeds initial weights and the order of the data."""
    timeout_s: Positive = Field(1800, json_schema_extra=UNREPORTED)
    """Seconds a rank may wait for another, also at the start, while rank 0 reads the data files once."""
    step_timeout_s: Positive | None = Field(1800, json_schema_extra=UNREPORTED)
    """Seconds after which a step, evaluation or save counts as hung: every rank writes its stacks, and the run ends."""
    exit_after_minutes: Annotated[float, Field(gt=0.0)] | None = Field(None, json_schema_extra=UNREPORTED)
    """Minutes after which the run saves and exits; under SLURM it also does so run.grace_s before the job's end."""
    grace_s: Positive = Field(100, json_schema_extra=UNREPORTED)
    """Seconds between a signal to stop and the end of the process; a step and a save must fit into them."""
