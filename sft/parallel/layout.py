"""The size of every parallel dimension.  Arithmetic only: no torch, no process groups.

    world_size = tp * cp * pp * dp        num_microbatches = global_batch_size / dp
    experts: tp * cp * dp = ep * etp * copies of each expert

`Layout.resolve` checks all settings that depend on several sections of the recipe or on the number of processes.
"""

from dataclasses import dataclass, replace
from math import lcm

from sft.config import Config, ModelConfig, divisors, listed
from sft.errors import ConfigError
from sft.layers.rank_share import FP32, RankShare
from sft.parallel.alignment import FP8_TOKENS, misfits, pack_multiple, smallest_world
from sft.parallel.cp_group import cp_sizes

# In a flat buffer of sharded weights, each weight and the shard of each rank begin at a multiple of this number of
# elements.  Kernels read weights in vectors of up to 16 bytes, and core aligns its buffers in the same way.
SHARD_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The size of every parallel dimension in ranks, and the values derived from these sizes."""

    world_size: int
    tp: int
    cp: int
    pp: int
    dp: int
    ep: int = 1  # ranks over which the experts of a pipeline stage are split
    etp: int = 1  # ranks over which each expert is split
    virtual_stages: int
    sequence_parallel: bool
    global_batch_size: int  # packs per optimizer step
    num_microbatches: int  # packs per optimizer step on one data-parallel rank; with dynamic CP, the plan decides
    doc_multiple: int  # documents are padded to a multiple of this number of tokens
    pack_multiple: int  # packs are padded to a multiple of this number of tokens, with filler documents
    cp_sizes: tuple[int, ...] = ()  # CP sizes that a pack may have with parallel.dynamic_cp; empty: every pack has cp
    cp_a2a: int | None = None  # cp ranks in each all-to-all group of a2a+p2p; the ring connects the groups
    shard_size: int = 0  # ranks of dp x cp that together hold one copy of what parallel.shard names; 0: all of them
    fp8: str | None = None  # the value of run.fp8; may increase pack_multiple

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by name, as logs and checkpoints record them."""
        return {name: getattr(self, name) for name in ("world_size", "tp", "cp", "pp", "dp", "ep", "etp")}

    @property
    def expert_copies(self) -> int:
        """The number of ranks of a pipeline stage that hold the same weights of an expert."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def shard_ranks(self) -> int:
        """The number of ranks of dp x cp over which optimizer states, gradients or weights are divided."""
        return self.shard_size or self.dp * self.cp

    @property
    def expert_shard_ranks(self) -> int:
        """The number of ranks over which an expert is divided: the largest number up to shard_size that divides the
        number of copies of the expert.

        shard_size 4; experts with 8 copies -> 4, with 2 copies -> 2, with 6 copies -> 3
        """
        copies = self.expert_copies
        return max(divisors(copies, self.shard_size)) if self.shard_size else copies

    @staticmethod
    def resolve(config: Config, world_size: int) -> "Layout":
        """The layout of `config` on `world_size` processes.

        Raises a ConfigError that lists every reason why the layout does not fit, with values that would fit.

            world_size = 8, tp = 2, cp = 2, pp = 1, global_batch_size = 16
            -> dp = 2, num_microbatches = 8
        """
        if problems := misfits(config, world_size):
            raise ConfigError(listed(problems))
        parallel = config.parallel
        dp = world_size // smallest_world(config)
        return Layout(
            world_size=world_size,
            tp=parallel.tp,
            cp=parallel.cp,
            pp=parallel.pp,
            dp=dp,
            ep=parallel.ep,
            etp=parallel.etp,
            virtual_stages=parallel.virtual_stages,
            sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
            global_batch_size=config.train.global_batch_size,
            num_microbatches=config.train.global_batch_size // dp,
            doc_multiple=config.data.doc_multiple,
            pack_multiple=pack_multiple(config),
            cp_sizes=cp_sizes(parallel.cp) if parallel.dynamic_cp else (),
            cp_a2a=parallel.cp_a2a if config.attention.may_be_te(config.run.device) else None,
            shard_size=parallel.shard_size or 0,
            fp8=config.run.fp8,
        )

    def with_short_batches(self) -> "Layout":
        """The layout with small global batches, between which an evaluation may stop: one microbatch on each
        data-parallel rank; on several pipeline stages twice as many as stages, which keeps most of them busy."""
        num_microbatches = 1 if self.pp == 1 else 2 * self.pp
        return replace(self, num_microbatches=num_microbatches, global_batch_size=self.dp * num_microbatches)

    def share(self, config: Config) -> RankShare:
        """The part of a layer's tensors that one rank holds."""
        return RankShare(
            tp=self.tp,
            cp=self.cp,
            etp=self.etp,
            ep=self.ep,
            sequence=1 / self.tp if self.sequence_parallel else 1.0,
            width=2 if config.run.precision == "bf16" else FP32,
            is_fused=config.run.device != "cpu",
        )

    def chunks(self, num_layers: int, stage: int) -> list[range]:
        """The numbers of the layers, from 1, of each model chunk of a pipeline stage.

        8 layers, pp 2, 2 virtual stages: stage 0 -> [range(1, 3), range(5, 7)], stage 1 -> [range(3, 5), range(7, 9)]
        """
        size = num_layers // (self.pp * self.virtual_stages)
        firsts = (1 + size * (number * self.pp + stage) for number in range(self.virtual_stages))
        return [range(first, first + size) for first in firsts]

    def equations(self, seq_length: int) -> list[str]:
        """The layout as equations that a user can check.

        world_size 8 = tp 2 x cp 2 x pp 1 x dp 2
        global_batch_size 16 packs = dp 2 x num_microbatches 8
        tokens per step <= 16 packs x 32,768 = 524,288
        tokens per rank and microbatch <= 32,768 / cp 2 = 16,384
        between layers, sequence parallel: 16,384 / tp 2 = 8,192
        documents padded to a multiple of 32, packs to a multiple of 32
        """
        tp, cp, dp, packs = self.tp, self.cp, self.dp, self.global_batch_size
        local, virtual = seq_length // cp, self.virtual_stages
        microbatches = f"num_microbatches {self.num_microbatches}"
        if self.cp_sizes:
            microbatches = f"{self.num_microbatches}, before dynamic CP"
        lines = [
            f"world_size {self.world_size} = tp {tp} x cp {cp} x pp {self.pp} x dp {dp}",
            f"global_batch_size {packs} packs = dp {dp} x {microbatches}",
            f"tokens per step <= {packs} packs x {seq_length:,} = {packs * seq_length:,}",
            f"tokens per rank and microbatch <= {seq_length:,} / cp {cp} = {local:,}",
        ]
        if self.cp_sizes:
            *smaller, largest = map(str, self.cp_sizes)
            lines.append(
                f"dynamic CP: each pack is on {', '.join(smaller)} or {largest} ranks; microbatches by the plan"
            )
        if virtual > 1:
            lines.append(f"pipeline stages: pp {self.pp} x virtual_stages {virtual} = {self.pp * virtual}")
        if self.ep * self.etp > 1:
            copies = f"ep {self.ep} x etp {self.etp} x {self.expert_copies} copies"
            lines.append(f"experts: {tp * cp * dp} ranks of a stage = {copies}")
        if self.shard_size:
            replicas = dp * cp // self.shard_size
            lines.append(f"dp {dp} x cp {cp} = shard_size {self.shard_size} x {replicas} replicas")
        if self.sequence_parallel:
            lines.append(f"between layers, sequence parallel: {local:,} / tp {tp} = {local // tp:,}")
        if self.cp_a2a:
            lines.append(f"cp {cp} = {self.cp_a2a} ranks of all-to-all x {cp // self.cp_a2a} of the ring")
        if self.fp8:
            tokens, split = FP8_TOKENS[self.fp8], f" x tp {tp}" if self.sequence_parallel else ""
            total = tokens * cp * (tp if self.sequence_parallel else 1)
            product = f"{tokens} tokens of a rank x cp {cp}{split} = {total:,}"
            lines.append(f"fp8 {self.fp8}: {product}, which divides the length of each pack")
        padding = f"documents padded to a multiple of {self.doc_multiple}"
        return [*lines, f"{padding}, packs to a multiple of {self.pack_multiple}"]


def vocab_rows(model: ModelConfig, tokenizer_size: int) -> int:
    """Rows of the embedding without padding: `model.vocab_size`, or the number of the tokenizer's tokens.

    A tokenizer may have more tokens than the embedding has rows, if the data do not contain the other tokens.
    """
    return model.vocab_size or tokenizer_size


def surplus_note(model: ModelConfig, tokenizer_size: int) -> str | None:
    """A note if the tokenizer has ids for which the embedding has no row; else None."""
    rows = vocab_rows(model, tokenizer_size)
    if rows >= tokenizer_size:
        return None
    ids = f"id {rows:,} has" if tokenizer_size == rows + 1 else f"ids {rows:,} to {tokenizer_size - 1:,} have"
    return (
        f"the tokenizer has {tokenizer_size:,} ids, and the embedding {rows:,} rows (model.vocab_size): {ids} no row, "
        "and data with them are refused; data.add_tokens gives them rows"
    )


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of the embedding with padding: the next multiple of 128 and of tp.  Equal for all tp that divide 128."""
    multiple = lcm(128, tp)
    return -(-vocab_size // multiple) * multiple
