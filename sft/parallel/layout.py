"""The size of every parallel dimension.  Arithmetic only: no torch, no process groups.

    world_size = tp * cp * pp * dp        num_microbatches = global_batch_size / dp
    experts have sizes of their own: tp * cp * dp = ep * etp * copies of each expert

`Layout.resolve` checks everything that depends on more than one section of the recipe or on the number of
processes, reports all that is wrong at once, and says what would work.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

from sft.config import Config, ModelConfig, divisors, listed
from sft.errors import ConfigError
from sft.parallel.alignment import FP8_TOKENS, explain_multiple, pack_multiple, uneven_widths

ETP_NEEDS_NCCL = "needs NCCL: gloo cannot gather parts of unequal size.  On the CPU etp is 1."


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of every parallel dimension, and what follows from them.  All sizes are counts of ranks."""

    world_size: int
    tp: int
    cp: int
    pp: int
    dp: int
    ep: int = 1  # ranks that share a stage's experts
    etp: int = 1  # ranks that share one expert
    virtual_stages: int
    sequence_parallel: bool
    global_batch_size: int  # packs per optimizer step
    num_microbatches: int  # packs per optimizer step and data-parallel rank
    doc_multiple: int  # documents are padded to a multiple of this
    pack_multiple: int  # microbatches are filled to a multiple of this, with unsupervised filler documents
    cp_a2a: int | None = None  # cp ranks that exchange heads, where the ring goes from group to group (a2a+p2p)
    fp8: str | None = None  # as run.fp8; asks for more of pack_multiple

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by name, as logs and checkpoints record them."""
        return {name: getattr(self, name) for name in ("world_size", "tp", "cp", "pp", "dp", "ep", "etp")}

    @staticmethod
    def resolve(config: Config, world_size: int) -> "Layout":
        """The layout of `config` on `world_size` processes.

        Raises ConfigError listing every reason why it does not fit, each with values that would.

            world_size = 8, tp = 2, cp = 2, pp = 1, global_batch_size = 16
            -> dp = 2, num_microbatches = 8
        """
        problems = [
            *_ranks(config, world_size),
            *_tensor(config),
            *_pipeline(config),
            *_experts(config, world_size),
            *_batch(config, world_size),
            *_tokens(config),
            *_profiled(config, world_size),
        ]
        if problems:
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
            cp_a2a=parallel.cp_a2a if config.attention.may_read_cp_comm(config.run.device) else None,
            fp8=config.run.fp8,
        )

    def equations(self, seq_length: int) -> list[str]:
        """What was resolved, as equations to check by eye.

        world_size 8 = tp 2 x cp 2 x pp 1 x dp 2
        global_batch_size 16 packs = dp 2 x num_microbatches 8
        tokens per step <= 16 packs x 32,768 = 524,288
        tokens per rank and microbatch <= 32,768 / cp 2 = 16,384
        between layers, sequence parallel: 16,384 / tp 2 = 8,192
        documents padded to a multiple of 32, packs to a multiple of 32
        """
        tp, cp, dp, packs = self.tp, self.cp, self.dp, self.global_batch_size
        local, virtual = seq_length // cp, self.virtual_stages
        lines = [
            f"world_size {self.world_size} = tp {tp} x cp {cp} x pp {self.pp} x dp {dp}",
            f"global_batch_size {packs} packs = dp {dp} x num_microbatches {self.num_microbatches}",
            f"tokens per step <= {packs} packs x {seq_length:,} = {packs * seq_length:,}",
            f"tokens per rank and microbatch <= {seq_length:,} / cp {cp} = {local:,}",
        ]
        if virtual > 1:
            lines.append(f"pipeline stages: pp {self.pp} x virtual_stages {virtual} = {self.pp * virtual}")
        if self.ep * self.etp > 1:
            ranks, copies = tp * cp * dp, tp * cp * dp // (self.ep * self.etp)
            lines.append(f"experts: {ranks} ranks of a stage = ep {self.ep} x etp {self.etp} x {copies} copies")
        if self.sequence_parallel:
            lines.append(f"between layers, sequence parallel: {local:,} / tp {tp} = {local // tp:,}")
        if self.cp_a2a:
            lines.append(f"cp {cp} = {self.cp_a2a} ranks of all-to-all x {cp // self.cp_a2a} of the ring")
        if self.fp8:
            tokens, split = FP8_TOKENS[self.fp8], f" x tp {tp}" if self.sequence_parallel else ""
            total = tokens * cp * (tp if self.sequence_parallel else 1)
            lines.append(f"fp8 {self.fp8}: {tokens} tokens of a rank x cp {cp}{split} = {total:,}, which divides packs")
        padding = f"documents padded to a multiple of {self.doc_multiple}"
        return [*lines, f"{padding}, packs to a multiple of {self.pack_multiple}"]


def smallest_world(config: Config) -> int:
    """tp * cp * pp: the processes that one copy of the model takes."""
    return config.parallel.tp * config.parallel.cp * config.parallel.pp


def vocab_rows(model: ModelConfig, tokenizer_size: int) -> int:
    """Rows of the embedding that are tokens: `model.vocab_size`, or as many as the tokenizer has.

    Raises ConfigError where the model has fewer rows than the tokenizer has tokens.
    """
    if model.vocab_size is not None and model.vocab_size < tokenizer_size:
        raise ConfigError(
            f"model.vocab_size = {model.vocab_size} is smaller than the tokenizer: {tokenizer_size} "
            f"tokens.  Use the model's own tokenizer (data.tokenizer), or at least {tokenizer_size} rows."
        )
    return model.vocab_size or tokenizer_size


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of the embedding: a multiple of 128, the same for every tp that divides 128, so that layouts can change."""
    multiple = lcm(128, tp)
    return -(-vocab_size // multiple) * multiple


def _ranks(config: Config, world_size: int) -> Iterator[str]:
    sizes = {"tp": config.parallel.tp, "cp": config.parallel.cp, "pp": config.parallel.pp}
    total = smallest_world(config)
    if world_size % total == 0:
        return
    singular, plural = ("process", "processes") if config.run.device == "cpu" else ("GPU", "GPUs")
    have = f"{world_size} {singular if world_size == 1 else plural}"
    for name, word, fits in (
        ("cp", "Context", _cp_fits),
        ("tp", "Tensor", _tp_fits),
        ("pp", "Pipeline", _pp_fits),
    ):
        others = total // sizes[name]
        if sizes[name] > 1 and world_size % others == 0:
            rest = ", ".join(f"{other} = {size}" for other, size in sizes.items() if other != name)
            fitting = _listing(size for size in divisors(world_size // others) if fits(config, size))
            yield (
                f"parallel.{name} = {sizes[name]} does not fit {have} with {rest}.  "
                f"{word}-parallel sizes that fit: {fitting}."
            )
            return
    product = " x ".join(f"{name} {size}" for name, size in sizes.items())
    yield f"parallel: {product} = {total} does not divide {have}.  Start a multiple of {total}."


def _cp_fits(config: Config, cp: int) -> bool:
    return config.data.doc_multiple % (2 * cp) == 0


def _tp_fits(config: Config, tp: int) -> bool:
    return all(size % tp == 0 for size in _split_by_tp(config).values())


def _pp_fits(config: Config, pp: int) -> bool:
    virtual = config.parallel.virtual_stages
    return config.model.num_layers % (pp * virtual) == 0 and (pp > 1 or virtual == 1)


def _split_by_tp(config: Config) -> dict[str, int]:
    model = config.model
    heads = {
        "model.num_attention_heads": model.num_attention_heads,
        "model.num_query_groups": model.resolved_query_groups,
    }
    return heads if model.moe.num_experts else {**heads, "model.ffn_hidden_size": model.ffn_hidden_size}


def _tensor(config: Config) -> Iterator[str]:
    tp, split = config.parallel.tp, _split_by_tp(config)
    uneven = [f"{key} = {size}" for key, size in split.items() if size % tp]
    if uneven:
        names = ", ".join(uneven)
        fitting = _listing(size for size in divisors(min(split.values())) if _tp_fits(config, size))
        yield f"parallel.tp = {tp} does not divide {names}.  Tensor-parallel sizes that fit: {fitting}."
    else:
        yield from _heads_by_all_to_all(config)
        yield from uneven_widths(config)


def _heads_by_all_to_all(config: Config) -> Iterator[str]:
    """a2a hands out whole heads to all cp ranks, a2a+p2p to those of a group."""
    parallel, model = config.parallel, config.model
    applies = config.attention.may_read_cp_comm(config.run.device)
    if not applies or parallel.cp_comm not in ("a2a", "a2a+p2p"):
        return
    heads = {
        "model.num_attention_heads": model.num_attention_heads,
        "model.num_query_groups": model.resolved_query_groups,
    }
    tp, cp, two_levels = parallel.tp, parallel.cp, parallel.cp_a2a is not None
    key, size = ("cp_a2a", parallel.cp_a2a or cp) if two_levels else ("cp", cp)
    if short := [f"{name} = {number}" for name, number in heads.items() if number % (tp * size)]:
        possible = [c for c in divisors(cp) if not two_levels or 1 < c < cp]
        fitting = _listing(c for c in possible if all(number % (tp * c) == 0 for number in heads.values()))
        yield (
            f"parallel.cp_comm = {parallel.cp_comm} hands out whole heads: tp {tp} x {key} {size} = {tp * size} does "
            f"not divide {', '.join(short)}.  Use p2p or all_gather, or a {key} of {fitting}."
        )


def _pipeline(config: Config) -> Iterator[str]:
    layers, pp, virtual = config.model.num_layers, config.parallel.pp, config.parallel.virtual_stages
    if not _pp_fits(config, pp):
        fitting = _listing(size for size in divisors(layers) if _pp_fits(config, size))
        yield (
            f"model.num_layers = {layers} cannot be cut into parallel.pp {pp} x virtual_stages {virtual} = "
            f"{pp * virtual} equal stages.  Pipeline-parallel sizes that fit: {fitting}."
        )


def _experts(config: Config, world_size: int) -> Iterator[str]:
    model, parallel = config.model, config.parallel
    experts, ep, etp = model.moe.num_experts, parallel.ep, parallel.etp
    if experts is None:
        if ep * etp > 1:
            yield f"parallel.ep = {ep} and etp = {etp} are for experts; without model.moe.num_experts both must be 1."
        return
    if parallel.tp > 1 and not parallel.sequence_parallel:
        yield (
            f"parallel.sequence_parallel = false with tp = {parallel.tp} would send every token to its experts "
            f"{parallel.tp} times.  A mixture of experts needs sequence_parallel, or tp = 1."
        )
    if etp > 1 and config.run.device == "cpu":
        yield f"parallel.etp = {etp} {ETP_NEEDS_NCCL}"
    if model.resolved_expert_ffn % etp:
        fitting = _listing(iter(divisors(model.resolved_expert_ffn)))
        yield f"parallel.etp = {etp} does not divide an expert of width {model.resolved_expert_ffn}.  Fit: {fitting}."
    stage, rest = divmod(world_size, parallel.pp)
    if experts % ep or (not rest and stage % (ep * etp)):
        fitting = _listing(e for e in divisors(experts) if rest or stage % (e * etp) == 0)
        yield (
            f"parallel.ep = {ep} x etp = {etp} does not fit {experts} experts on {stage} ranks of a pipeline stage "
            f"(tp x cp x dp).  Expert-parallel sizes that fit: {fitting}."
        )


def _batch(config: Config, world_size: int) -> Iterator[str]:
    dp, rest = divmod(world_size, smallest_world(config))
    packs, pp, virtual = config.train.global_batch_size, config.parallel.pp, config.parallel.virtual_stages
    if rest:
        return  # no dp: `_ranks` reports it
    if packs % dp:
        nearest = _nearest_multiples(packs, dp)
        yield f"train.global_batch_size = {packs} packs cannot be shared by dp = {dp} ranks.  {nearest}."
    elif virtual > 1 and packs // dp % pp:
        nearest = _nearest_multiples(packs, dp * pp)
        yield (
            f"train.global_batch_size = {packs} packs are {packs // dp} microbatches on each of dp = {dp} "
            f"ranks; with virtual_stages = {virtual} they must be a multiple of pp = {pp}.  {nearest}."
        )


def _tokens(config: Config) -> Iterator[str]:
    multiple, seq_length, cp = config.data.doc_multiple, config.data.seq_length, config.parallel.cp
    if not _cp_fits(config, cp):
        yield (
            f"data.doc_multiple = {multiple} is not a multiple of 2 x cp = {2 * cp}, a document's chunks.  "
            f"Smallest that fits: {lcm(multiple, 2 * cp)}."
        )
    # A size that is refused already would only blur what is wrong with seq_length.
    fits = _cp_fits(config, cp) and _tp_fits(config, config.parallel.tp)
    pack = pack_multiple(config) if fits else multiple
    if seq_length % pack:
        why = explain_multiple(config) if fits else "doc_multiple"
        nearest = _nearest_multiples(seq_length, pack)
        yield f"data.seq_length = {seq_length} is not a multiple of {pack} ({why}).  {nearest}."


def _nearest_multiples(value: int, multiple: int) -> str:
    """_nearest_multiples(10, 4) -> "Nearest that fit: 8, 12"; nothing below the multiple itself."""
    below = value // multiple * multiple
    return "Nearest that fit: " + ", ".join(str(size) for size in (below, below + multiple) if size)


def _listing(sizes: Iterator[int]) -> str:
    return ", ".join(str(size) for size in sizes) or "none"


def _profiled(config: Config, world_size: int) -> Iterator[str]:
    for name, ranks in (("memory", config.profile.memory.ranks), ("torch", config.profile.torch.ranks)):
        if isinstance(ranks, list) and max(ranks) >= world_size:
            have = "only 0" if world_size == 1 else f"only 0 to {world_size - 1}"
            yield f"profile.{name}.ranks = {ranks}: this run has no rank {max(ranks)}, {have}."
