"""Keys of training: length, batch size, memory savings, the loss head, the optimizer and its learning-rate schedule."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from sft.config.distill import DistillConfig
from sft.config.muon import MuonConfig
from sft.config.param_group import ParamGroup
from sft.config.section import Fraction, NonNegative, Positive, Section

FP32 = 4  # bytes of an element
BF16 = 2
INT8_BLOCK = 64  # elements of an int8 moment that share a scale in fp32
Recompute = Literal["none", "selective", "attention_kept", "full"]  # by rising recomputation
MtpMode = Literal["off", "detached", "joint"]


def repeats_layers(recompute: Recompute) -> bool:
    """Whether backward computes whole layers again, with or without attention."""
    return recompute in ("attention_kept", "full")


class TrainConfig(Section):
    num_steps: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Optimizer steps of the run.  Give num_steps or num_epochs."""
    num_epochs: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Passes over the data.  Give num_steps or num_epochs."""
    global_batch_size: Positive
    """Packs per optimizer step, over all data-parallel ranks."""
    recompute: Recompute = "none"
    """What backward recomputes.  none: nothing.  selective: norms, MLP or experts, linear attention.  attention_kept:
    all but softmax attention.  full: whole layers."""
    mlp_tile: Positive | None = None
    """Tokens for which the MLP is computed, and recomputed, at one time; null: all tokens."""
    head_chunks: Positive | None = None
    """Number of chunks of heads for which softmax attention and its projections are computed one after another; null:
    one."""
    offload_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of a rank's layers, from the first on, whose activations are offloaded to the host; needs recompute."""
    freeze: list[str] = []
    """Weights that are not trained, by Hugging Face's names: embed_tokens, or patterns such as model.layers.1?.*."""
    mtp: MtpMode = "off"
    """Block for multi-token prediction.  off: passed through.  detached: trained alone.  joint: trained with the
    model."""
    mtp_loss_weight: Annotated[float, Field(gt=0.0)] = 0.1
    """Weight of the loss of multi-token prediction in the objective."""
    eval_every: Positive | None = None
    """Steps between evaluations; null: only before the first step and at the end."""
    max_nonfinite_steps: NonNegative = 2
    """Consecutive non-finite steps that the run may skip; one more ends the run."""

    @property
    def repeats_attention(self) -> bool:
        """Whether backward computes the attention of all layers again."""
        return self.recompute == "full"

    @property
    def repeats_layers(self) -> bool:
        """Whether backward computes whole layers again, with or without attention."""
        return repeats_layers(self.recompute)

    @property
    def repeats_parts(self) -> bool:
        """Whether backward computes layers or parts of them again."""
        return self.recompute != "none" or self.mlp_tile is not None

    def conflicts(self) -> Iterator[tuple[str, str]]:
        steps, epochs = self.num_steps, self.num_epochs
        if self.offload_fraction > 0.0 and self.recompute == "none":
            yield "offload_fraction", (
                "needs recompute = selective, attention_kept or full: without, layers save too much to copy"
            )
        if steps is None and epochs is None:
            yield "num_steps", "and num_epochs = null; give one of them"
        if steps is not None and epochs is not None:
            yield "num_epochs", f"clashes with num_steps = {steps}; set one of them to null"
        if self.mtp == "off" and "mtp_loss_weight" in self.changed:
            yield "mtp_loss_weight", "has no effect with train.mtp = off; use mtp = detached or joint, or leave it out"


class LossConfig(Section):
    impl: Literal["fused", "chunked", "full"] = "fused"
    """Logits that exist at one time.  fused: of a chunk of supervised tokens.  chunked: of a chunk of all tokens.
    full: all, by megatron-core."""
    chunk_size: Positive | None | Literal["auto"] = "auto"
    """Tokens of a chunk.  auto: 4096 (fused) or 1024 (chunked).  null: one chunk."""
    reduction: Literal["token", "sample", "sqrt"] = "token"
    """Weight of each supervised token of a sample with n of them: 1, 1 / n or 1 / sqrt(n)."""
    shared: Literal["each", "once"] = "each"
    """How often a token counts that several texts of a tree supervise (data.turns, completions).  each: once for each
    text, as if texts were separate samples.  once: for the first text only, also in a tree that is split."""
    denominator: Literal["weights", "tokens"] = "weights"
    """Divisor of the weighted sum of losses of the global batch: the sum of weights, or the number of supervised
    tokens."""
    z_loss_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Coefficient of the z-loss (squared log-sum-exp of the logits), which keeps logits small; 1e-4 is usual."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy, which is subtracted from the loss: above 0 flattens predictions, below 0 sharpens
    them."""
    entropy: bool = False
    """Log the mean entropy of supervised tokens, without a gradient, even if entropy_coef is 0."""
    distill: DistillConfig = DistillConfig()
    """Learning from a teacher's distributions of the next token, which the data have (docs/concepts/distill.md)."""

    @property
    def weighing(self) -> str:
        """The settings that decide the weights of tokens, as text."""
        return f"loss.reduction = {self.reduction}, loss.shared = {self.shared}"

    @property
    def measures_entropy(self) -> bool:
        return self.entropy or self.entropy_coef != 0.0

    def chunk(self, num_rows: int) -> int:
        """The number of rows of a chunk if the logits have `num_rows` rows; at least 1."""
        size = {"fused": 4096, "chunked": 1024}.get(self.impl) if self.chunk_size == "auto" else self.chunk_size
        return max(1, num_rows if size is None else min(size, num_rows))

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.impl == "full" and self.chunk_size not in ("auto", None):
            yield "chunk_size", "has no effect with impl = full; use null, or impl = fused or chunked"


@dataclass(frozen=True)
class OptimizerStates:
    """The states that an optimizer keeps for each parameter that it updates, for the estimate and for checkpoints.

    moments: names of the states in torch's optimizer
    bytes_each: bytes that each of them takes for a parameter
    stored_each: bytes that each of them takes for a parameter in a checkpoint
    `mcore/optimizer` runs the optimizer.
    """

    moments: tuple[str, ...]
    bytes_each: float = FP32
    stored_each: int = FP32

    @property
    def moment_bytes(self) -> float:
        return self.bytes_each * len(self.moments)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the moments of a parameter in a checkpoint."""
        return self.stored_each * len(self.moments)

    @property
    def host_bytes(self) -> float:
        """Bytes per parameter in host memory: a weight, the moments, and the gradient in transfer."""
        return self.moment_bytes + 2 * FP32

    @property
    def moved_bytes(self) -> float:
        """Bytes per parameter that an update moves: it reads gradient, weight and moments, and writes weight and
        moments."""
        return 2 * (self.moment_bytes + FP32) + FP32


ADAM = OptimizerStates(("exp_avg", "exp_avg_sq"))
MUON = OptimizerStates(("momentum_buffer",))
# Bytes of a moment of a parameter, in memory and in a checkpoint, which holds the values of int8 moments in fp32.
_MOMENT_BYTES = {"fp32": (FP32, FP32), "bf16": (BF16, BF16), "int8": (1 + FP32 / INT8_BLOCK, FP32)}


class OptimConfig(Section):
    name: Literal["adamw", "muon"] = "adamw"
    """Optimizer.  muon: for the matrices of layers and for factors of LoRA; AdamW updates embedding, output weight,
    norms, biases, routers and convolutions."""
    lr: Annotated[float, Field(gt=0.0)]
    """Peak learning rate: often 1e-5 for all weights, and 2e-4 for LoRA."""
    min_lr: Annotated[float, Field(ge=0.0)] = 0.0
    """Learning rate at the last step (all schedules but constant)."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Learning rate after warm-up.  wsd: the peak, then a decay over the last wsd_decay_fraction of the run."""
    warmup_steps: NonNegative | None = None
    """Steps of linear warm-up.  Give warmup_steps or warmup_fraction; without both there is no warm-up."""
    warmup_fraction: Fraction | None = None
    """Linear warm-up as a fraction of all steps."""
    wsd_decay_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """Fraction of all steps, at the end of the run, in which wsd decays."""
    wsd_decay: Literal["linear", "cosine", "minus_sqrt"] = "linear"
    """Shape of this decay.  minus_sqrt: 1 minus the square root of the share of it that is done."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Decoupled weight decay, except of biases and norms."""
    groups: list[ParamGroup] = []
    """Parameters with a learning rate or a weight decay of their own, by Hugging Face's names as in train.freeze:
    {params: [embed_tokens], lr_ratio: 0.1, weight_decay: 0.0}.  A name is in one group at most."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay of Adam's first moment."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Decay of Adam's second moment."""
    epsilon: Annotated[float, Field(gt=0.0)] = 1e-8
    """Adam's epsilon."""
    muon: MuonConfig = MuonConfig()
    """Settings of optim.name = muon."""
    clip_grad: Annotated[float, Field(ge=0.0)] = 1.0
    """Maximum gradient norm; 0: no clipping."""
    offload_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of Adam's states in host memory (16 bytes per parameter); needs bf16 and distributed_optimizer."""
    moments: Literal["fp32", "bf16", "int8"] = "fp32"
    """Type of Adam's two moments.  bf16 and int8 (blocks of 64 with a scale) are rounded at random; 4 and 2.125 bytes
    per parameter instead of 8."""
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the gradients.  bf16 takes half the memory and messages, and rounds sums over ranks; needs one microbatch
    per step on each rank, and run.precision = bf16."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of the gradients of a step."""
        return BF16 if self.grad_dtype == "bf16" else FP32

    @property
    def optimizer(self) -> OptimizerStates:
        """The states that AdamW keeps for each parameter that it updates."""
        in_memory, stored = _MOMENT_BYTES[self.moments]
        return replace(ADAM, bytes_each=in_memory, stored_each=stored)

    @property
    def has_muon(self) -> bool:
        return self.name == "muon"

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if not self.has_muon and self.muon.changed:
            yield "muon", "has no effect with name = adamw; use name = muon, or leave it out"
        if self.has_muon and self.offload_fraction > 0.0:
            yield "offload_fraction", (
                "offloads the states of AdamW only: Muon orthogonalises on the device; use 0, or name = adamw"
            )
        if any(not group.model_fields_set & {"lr_ratio", "weight_decay"} for group in self.groups):
            yield "groups", "has a group that sets nothing; give it lr_ratio or weight_decay"
        steps, fraction = self.warmup_steps, self.warmup_fraction
        if steps is not None and fraction is not None:
            yield "warmup_fraction", f"clashes with warmup_steps = {steps}; give one of them"
        if self.moments != "fp32" and self.has_muon:
            yield "moments", "needs name = adamw: beside Muon, all moments are in fp32; use fp32, or name = adamw"
        if self.moments != "fp32" and self.offload_fraction > 0.0:
            yield "moments", f"clashes with offload_fraction = {self.offload_fraction}; moments on the host are in fp32"
        if self.min_lr > self.lr:
            yield "min_lr", f"is above the peak learning rate, lr = {self.lr}"
        if self.schedule == "constant" and self.min_lr > 0.0:
            yield "min_lr", "has no effect with schedule = constant; use another schedule, or min_lr = 0"
        if self.schedule != "wsd" and "wsd_decay" in self.changed:
            yield "wsd_decay", f"has no effect with schedule = {self.schedule}; use schedule = wsd, or leave it out"
        if self.schedule == "wsd" and (fraction or 0.0) + self.wsd_decay_fraction > 1.0:
            yield "wsd_decay_fraction", f"and warmup_fraction = {fraction} together exceed the run"
