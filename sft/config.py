"""Every knob, its type, its default and what it does.

Decides what a recipe may say and which single values and combinations of values are wrong by themselves.
Does not read files (`recipe.py`), and does not know the number of GPUs (`layout.py`).
All models are frozen: nothing is ever written back into a config.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Path = Annotated[str, StringConstraints(min_length=1)]
Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


# Switches and numbers of YAML 1.1 and Python that YAML 1.2 reads as text: yes, off, None, 010, 1_000, 1:30.
_LOOKALIKE = re.compile(r"(?i:y|n|yes|no|on|off|none|true|false)|[-+]?[0-9][0-9_:.xobA-Fa-f]*")


class Conflict(ValueError):
    """Values that cannot be together, one (field, reason) per problem.  `recipe.py` adds file and line."""

    def __init__(self, problems: Iterable[tuple[str, str]]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{field}: {reason}" for field, reason in self.problems))


def _refuse(*cases: tuple[bool, str, str]) -> None:
    """Raise one Conflict for all cases (is wrong, field, reason) that are wrong."""
    wrong = [(field, reason) for is_wrong, field, reason in cases if is_wrong]
    if wrong:
        raise Conflict(wrong)


class Section(BaseModel):
    """A frozen, strict group of keys: unknown keys, wrong types, infinities and NaN are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class RunConfig(Section):
    dir: Path
    """Folder of this run: recipe.yaml, data.json, metrics.jsonl, tensorboard/, checkpoints/.  One run, one folder."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto takes CUDA where torch sees it.  The CPU runs every parallelism, on gloo."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16 keeps main parameters and gradients in fp32.  fp32 is for proofs and CPU runs."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1234
    """Seeds initial weights and the order of the data."""
    timeout_s: Positive = 1800
    """Seconds a rank may wait for another, also while rank 0 tokenises; `sft data prepare` does that beforehand."""


class RopeConfig(Section):
    base: Annotated[float, Field(gt=1.0)] = 10000.0
    """Base period (theta) of the rotary embedding."""
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """How frequencies are changed for contexts beyond `original_max_position`."""
    factor: Annotated[float, Field(ge=1.0)] = 1.0
    """Context extension factor: above 1 with any scaling, 1 with none."""
    original_max_position: Positive | None = None
    """Context length the model was trained with before scaling; required by llama3 and yarn."""
    low_freq_factor: Annotated[float, Field(gt=0.0)] = 1.0
    """llama3: wavelengths above original_max_position / low_freq_factor are fully scaled."""
    high_freq_factor: Annotated[float, Field(gt=0.0)] = 4.0
    """llama3: wavelengths below original_max_position / high_freq_factor are not scaled."""
    beta_fast: Annotated[float, Field(gt=0.0)] = 32.0
    """yarn: dimensions turning more often than this over the original context are not scaled."""
    beta_slow: Annotated[float, Field(gt=0.0)] = 1.0
    """yarn: dimensions turning less often than this over the original context are fully scaled."""
    attention_factor: Annotated[float, Field(gt=0.0)] | None = None
    """yarn: temperature on queries and keys; null means 0.1 ln(factor) + 1."""

    @model_validator(mode="after")
    def _scaling_is_complete(self) -> "RopeConfig":
        plain = self.scaling == "none"
        unused, missing = plain and self.factor != 1.0, not plain and self.factor == 1.0
        bare = self.original_max_position is None and self.scaling in ("llama3", "yarn")
        high_first = self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor
        slow_first = self.scaling == "yarn" and self.beta_fast <= self.beta_slow
        _refuse(
            (unused, "factor", "has no effect with scaling = none; use linear, llama3 or yarn"),
            (missing, "factor", f"must be above 1 for {self.scaling} scaling"),
            (bare, "original_max_position", f"is the context before scaling; {self.scaling} needs it"),
            (high_first, "high_freq_factor", f"must be above low_freq_factor = {self.low_freq_factor}"),
            (slow_first, "beta_fast", f"must be above beta_slow = {self.beta_slow}"),
        )
        return self


class ModelConfig(Section):
    num_layers: Positive
    """Transformer layers."""
    hidden_size: Positive
    """Width of the residual stream."""
    ffn_hidden_size: Positive
    """Width of the SwiGLU MLP."""
    num_attention_heads: Positive
    """Query heads."""
    num_query_groups: Positive | None = None
    """Key/value heads (GQA); null means as many as query heads."""
    head_dim: Positive | None = None
    """Width of a head; null means hidden_size / num_attention_heads."""
    vocab_size: Positive | None = None
    """Rows of the embedding that are real tokens; null means the tokenizer's size."""
    norm_epsilon: Annotated[float, Field(gt=0.0)] = 1e-5
    """Epsilon inside RMSNorm."""
    qk_norm: bool = False
    """RMSNorm on queries and keys, per head (Qwen3)."""
    qkv_bias: bool = False
    """Bias on the query, key and value projections (Qwen2)."""
    tie_embeddings: bool = False
    """Output weight is the input embedding."""
    init_std: Annotated[float, Field(gt=0.0)] = 0.02
    """Standard deviation of random initial weights."""
    rope: RopeConfig = RopeConfig()
    """Rotary position embedding."""
    init_from: Path | None = None
    """Megatron checkpoint folder whose weights start this run; null means random weights."""
    megatron: dict[str, bool | int | float | str | list[str] | None] = {}
    """Further fields of megatron-core's TransformerConfig, by name."""

    @model_validator(mode="after")
    def _heads_fit(self) -> "ModelConfig":
        heads, groups, width = self.num_attention_heads, self.resolved_query_groups, self.resolved_head_dim
        uneven = self.head_dim is None and self.hidden_size % heads != 0
        odd = width % 2 == 1 and not uneven
        fitting = ", ".join(str(size) for size in divisors(heads))
        _refuse(
            (uneven, "num_attention_heads", f"does not divide hidden_size {self.hidden_size}; set head_dim"),
            (odd, "head_dim", f"makes heads of width {width}, which cannot be rotated; make it even"),
            (heads % groups != 0, "num_query_groups", f"does not divide {heads} heads; use one of {fitting}"),
        )
        return self

    @model_validator(mode="after")
    def _megatron_values_are_meant(self) -> "ModelConfig":
        # Text to YAML 1.2, a switch or a number to whoever wrote it; to Python the text "off" is true.
        meant = "is read as text; write true, false, null or a plain decimal number"
        texts = {name: value for name, value in self.megatron.items() if isinstance(value, str)}
        _refuse(*((bool(_LOOKALIKE.fullmatch(text)), f"megatron.{name}", meant) for name, text in texts.items()))
        return self

    @property
    def resolved_head_dim(self) -> int:
        """Width of a head: `head_dim`, or hidden_size / num_attention_heads."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def resolved_query_groups(self) -> int:
        """Key/value heads: `num_query_groups`, or as many as query heads."""
        return self.num_query_groups or self.num_attention_heads


class SourceConfig(Section):
    files: list[Path] = Field(min_length=1)
    """Files of this source.  A single path is a list of one."""
    weight: Annotated[float, Field(gt=0.0)] | None = None
    """Share of an epoch's tokens, beside those of all sources; the epoch is as long as no sample needs be left out."""
    epochs: Annotated[float, Field(gt=0.0)] | None = None
    """How often an epoch sees this source: 2.5 is twice, and half of it a third time.  Instead of weights."""


class DataConfig(Section):
    train: Annotated[list[Path], Field(min_length=1)] | Annotated[dict[Word, SourceConfig], Field(min_length=1)]
    """Training files: JSONL, JSON or parquet with a `messages` column; or named sources: {chat: {files: a.jsonl}}."""
    eval: list[Path] | dict[Name, Path | list[Path]] = []
    """Held-out files, evaluated through the same packed path; {chat: a.jsonl, code: [b.jsonl, c.jsonl]} apart."""
    tokenizer: Path = "byte"
    """byte (built in, no file) or a Hugging Face tokenizer folder."""
    chat_template: Path | None = None
    """Jinja file that replaces the tokenizer's own chat template."""
    supervise: Literal["assistant", "last", "all"] = "assistant"
    """What is learned: the assistant's turns, its last turn only, or every token.  See docs/masks.md."""
    seq_length: Positive
    """Capacity of a pack in tokens, before context parallelism; also the longest sample."""
    doc_multiple: Positive = 32
    """Documents are padded to a multiple of this; must be divisible by 2 * cp.  32 serves cp up to 16."""
    over_long: Literal["error", "drop", "cut_turns", "windows"] = "error"
    """A sample longer than seq_length: stop, leave it out, keep its first turns, or make several of it.  Counted."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be used: stop with its name, or leave it out and list it, a tenth of a file at most."""
    pad_to_seq_length: bool = False
    """Fill every pack to seq_length, so that all microbatches have one shape."""
    shuffle: bool = True
    """Draw a new order of the samples every epoch."""
    num_workers: Positive | Literal["auto"] = "auto"
    """Processes that tokenise; auto means one per core, 32 at most.  The result does not depend on it."""
    cache_dir: Path | None = None
    """Where tokenised data is kept; null means run.dir/cache."""
    plan: Path | None = None
    """Plan to follow, written by `sft data plan --write`; null makes one from the data, seed and sizes."""

    @property
    def sources(self) -> dict[str, SourceConfig]:
        """The named sources; none where `train` is a list of files."""
        return self.train if isinstance(self.train, dict) else {}

    @property
    def train_keys(self) -> dict[str, list[str]]:
        """Training files by the key that names them: data.train, or data.train.chat.files and so on."""
        if isinstance(self.train, list):
            return {"data.train": self.train}
        return {f"data.train.{name}.files": source.files for name, source in self.train.items()}

    @property
    def train_files(self) -> list[str]:
        """Files of all sources, in their order."""
        return [file for files in self.train_keys.values() for file in files]

    @property
    def train_names(self) -> list[str] | None:
        """Of each of these files the source it belongs to; None where sources have no names."""
        return [name for name, source in self.sources.items() for _ in source.files] or None

    @property
    def eval_sets(self) -> dict[str, list[str]]:
        """Files of each held-out set; a set without a name is called eval."""
        if isinstance(self.eval, list):
            return {"eval": self.eval} if self.eval else {}
        return {name: [files] if isinstance(files, str) else files for name, files in self.eval.items()}

    @model_validator(mode="after")
    def _sources_are_shared_out_in_one_way(self) -> "DataConfig":
        weighted = [name for name, source in self.sources.items() if source.weight is not None]
        counted = [name for name, source in self.sources.items() if source.epochs is not None]
        cases = []
        for name in self.sources:
            if weighted and name in counted:
                why = f"cannot be with the weight of {weighted[0]}; give weights to all sources, or epochs to all"
                cases.append((True, f"train.{name}.epochs", why))
            elif (weighted or counted) and name not in weighted + counted:
                key, other = ("weight", weighted[0]) if weighted else ("epochs", counted[0])
                why = f"stands beside the {key} of {other}; give {key.removesuffix('s')}s to all sources, or to none"
                cases.append((True, f"train.{name}.{key}", why))
        _refuse(*cases)
        return self

    @model_validator(mode="after")
    def _eval_sets_have_files(self) -> "DataConfig":
        empty = [name for name, files in self.eval_sets.items() if not files]
        _refuse((bool(empty), "eval", f"names {', '.join(empty)} without a file; give it one, or leave it out"))
        return self


class ParallelConfig(Section):
    tp: Positive = 1
    """Tensor-parallel size."""
    cp: Positive = 1
    """Context-parallel size: every document is spread over this many ranks (zigzag)."""
    pp: Positive = 1
    """Pipeline-parallel size."""
    virtual_stages: Positive = 1
    """Model chunks per pipeline rank (interleaved schedule); needs pp > 1."""
    sequence_parallel: bool = True
    """With tp > 1: norms and residuals are split over tp along tokens.  No effect with tp = 1."""
    distributed_optimizer: bool = True
    """Shard optimizer states over dp x cp."""
    overlap: bool = True
    """Overlap gradient reduction with compute (CUDA only)."""
    cp_comm: Literal["p2p", "all_gather", "a2a"] = "p2p"
    """How Transformer Engine moves keys and values over cp (not yet run on GPUs); portable always all-gathers."""

    @model_validator(mode="after")
    def _virtual_stages_need_a_pipeline(self) -> "ParallelConfig":
        flat = self.virtual_stages > 1 and self.pp == 1
        _refuse((flat, "virtual_stages", "needs pp > 1; got pp = 1.  Raise pp, or leave virtual_stages at 1"))
        return self


class AttentionConfig(Section):
    backend: Literal["auto", "te", "portable"] = "auto"
    """te is Transformer Engine (CUDA); portable is plain torch and runs anywhere, cp included."""


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
        _refuse((useless, "chunk_size", "does nothing with impl = full; use null, or impl = fused or chunked"))
        return self


class TrainConfig(Section):
    num_steps: Positive | None = None
    """Optimizer updates; give this or num_epochs."""
    num_epochs: Positive | None = None
    """Passes over the data; give this or num_steps."""
    global_batch_size: Positive
    """Packs per optimizer step, over all data-parallel ranks."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in backward: none, the MLP (te: and norms; not attention), or whole layers."""
    eval_every: Positive | None = None
    """Steps between evaluations; null means before the first step and at the end only."""

    @model_validator(mode="after")
    def _one_length(self) -> "TrainConfig":
        steps, epochs = self.num_steps, self.num_epochs
        neither, both = steps is None and epochs is None, steps is not None and epochs is not None
        _refuse(
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

    @model_validator(mode="after")
    def _schedule_is_possible(self) -> "OptimConfig":
        steps, fraction = self.warmup_steps, self.warmup_fraction
        twice = steps is not None and fraction is not None
        unused = self.schedule == "constant" and self.min_lr > 0.0
        too_long = self.schedule == "wsd" and (fraction or 0.0) + self.wsd_decay_fraction > 1.0
        _refuse(
            (twice, "warmup_fraction", f"clashes with warmup_steps = {steps}; give one of them"),
            (self.min_lr > self.lr, "min_lr", f"is above the peak, lr = {self.lr}"),
            (unused, "min_lr", "has no effect with schedule = constant; use another, or min_lr = 0"),
            (too_long, "wsd_decay_fraction", f"and warmup_fraction = {fraction} together exceed the run"),
        )
        return self


class CheckpointConfig(Section):
    resume: Path = "auto"
    """auto goes on from the run's newest checkpoint, must insists on one, never starts anew; or a folder."""
    save_every: Positive | None = None
    """Steps between checkpoints; null means only after the last step."""
    save_last: bool = True
    """Save after the last step."""
    keep_last: Annotated[int, Field(ge=2)] | None = None
    """Checkpoints kept, at least 2 (the newest may be the one being written); null keeps all."""


class LogConfig(Section):
    every: Positive = 1
    """Steps between lines on the console; metrics.jsonl and TensorBoard get every step."""
    tensorboard: bool = True
    """Write TensorBoard events to run.dir/tensorboard."""
    wandb: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Project at Weights & Biases to log to; the rest is said by WANDB_* variables.  null logs nothing there."""
    position_edges: list[Positive] = [4096, 16384, 65536]
    """Loss is told apart by position in the document: below the first edge, between two, from the last on."""
    peak_tflops: Annotated[float, Field(gt=0.0)] | None = None
    """Dense peak of one GPU in the run's precision (H100 SXM bf16: 989), for MFU; null leaves MFU out."""

    @model_validator(mode="after")
    def _edges_increase(self) -> "LogConfig":
        edges = self.position_edges
        wrong = edges != sorted(set(edges))
        _refuse((wrong, "position_edges", "must increase, as in [4096, 16384]"))
        return self


Steps = Annotated[list[Positive], Field(min_length=1)]
Ranks = Literal["all", "stage"] | Annotated[list[NonNegative], Field(min_length=1)]


class MemoryProfile(Section):
    steps: Steps | None = None
    """Steps, the first is 1, after which every chosen rank writes its CUDA memory history; null records none."""
    max_entries: Positive = 100000
    """Newest allocations and frees that a rank keeps in mind; several KB each with their stacks."""
    ranks: Ranks = "all"
    """Who records: all, one rank per pipeline stage (dp, cp and tp 0), or ranks by number."""

    @model_validator(mode="after")
    def _chosen(self) -> "MemoryProfile":
        _refuse(*_badly_chosen(self.steps, self.ranks))
        unused = self.steps is None and self.max_entries != 100000
        _refuse((unused, "max_entries", "has no effect without steps; name some"))
        return self


class TorchProfile(Section):
    steps: Steps | None = None
    """Steps, the first is 1, of which every chosen rank writes a Chrome trace; null traces none."""
    ranks: Ranks = "all"
    """Who traces: all, one rank per pipeline stage (dp, cp and tp 0), or ranks by number."""

    @model_validator(mode="after")
    def _chosen(self) -> "TorchProfile":
        _refuse(*_badly_chosen(self.steps, self.ranks))
        return self


def _badly_chosen(steps: list[int] | None, ranks: str | list[int]) -> list[tuple[bool, str, str]]:
    """Cases for `_refuse`: something named twice, or ranks that nothing is recorded on."""
    cases = [(steps is None and ranks != "all", "ranks", "has no effect without steps; name some")]
    for field, numbers in (("steps", steps), ("ranks", ranks)):
        if isinstance(numbers, list):
            twice = [number for i, number in enumerate(numbers) if number in numbers[:i]]
            cases += [(True, field, f"names {number} twice; name it once") for number in twice[:1]]
    return cases


class ProfileConfig(Section):
    memory: MemoryProfile = MemoryProfile()
    """CUDA memory history, for torch's viewer; see docs/profiling.md."""
    torch: TorchProfile = TorchProfile()
    """Chrome traces of torch.profiler, for ui.perfetto.dev."""

    @model_validator(mode="after")
    def _one_instrument_per_step(self) -> "ProfileConfig":
        both = sorted(set(self.memory.steps or ()) & set(self.torch.steps or ()))
        why = (
            f"shares step {', '.join(map(str, both))} with profile.memory.steps, and each would distort the other: "
            "recording stacks slows the launches that are traced, and the profiler allocates.  Choose other steps"
        )
        _refuse((bool(both), "torch.steps", why))
        return self


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

    @model_validator(mode="after")
    def _sections_agree(self) -> "Config":
        steps, warmup = self.train.num_steps, self.optim.warmup_steps
        no_peak = steps is not None and warmup is not None and warmup >= steps
        no_cuda = self.run.device == "cpu" and self.attention.backend == "te"
        _refuse(
            (
                no_peak,
                "optim.warmup_steps",
                f"must be below train.num_steps = {steps}; lower one, raise the other",
            ),
            (no_cuda, "attention.backend", "needs CUDA, and run.device is cpu; use portable or auto"),
        )
        return self


def divisors(number: int, limit: int = 4096) -> list[int]:
    """divisors(12) -> [1, 2, 3, 4, 6, 12]; none above `limit`, which no parallel size reaches."""
    return [size for size in range(1, min(number, limit) + 1) if number % size == 0]


def listed(problems: Sequence[str]) -> str:
    """One message for all: the first line stands by itself, the others follow as a list."""
    if len(problems) == 1:
        return problems[0]
    return "\n  ".join(f"{i} of {len(problems)}: {problem}" for i, problem in enumerate(problems, 1))
