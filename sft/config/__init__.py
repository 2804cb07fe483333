"""Defines every key of a recipe: its type, its default and its meaning.

This package decides which keys a recipe may have, and which values and combinations of values are errors.
`sft/recipe/load.py` reads files, and `sft/parallel/layout.py` checks the number of GPUs.  All models are frozen: no
code writes into a config.
"""

from collections.abc import Iterator

from pydantic import Field

from sft.config.attention import AttentionConfig
from sft.config.checkpoint import CheckpointConfig
from sft.config.data import DataConfig, Input, NamedDataset, RowsConfig, SourceConfig
from sft.config.lora import LoraConfig, conflicts_of_rows
from sft.config.low_bits import conflicts_of_base
from sft.config.megatron_fields import REDUCED_MATMUL
from sft.config.model import RANDOM, ModelConfig, RopeConfig
from sft.config.moe import MoeConfig
from sft.config.parallel import ParallelConfig
from sft.config.run import LogConfig, MemoryProfile, ProfileConfig, RunConfig, TorchProfile
from sft.config.section import UNREPORTED, Conflict, Section, divisors, listed
from sft.config.train import LossConfig, OptimConfig, TrainConfig


class Config(Section):
    """A whole recipe."""

    run: RunConfig
    """Folder, device, precision, seed and time limits of the run."""
    model: ModelConfig
    """A GPT with RMSNorm, SwiGLU, grouped-query attention and rotary positions."""
    data: DataConfig
    """Data files, tokenizer, supervision and packing.  Paths are relative to the current directory."""
    parallel: ParallelConfig = ParallelConfig()
    """world_size = tp * cp * pp * dp.  dp has no key: it is world_size / (tp * cp * pp)."""
    attention: AttentionConfig = AttentionConfig()
    """Backend that computes attention."""
    loss: LossConfig = LossConfig()
    """Implementation of the loss head, weights of tokens, and additional loss terms."""
    train: TrainConfig
    """Length of the run, global batch size, recompute and activation offload."""
    optim: OptimConfig
    """AdamW or Muon, and the learning-rate schedule."""
    lora: LoraConfig = LoraConfig()
    """LoRA: trains small factors beside frozen weights, if lora.rank is set."""
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), json_schema_extra=UNREPORTED)
    """Saving, deleting and loading of checkpoints."""
    log: LogConfig = Field(LogConfig(), json_schema_extra=UNREPORTED)
    """Console, TensorBoard, Weights & Biases, MLflow, trackio, Prometheus and metrics."""
    profile: ProfileConfig = Field(ProfileConfig(), json_schema_extra=UNREPORTED)
    """Memory history and traces of chosen steps.  By default nothing is recorded."""

    @property
    def cache_dir(self) -> str:
        """Folder of tokenised data: data.cache_dir, or run.dir/cache."""
        return self.data.cache_dir or f"{self.run.dir}/cache"

    @property
    def tokenizer(self) -> str:
        """data.tokenizer, else model.hf, else byte."""
        return self.data.tokenizer or self.model.hf or "byte"

    @property
    def auto_is_portable(self) -> str | None:
        """The reason why attention.backend = auto means portable, even where Transformer Engine could run; None: it
        does not."""
        if self.attention.backend == "auto" and self.attention.kernels is not None:
            return "attention.kernels names kernels of portable"
        if self.attention.backend == "auto" and self.data.turns == "each":
            return "data.turns = each gives documents a common beginning, which Transformer Engine cannot compute"
        if self.attention.backend == "auto" and self.train.head_chunks is not None:
            return "train.head_chunks needs portable"
        if self.attention.backend == "auto" and self.model.latent_attention.is_used:
            return "it saves and sends keys and values of all heads, not latents; attention.backend=te uses it"
        return None

    @property
    def local_modules_only(self) -> str | None:
        """The reason why Transformer Engine's modules cannot compute this model with this layout; None: they can."""
        etp = self.parallel.etp
        if self.model.base_dtype != "bf16" and self.model.moe.num_experts is not None:
            return (
                f"model.base_dtype = {self.model.base_dtype} dequantises experts by groups, and its experts need the "
                "matrices of a whole layer"
            )
        if not self.model.mlp_bias or self.model.moe.num_experts is None or etp == 1:
            return None
        return (
            f"its experts have the whole second bias (model.mlp_bias) on each rank of parallel.etp = {etp}, and the "
            f"sum over these ranks would have it {etp} times"
        )

    @property
    def _latents_without_kernel(self) -> str | None:
        latent = self.model.latent_attention
        if not latent.is_used or latent.has_te_kernel:
            return None
        return (
            "computes latent attention with keys of 192 and values of 128 numbers, or with multiples of 8 of at most "
            f"128, but this model has {latent.qk_head_dim} and {latent.v_head_dim}; use portable or auto"
        )

    @property
    def sums_head_in_forward(self) -> bool:
        """Whether the forward pass of the loss head completes the gradient of the output weight."""
        return self.loss.impl == "fused" and self.optim.grad_dtype == "fp32"

    @property
    def shares_latents(self) -> bool:
        """Whether layers with latent attention save latents, send them over cp, and expand them again in backward."""
        latent, heads = self.model.latent_attention, self.model.num_attention_heads // self.parallel.tp
        return latent.is_used and self.attention.may_be_portable and latent.sends_latent(heads)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        steps, warmup = self.train.num_steps, self.optim.warmup_steps
        best, sets = self.checkpoint.best, self.data.eval_sets
        if self.model.hf is None and self.model.init_from is None:
            yield "model.init_from", (
                "says no initial weights, because there is no model.hf; set model.hf to a Hugging Face folder, "
                "model.init_from to a Megatron checkpoint, or model.init_from=random"
            )
        no_cuda = self.run.device == "cpu"
        if self.train.mlp_tile is not None and self.model.moe.num_experts is not None:
            yield "train.mlp_tile", "needs a dense model: experts are balanced over whole documents; use null"
        if self.lora.is_used and self.model.moe.bias_update_rate:
            yield "model.moe.bias_update_rate", "changes the model itself, which lora.rank leaves as it is; use 0"
        if best is not None and best[0] not in sets:
            yield "checkpoint.keep_best", f"names no held-out set; data.eval has the sets {', '.join(sets) or 'none'}"
        if steps is not None and warmup is not None and warmup >= steps:
            yield "optim.warmup_steps", f"must be below train.num_steps = {steps}; lower it, or raise num_steps"
        can_offload = self.run.precision == "bf16" and self.parallel.distributed_optimizer
        if self.optim.offload_fraction > 0.0 and not can_offload:
            yield "optim.offload_fraction", (
                "needs run.precision = bf16 and parallel.distributed_optimizer = true, because otherwise "
                "megatron-core's hybrid optimizer does not update all weights; set both, or offload_fraction = 0"
            )
        yield from self.loss.distill.conflicts_with(self.data)
        yield from self._conflicts_of_turns()
        if no_cuda and not self.attention.may_be_portable:
            yield "attention.backend", "needs CUDA, and run.device is cpu; use portable or auto"
        yield from self._conflicts_of_kernels()
        yield from self._conflicts_of_head_chunks()
        yield from self._conflicts_of_gradients()
        if self.attention.delta_rule == "fla" and no_cuda:
            yield "attention.delta_rule", "= fla needs CUDA, and run.device is cpu; use torch or auto"
        if self.attention.delta_rule == "fla" and self.run.precision == "fp32":
            yield "attention.delta_rule", "= fla computes in bf16, and run.precision is fp32; use torch or auto"
        if self.attention.delta_rule == "fla" and self.run.deterministic:
            yield "attention.delta_rule", "= fla is not bitwise repeatable; use torch or auto"
        if no_cuda and self.parallel.ep_comm == "deepep":
            yield "parallel.ep_comm", "needs CUDA, and run.device is cpu; use alltoall"
        if self.run.deterministic and self.parallel.ep_comm == "deepep":
            yield "parallel.ep_comm", "is not bitwise repeatable; use alltoall, or run.deterministic = false"
        if self.run.precision == "fp32" and self.model.megatron.get(REDUCED_MATMUL):
            yield f"model.megatron.{REDUCED_MATMUL}", "has no effect with run.precision = fp32; use false"
        yield from self._conflicts_of_fp8()
        special = self.model.portable_only
        if special and not self.attention.may_be_portable:
            yield "attention.backend", f"= {self.attention.backend} does not have {special}; use portable or auto"
        elif not self.attention.may_be_portable and self._latents_without_kernel:
            yield "attention.backend", f"= {self.attention.backend} {self._latents_without_kernel}"
        yield from self._conflicts_of_modules()
        yield from self._conflicts_of_lora()
        yield from self._conflicts_of_mtp()

    def _conflicts_of_fp8(self) -> Iterator[tuple[str, str]]:
        if self.run.fp8 == "delayed" and self.train.recompute == "attention_kept":
            why = (
                "does not fit run.fp8 = delayed, whose scales Transformer Engine restores in attention that runs again"
            )
            yield "train.recompute", f"{why}; use full or selective, or another run.fp8"
        if self.run.fp8 is not None and self.parallel.shard == "weights":
            yield "parallel.shard", (
                f"does not fit run.fp8 = {self.run.fp8}, because Transformer Engine keeps 8-bit copies of "
                "all weights between microbatches; use gradients, or run.fp8 = null"
            )
        if self.run.fp8 is not None and self.train.mlp_tile is not None:
            yield "train.mlp_tile", "does not support fp8; use run.fp8 = null"

    def _conflicts_of_turns(self) -> Iterator[tuple[str, str]]:
        if self.data.turns == "chat":
            return
        if self.train.mtp != "off":
            yield "data.turns", (
                f"does not fit train.mtp = {self.train.mtp}: texts with a common beginning differ in the token "
                "after the next one; use train.mtp = off, or data.turns = chat"
            )
        if not self.attention.may_be_portable:
            yield "data.turns", (
                "gives documents a common beginning, which attention.backend = te cannot compute; use portable or "
                "auto, or data.turns = chat"
            )

    def _conflicts_of_head_chunks(self) -> Iterator[tuple[str, str]]:
        """The conflicts of train.head_chunks.  `alignment.misfits` checks that chunks divide the key heads of a
        rank."""
        model = self.model
        reasons = {
            "attention.backend = te, which attends to all heads at once": not self.attention.may_be_portable,
            f"run.fp8 = {self.run.fp8}, whose modules compute whole projections": self.run.fp8 is not None,
            "model.latent_attention, whose keys are expanded by head groups anyway": model.latent_attention.is_used,
            **{
                f"model.{name}, whose layers have no key heads to divide": section.is_used
                for name, section in model.mixer_sections.items()
                if section.is_recurrent
            },
            "model.attention_output_gate, which is a third tensor of all heads": model.attention_output_gate,
            "model.attention_head_gate, which is a part of the output of all heads": bool(model.attention_head_gate),
            "model.qk_norm_after_rotary, whose norms are not in the projection": model.qk_norm_after_rotary,
            "model.qk_norm_across_heads, which needs all heads of a token": model.qk_norm_across_heads,
        }
        if self.train.head_chunks is not None and (present := [reason for reason, is_so in reasons.items() if is_so]):
            yield "train.head_chunks", (
                f"does not support {' or '.join(present)}; use null.  A larger parallel.cp or parallel.tp also shrinks "
                "attention's tensors"
            )

    def _conflicts_of_gradients(self) -> Iterator[tuple[str, str]]:
        """The conflicts of optim.grad_dtype.  `Layout.resolve` checks the number of microbatches with a fixed cp."""
        key, is_half = "optim.grad_dtype", self.optim.grad_dtype == "bf16"
        if is_half and self.run.precision == "fp32":
            yield key, "needs run.precision = bf16, but run.precision is fp32; use fp32, or run.precision = bf16"
        if is_half and self.parallel.dynamic_cp:
            yield key, (
                "needs one microbatch per step on each rank, and with parallel.dynamic_cp = true a step has as "
                "many as its documents need: their sum in bf16 would lose small terms; use fp32, or dynamic_cp = false"
            )

    def _conflicts_of_modules(self) -> Iterator[tuple[str, str]]:
        run, why = self.run, self.local_modules_only
        instead = "parallel.etp = 1" if self.model.base_dtype == "bf16" else "model.base_dtype = bf16"
        is_local, is_te, fp8 = run.modules == "local", run.modules == "te", run.fp8 is not None
        needing = [name for name, is_set in (("run.modules", is_te), ("run.fp8", fp8)) if is_set]
        for name in needing:
            other = "null" if name == "run.fp8" else "local or auto"
            if run.device == "cpu":
                yield name, f"needs CUDA, and run.device is cpu; use {other}"
            if run.precision == "fp32":
                yield name, f"needs run.precision = bf16, but run.precision is fp32; use bf16, or {other}"
            if why:
                yield name, f"needs modules of Transformer Engine, but {why}; use {instead}, or {other}"
        if fp8 and is_local:
            yield "run.fp8", "needs modules of Transformer Engine, but run.modules is local; use te or auto, or null"
        if is_local and not self.attention.may_be_portable:
            yield "run.modules", "= local does not fit attention.backend = te, which has its own modules; use auto"
        if why and not self.attention.may_be_portable:
            yield "attention.backend", f"= te has its own modules, but {why}; use {instead}, portable or auto"

    def _conflicts_of_kernels(self) -> Iterator[tuple[str, str]]:
        kernels = self.attention.kernels
        if kernels is None:
            return
        if len({*kernels}) < len(kernels):
            yield "attention.kernels", "names a kernel twice"
        if self.attention.backend == "te":
            yield "attention.kernels", "names kernels of portable, but attention.backend is te; use portable or auto"
        flash = "FlashAttention and ffpa-attn"
        if self.run.device == "cpu" and "torch" not in kernels:
            yield "attention.kernels", f"needs torch, because {flash} need CUDA and run.device is cpu; add torch"
        elif self.run.precision == "fp32" and "torch" not in kernels:
            yield "attention.kernels", f"needs torch, because {flash} compute in bf16 only; add torch"

    def _conflicts_of_mtp(self) -> Iterator[tuple[str, str]]:
        mtp = self.train.mtp
        if self.model.has_mtp != (mtp != "off"):
            yield "model.has_mtp", f"does not fit train.mtp = {mtp}, which sets it; leave out model.has_mtp"
        if mtp == "off":
            return
        unsupported = {
            "lora.rank": (self.lora.is_used, "null: adapters leave the block for multi-token prediction as it is"),
            "train.freeze": (bool(self.train.freeze), "[]"),
            "run.fp8": (self.run.fp8 is not None, "null"),
            "train.offload_fraction": (self.train.offload_fraction > 0.0, "0"),
        }
        for key, (is_set, instead) in unsupported.items():
            if is_set:
                yield key, f"is not supported with train.mtp = {mtp}; use train.mtp = off, or {key} = {instead}"

    def _conflicts_of_lora(self) -> Iterator[tuple[str, str]]:
        if self.model.base_dtype != "bf16":
            yield from conflicts_of_base(self)
        if self.lora.is_used and self.train.freeze:
            yield "train.freeze", "has no effect with lora.rank, because LoRA freezes all weights; use []"
        yield from conflicts_of_rows(self)
        if self.lora.is_used and self.lora.train_head and self.model.tie_embeddings:
            yield "lora.train_head", (
                "cannot be used with model.tie_embeddings, because the output weight is the embedding; use "
                "lora.train_embeddings, which trains both"
            )
        if self.lora.export == "merged" and self.model.init_from == RANDOM and self.checkpoint.export_hf != "none":
            yield "lora.export", (
                "= merged adds adapters to weights of files, and model.init_from is random; use adapter, or "
                "checkpoint.export_hf = none"
            )
        exports = self.checkpoint.export_hf != "none" and self.lora.is_used and self.lora.export == "adapter"
        if exports and self.checkpoint.export_format != "bf16":
            yield "checkpoint.export_format", (
                "quantises whole models, and lora.export is adapter; use bf16, or lora.export = merged"
            )
