"""Every knob, its type, its default and what it does.

Decides what a recipe may say and which single values and combinations of values are wrong by themselves.
Does not read files (`recipe.py`), and does not know the number of GPUs (`layout.py`).
All models are frozen: nothing is ever written back into a config.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from sft.config.attention import AttentionConfig
from sft.config.data import DataConfig, SourceConfig
from sft.config.logging import LogConfig, MemoryProfile, ProfileConfig, TorchProfile
from sft.config.model import ModelConfig, MoeConfig, RopeConfig
from sft.config.section import Conflict, Path, Positive, Section, divisors, listed, refuse
from sft.config.train import CheckpointConfig, LossConfig, OptimConfig, ParallelConfig, TrainConfig

__all__ = [
    "AttentionConfig",
    "CheckpointConfig",
    "Config",
    "Conflict",
    "DataConfig",
    "LogConfig",
    "LossConfig",
    "MemoryProfile",
    "ModelConfig",
    "MoeConfig",
    "OptimConfig",
    "ParallelConfig",
    "ProfileConfig",
    "RopeConfig",
    "RunConfig",
    "Section",
    "SourceConfig",
    "TorchProfile",
    "TrainConfig",
    "divisors",
    "listed",
]


class RunConfig(Section):
    dir: Path
    """Folder of this run: recipe.yaml, data.json, metrics.jsonl, tensorboard/, checkpoints/.  One run, one folder."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto takes CUDA where torch sees it.  The CPU runs every parallelism, on gloo."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16 keeps main parameters and gradients in fp32.  fp32 is for proofs and CPU runs."""
    fp8: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None = None
    """FP8 for the products of layers, by how it is scaled (not yet run on GPUs); te only, beside precision bf16."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1234
    """Seeds initial weights and the order of the data."""
    timeout_s: Positive = 1800
    """Seconds a rank may wait for another, also while rank 0 reads the data files once to find what was prepared."""
    step_timeout_s: Positive | None = 1800
    """A step, evaluation or save that takes longer hangs: every rank's stack is written down, and the run ends."""
    exit_after_minutes: Annotated[float, Field(gt=0.0)] | None = None
    """Save and leave after this long; under SLURM always run.grace_s before the job's end."""
    grace_s: Positive = 100
    """Seconds between a signal to stop and the moment this process is ended, which a step and a save must fit in."""


class Config(Section):
    """A whole recipe."""

    run: RunConfig
    """Where this run lives and what it runs on."""
    model: ModelConfig
    """A GPT with RMSNorm, SwiGLU, grouped-query attention and rotary positions; `check` counts parameters."""
    data: DataConfig
    """Conversations in, packs out.  Paths are used as typed, relative to the current directory."""
    parallel: ParallelConfig = ParallelConfig()
    """world_size = tp * cp * pp * dp; dp is always derived, never set."""
    attention: AttentionConfig = AttentionConfig()
    """Who computes attention."""
    loss: LossConfig = LossConfig()
    """How the loss is computed without ever holding the logits whole."""
    train: TrainConfig
    """How long, and how much per optimizer step."""
    optim: OptimConfig
    """AdamW and its learning-rate schedule."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save, what to keep, where to go on from."""
    log: LogConfig = LogConfig()
    """What is written while training."""
    profile: ProfileConfig = ProfileConfig()
    """Where memory and time go, in chosen steps of a run; nothing is recorded unless asked for."""

    @property
    def cache_dir(self) -> str:
        """Where tokenised data are kept: data.cache_dir, or run.dir/cache."""
        return self.data.cache_dir or f"{self.run.dir}/cache"

    @model_validator(mode="after")
    def _sections_agree(self) -> "Config":
        steps, warmup = self.train.num_steps, self.optim.warmup_steps
        no_peak = steps is not None and warmup is not None and warmup >= steps
        no_cuda = self.run.device == "cpu" and self.attention.needs_cuda
        can_offload = self.run.precision == "bf16" and self.parallel.distributed_optimizer
        best, sets = self.checkpoint.best, self.data.eval_sets
        no_set = best is not None and best[0] not in sets
        cut_experts = self.train.mlp_tile is not None and self.model.moe.num_experts is not None
        fp8 = self.run.fp8 is not None
        refuse(
            (
                cut_experts,
                "train.mlp_tile",
                "is for dense models: experts are balanced over whole documents.  recompute = selective takes all "
                "tokens at once",
            ),
            (
                no_set,
                "checkpoint.keep_best",
                f"names no held-out set; data.eval has {', '.join(sets) or 'none'}",
            ),
            (
                no_peak,
                "optim.warmup_steps",
                f"must be below train.num_steps = {steps}; lower one, raise the other",
            ),
            (
                self.optim.offload_fraction > 0.0 and not can_offload,
                "optim.offload_fraction",
                "needs run.precision = bf16 and parallel.distributed_optimizer = true, the only ones whose weights "
                "megatron-core's hybrid optimizer updates in full; set those, or offload_fraction = 0",
            ),
            (no_cuda, "attention.backend", "needs CUDA, and run.device is cpu; use portable or auto"),
            (fp8 and self.train.mlp_tile is not None, "train.mlp_tile", "is not built for fp8; use run.fp8 = null"),
            (fp8 and self.run.device == "cpu", "run.fp8", "needs CUDA, and run.device is cpu; use null"),
            (
                fp8 and self.run.precision == "fp32",
                "run.fp8",
                "stands beside bf16, and run.precision is fp32; use bf16",
            ),
            (
                fp8 and not self.attention.may_have_fp8,
                "run.fp8",
                "is Transformer Engine's, and attention.backend is portable; use te or auto, or null",
            ),
        )
        return self
