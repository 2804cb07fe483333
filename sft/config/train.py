"""Keys of training: the parallel layout, loss, steps, optimizer and checkpoints."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from sft.config.section import Fraction, NonNegative, Path, Positive, Section, divisors, refuse

# Metrics of held-out sets that tell a better checkpoint from a worse one.
LOWER_IS_BETTER = {"lm loss": True, "sample loss": True, "perplexity/avg": True, "token accuracy": False}


class ParallelConfig(Section):
    tp: Positive = 1
    """Tensor-parallel size."""
    cp: Positive = 1
    """Context-parallel size: every document is spread over this many ranks (zigzag)."""
    pp: Positive = 1
    """Pipeline-parallel size."""
    ep: Positive = 1
    """Expert-parallel size: experts are spread over this many of the tp x cp x dp ranks of a pipeline stage."""
    etp: Positive = 1
    """Expert-tensor-parallel size: each expert is split over this many ranks."""
    virtual_stages: Positive = 1
    """Model chunks per pipeline rank (interleaved schedule); needs pp > 1."""
    sequence_parallel: bool = True
    """With tp > 1: norms and residuals are split over tp along tokens.  No effect with tp = 1."""
    distributed_optimizer: bool = True
    """Shard optimizer states over dp x cp, those of an expert over the ranks that hold it."""
    overlap: bool = True
    """Overlap gradient reduction with compute (CUDA only)."""
    cp_comm: Literal["p2p", "all_gather", "a2a", "a2a+p2p"] = "p2p"
    """How Transformer Engine moves keys and values over cp (not yet run on GPUs); portable always all-gathers."""
    cp_a2a: Positive | None = None
    """With a2a+p2p: how many neighbouring cp ranks exchange heads (a2a); between such groups goes the ring (p2p)."""

    @model_validator(mode="after")
    def _virtual_stages_need_a_pipeline(self) -> "ParallelConfig":
        flat = self.virtual_stages > 1 and self.pp == 1
        refuse((flat, "virtual_stages", "needs pp > 1; got pp = 1.  Raise pp, or leave virtual_stages at 1"))
        return self

    @model_validator(mode="after")
    def _two_levels_need_two_sizes(self) -> "ParallelConfig":
        two, size = self.cp_comm == "a2a+p2p", self.cp_a2a
        fitting = [size for size in divisors(self.cp) if 1 < size < self.cp]
        choices = f"sizes that fit: {', '.join(map(str, fitting))}" if fitting else "none fits; use p2p or a2a"
        refuse(
            (two and size is None, "cp_a2a", f"is needed with cp_comm = a2a+p2p; for cp = {self.cp}, {choices}"),
            (not two and size is not None, "cp_a2a", f"is for cp_comm = a2a+p2p; got {self.cp_comm}.  Use null"),
            (
                two and size is not None and size not in fitting,
                "cp_a2a",
                f"must divide cp = {self.cp} into two factors above 1, and {size} does not; {choices}",
            ),
        )
        return self


class LossConfig(Section):
    impl: Literal["fused", "chunked", "full"] = "fused"
    """fused never builds the logits and projects supervised rows only; full is megatron-core's own."""
    chunk_size: Positive | None | Literal["auto"] = "auto"
    """Rows taken at once: supervised ones (fused) or all (chunked).  auto means 4096 and 1024; null all of them."""
    reduction: Literal["token", "sample", "sqrt"] = "token"
    """Weight of each of a sample's n supervised tokens: 1, 1 / n (every sample counts the same) or 1 / sqrt(n)."""
    denominator: Literal["weights", "tokens"] = "weights"
    """What the weighted sum over the global batch is divided by: the sum of weights, or the supervised tokens."""
    z_loss_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Adds this times the squared log-sum-exp of the scores, which keeps them from drifting; 1e-4 is usual."""
    entropy_coef: float = 0.0
    """Takes this times the entropy off the loss: above 0 for flatter predictions, below 0 for sharper ones."""
    entropy: bool = False
    """Log the mean entropy over supervised tokens, also where entropy_coef is 0; without gradient then."""

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


class TrainConfig(Section):
    num_steps: Positive | None = None
    """Optimizer updates; give this or num_epochs."""
    num_epochs: Positive | None = None
    """Passes over the data; give this or num_steps."""
    global_batch_size: Positive
    """Packs per optimizer step, over all data-parallel ranks."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in backward: none; norms and the MLP or experts (selective); or whole layers."""
    mlp_tile: Positive | None = None
    """Tokens of a rank that the MLP takes at once, which is then computed again in backward; null takes all."""
    offload_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of a rank's layers, the first ones, whose activations wait in host memory; needs recompute."""
    eval_every: Positive | None = None
    """Steps between evaluations; null means before the first step and at the end only."""
    max_bad_steps: NonNegative = 2
    """Steps in a row that may be skipped because a loss or gradient is not a number; one more ends the run."""

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
        twice = steps is not None and fraction is not None
        unused = self.schedule == "constant" and self.min_lr > 0.0
        too_long = self.schedule == "wsd" and (fraction or 0.0) + self.wsd_decay_fraction > 1.0
        refuse(
            (twice, "warmup_fraction", f"clashes with warmup_steps = {steps}; give one of them"),
            (self.min_lr > self.lr, "min_lr", f"is above the peak, lr = {self.lr}"),
            (unused, "min_lr", "has no effect with schedule = constant; use another, or min_lr = 0"),
            (too_long, "wsd_decay_fraction", f"and warmup_fraction = {fraction} together exceed the run"),
        )
        return self


class CheckpointConfig(Section):
    resume: Path = "auto"
    """auto goes on from the run's newest checkpoint, must insists on one, never starts anew; or a folder."""
    verify: Literal["off", "size", "full"] = "full"
    """What is compared with the manifest before a checkpoint is loaded: nothing, sizes, or every byte (SHA-256)."""
    allow_changes: list[str] = []
    """Keys that may differ from the run that wrote the checkpoint although that makes another run: [run.seed, data]."""
    save_every: Positive | None = None
    """Steps between checkpoints; null means only after the last step."""
    save_every_minutes: Annotated[float, Field(gt=0.0)] | None = None
    """Also after the first step that ends this long after the last save."""
    save_last: bool = True
    """Save after the last step."""
    async_save: bool = False
    """Training waits for a copy in memory only, and goes on while that is written; needs the memory for it."""
    keep_last: Annotated[int, Field(ge=2)] | None = None
    """Checkpoints kept, at least 2 (the newest may turn out damaged); null keeps all."""
    keep_every: Positive | None = None
    """Checkpoints of the multiples of this many steps stay whatever keep_last says."""
    keep_best: str | None = None
    """The best one stays too: SET/METRIC such as eval/lm loss, of a held-out set evaluated when it was saved."""

    @property
    def best(self) -> tuple[str, str] | None:
        """(held-out set, metric) of keep_best."""
        if self.keep_best is None:
            return None
        name, _, metric = self.keep_best.partition("/")
        return name, metric

    @model_validator(mode="after")
    def _keeping_is_possible(self) -> "CheckpointConfig":
        useless = self.keep_last is None and (self.keep_every is not None or self.keep_best is not None)
        kept = "keep_every" if self.keep_every is not None else "keep_best"
        unknown = self.best is not None and self.best[1] not in LOWER_IS_BETTER
        refuse(
            (useless, kept, "has no effect while keep_last is null, which keeps all; set keep_last, 2 or more"),
            (unknown, "keep_best", f"is not SET/METRIC with a metric of {', '.join(LOWER_IS_BETTER)}"),
        )
        return self
