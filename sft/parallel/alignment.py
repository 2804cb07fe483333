"""Checks whether the sizes in a recipe fit each other and the number of processes, and describes sizes that do not fit.

For example, the length of a pack must be a multiple of `pack_multiple`.  The loader adds filler documents to ensure it.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import gcd, lcm
from typing import TYPE_CHECKING, TypeVar

from sft.config import Config, divisors
from sft.layers.kinds import LayerGroup
from sft.layers.split_sizes import SplitSizes
from sft.parallel.scales import divided_scales

if TYPE_CHECKING:
    import numpy as np  # only for types: mistakes in a recipe are reported before numpy is imported

# By run.fp8: each rank's number of tokens must be a multiple of this (Transformer Engine 2.18 to 2.20).
#   delayed, tensorwise   16: cuBLASLt requires it of the inner dimension; in a weight's gradient, that is the tokens
#   mxfp8                 32: the quantizer takes only whole blocks of 1 x 32 and 32 x 1
#   blockwise            128: tile of the quantizer.  cuBLASLt needs only 16, but with sequence parallel, Transformer
#                             Engine gathers parts of other lengths in bf16, and warns each time
FP8_TOKENS = {None: 1, "delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}
# By run.fp8: rows and columns of a rank's part of a weight must be multiples of this.  blockwise needs 16 on Hopper and
# 32 on Blackwell, which computes blockwise as mxfp8.
FP8_WIDTHS = {None: 1, "delayed": 16, "tensorwise": 16, "blockwise": 32, "mxfp8": 32}

ETP_NEEDS_NCCL = "needs NCCL: gloo cannot gather parts of unequal size.  On the CPU, use etp = 1."

Lengths = TypeVar("Lengths", int, "np.ndarray")


def aligned(length: Lengths, doc_multiple: int) -> Lengths:
    """The length of a padded document: `length`, an int or an array, rounded up to a multiple of `doc_multiple`.

    aligned(33, 32) -> 64        aligned(np.array([1, 32, 33]), 32) -> [32, 32, 64]

    Truncation, planner and packer all use this function.  A packer that used real lengths would overfill packs.
    """
    return -(-length // doc_multiple) * doc_multiple


def pack_multiple(config: Config, cp_size: int | None = None) -> int:
    """The number that must divide the length of every pack.  doc_multiple, cp, sequence parallel and FP8 decide it.

    cp_size: number of ranks that share the pack; None: parallel.cp

    doc_multiple 32, cp 2, tp 4 with sequence parallel -> 32, and with mxfp8 -> 2 * 4 * 32 = 256
    """
    cp = cp_size or config.parallel.cp
    return lcm(config.data.doc_multiple, 2 * cp, cp * _split(config) * FP8_TOKENS[config.run.fp8])


def _split(config: Config) -> int:
    return config.parallel.tp if config.parallel.sequence_parallel else 1


def misfits(config: Config, world_size: int) -> list[str]:
    """All reasons why the sizes in `config` do not fit each other or `world_size`, with sizes that would fit."""
    sizes = SplitSizes.of(config.model)
    return [
        *_ranks(config, sizes, world_size),
        *_tensor(config, sizes),
        *divided_scales(config, sizes.scales),
        *_pipeline(config),
        *_experts(config, world_size),
        *_shards(config, world_size),
        *_batch(config, world_size),
        *_tokens(config, sizes),
        *_profiled(config, world_size),
    ]


def smallest_world(config: Config) -> int:
    """tp * cp * pp: the number of processes that together hold one copy of the model."""
    return config.parallel.tp * config.parallel.cp * config.parallel.pp


def _ranks(config: Config, sizes: SplitSizes, world_size: int) -> Iterator[str]:
    ranks = {"tp": config.parallel.tp, "cp": config.parallel.cp, "pp": config.parallel.pp}
    if world_size % (total := smallest_world(config)) == 0:
        return
    singular, plural = ("process", "processes") if config.run.device == "cpu" else ("GPU", "GPUs")
    have = f"{world_size} {singular if world_size == 1 else plural}"
    checks = {"cp": partial(_cp_fits, config), "tp": partial(_tp_fits, sizes), "pp": partial(_pp_fits, config)}
    words = {"cp": "Context", "tp": "Tensor", "pp": "Pipeline"}
    most = {name: divmod(world_size * size, total) for name, size in ranks.items()}
    fitting = {k: _listing(n for n in divisors(most[k][0]) if fits(n)) for k, fits in checks.items() if not most[k][1]}
    if fitting:
        name, *others = fitting
        rest = ", ".join(f"{other} = {size}" for other, size in ranks.items() if other != name)
        ways = "".join(f"  Or parallel.{other}: {fitting[other]}." for other in others)
        ways += f"  Or start {total} {plural}, or another multiple." * (world_size > 1)
        ways = f"{words[name]}-parallel sizes that fit: {fitting[name]}.{ways}"
        yield f"parallel.{name} = {ranks[name]} does not fit {have} with {rest}.  {ways}"
    else:
        product = " x ".join(f"{name} {size}" for name, size in ranks.items())
        yield f"parallel: {product} = {total} does not divide {have}.  Start a multiple of {total} processes."


def _cp_fits(config: Config, cp: int) -> bool:
    return config.data.doc_multiple % (2 * cp) == 0


def _tp_fits(sizes: SplitSizes, tp: int) -> bool:
    return all(size % tp == 0 for size in sizes.by_tp.values())


def _pp_fits(config: Config, pp: int) -> bool:
    virtual = config.parallel.virtual_stages
    return config.model.num_layers % (pp * virtual) == 0 and (pp > 1 or virtual == 1)


# Why ranks do not divide what a size counts.
_WHOLE = {
    "model.mamba.num_groups": "A rank has whole groups of Mamba-2: all heads of a group read the same B and C, and one "
    "root mean square normalises their outputs.",
}


def _tensor(config: Config, sizes: SplitSizes) -> Iterator[str]:
    tp = config.parallel.tp
    uneven = [f"{key} = {size}" for key, size in sizes.by_tp.items() if size % tp]
    if uneven:
        names = ", ".join(uneven)
        fitting = _listing(size for size in divisors(min(sizes.by_tp.values())) if _tp_fits(sizes, size))
        why = "".join(f"  {reason}" for key, reason in _WHOLE.items() if sizes.by_tp.get(key, 0) % tp)
        yield f"parallel.tp = {tp} does not divide {names}.{why}  Tensor-parallel sizes that fit: {fitting}."
    else:
        yield from _heads_by_chunks(config, sizes.heads)
        yield from _heads_by_all_to_all(config, sizes.heads)
        yield from _uneven_widths(config, sizes.groups)


def _heads_by_chunks(config: Config, heads: Mapping[str, int]) -> Iterator[str]:
    chunks, tp = config.train.head_chunks or 1, config.parallel.tp
    if short := [f"{name} = {number}" for name, number in heads.items() if number % (tp * chunks)]:
        most = gcd(*heads.values()) // tp
        yield (
            f"train.head_chunks = {chunks} cannot divide a rank's key heads: parallel.tp {tp} x {chunks} = "
            f"{tp * chunks} does not divide {', '.join(short)}.  Use null, or {_listing(iter(divisors(most)))}."
        )


def _heads_by_all_to_all(config: Config, heads: Mapping[str, int]) -> Iterator[str]:
    """Yield a message if the attention heads cannot be divided among the ranks of an all-to-all.

    With cp_comm a2a, these ranks are all cp ranks.  With a2a+p2p, they are the cp_a2a ranks of one group.
    """
    parallel = config.parallel
    applies = config.attention.may_be_te(config.run.device)
    if not applies or parallel.cp_comm not in ("a2a", "a2a+p2p"):
        return
    tp, cp, two_levels = parallel.tp, parallel.cp, parallel.cp_a2a is not None
    key, size = ("cp_a2a", parallel.cp_a2a or cp) if two_levels else ("cp", cp)
    if short := [f"{name} = {number}" for name, number in heads.items() if number % (tp * size)]:
        possible = [c for c in divisors(cp) if not two_levels or 1 < c < cp]
        fitting = _listing(c for c in possible if all(number % (tp * c) == 0 for number in heads.values()))
        yield (
            f"parallel.cp_comm = {parallel.cp_comm} distributes whole heads: tp {tp} x {key} {size} = {tp * size} does "
            f"not divide {', '.join(short)}.  Use p2p or all_gather, or a {key} of {fitting}."
        )


def _uneven_widths(config: Config, groups: Sequence[LayerGroup]) -> Iterator[str]:
    """Yield one message about all widths that FP8 does not support.  tp must divide the heads and the MLP width."""
    fp8, tp = config.run.fp8, config.parallel.tp
    multiple = FP8_WIDTHS[fp8]
    wrong = {name: width for name, width in _widths(config, groups, tp).items() if width % multiple}
    if not wrong:
        return
    uneven = ", ".join(f"{name} = {width:,}" for name, width in wrong.items())
    fitting = [
        size for size in divisors(tp) if not any(width % multiple for width in _widths(config, groups, size).values())
    ]
    instead = f"Use a tp of {', '.join(map(str, fitting))}, or run.fp8=null" if fitting else "Use run.fp8=null"
    yield f"run.fp8 = {fp8} needs widths that are multiples of {multiple}, but {uneven}.  {instead}."


def _widths(config: Config, groups: Sequence[LayerGroup], tp: int) -> dict[str, int]:
    """The numbers of rows and columns, by name, of one rank's parts of the weights of Transformer Engine's layers."""
    widths = {"model.hidden_size": config.model.hidden_size}
    for group in groups:
        widths |= group.mixer.te_widths(tp)
    for group in sorted(groups, key=lambda group: -group.mlp.num_experts):
        widths |= group.mlp.te_widths(tp, config.parallel.etp)
    return widths


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
    if (width := model.resolved_expert_ffn) % etp:
        fitting = _listing(iter(divisors(width)))
        yield f"parallel.etp = {etp} does not divide the expert width {width}.  Sizes that fit: {fitting}."
    if model.mlp_bias and model.hidden_size % etp:
        fitting = _listing(iter(divisors(model.hidden_size)))
        yield (
            f"parallel.etp = {etp} does not divide model.hidden_size {model.hidden_size}, and model.mlp_bias gives "
            f"each rank of etp a part of a bias of this size.  Sizes that fit: {fitting}."
        )
    stage, rest = divmod(world_size, parallel.pp)
    if experts % ep or (not rest and stage % (ep * etp)):
        fitting = _listing(e for e in divisors(experts) if rest or stage % (e * etp) == 0)
        yield (
            f"parallel.ep = {ep} x etp = {etp} does not fit {experts} experts on {stage} ranks of a pipeline stage "
            f"(tp x cp x dp).  Expert-parallel sizes that fit: {fitting}."
        )


def _shards(config: Config, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    dp, rest = divmod(world_size, smallest_world(config))
    if rest or not parallel.shards_gradients:
        return
    ranks, size = dp * parallel.cp, parallel.shard_size
    product = f"dp {dp} x cp {parallel.cp}"
    if ranks == 1:
        yield (
            f"parallel.shard = {parallel.shard} has no effect with {product}: one rank holds all.  Use optimizer, or "
            "more ranks of dp or cp."
        )
    elif size is not None and (size == 1 or ranks % size):
        fitting = _listing(other for other in divisors(ranks) if other > 1)
        why = "would share with no other rank" if size == 1 else f"does not divide {product} = {ranks}"
        yield f"parallel.shard_size = {size} {why}.  Sizes that fit: {fitting}; null is all {ranks}."


def _batch(config: Config, world_size: int) -> Iterator[str]:
    dp, rest = divmod(world_size, smallest_world(config))
    packs, pp, virtual = config.train.global_batch_size, config.parallel.pp, config.parallel.virtual_stages
    if rest:
        return  # dp is not a whole number; `_ranks` reports this
    if packs % dp:
        nearest = _nearest_multiples(packs, dp)
        yield f"train.global_batch_size = {packs} packs cannot be divided evenly among dp = {dp} ranks.  {nearest}."
        return
    if virtual > 1 and packs // dp % pp:
        nearest = _nearest_multiples(packs, dp * pp)
        yield (
            f"train.global_batch_size = {packs} packs are {packs // dp} microbatches on each of dp = {dp} "
            f"ranks; with virtual_stages = {virtual} they must be a multiple of pp = {pp}.  {nearest}."
        )
    if packs > dp and config.optim.grad_dtype == "bf16":
        less = "" if virtual > 1 else f", or train.global_batch_size={dp}, or {packs // dp} times as many ranks"
        yield (
            f"optim.grad_dtype = bf16 needs one microbatch per step on each rank, but train.global_batch_size = "
            f"{packs} packs are {packs // dp} on each of dp = {dp} ranks: a sum of their gradients in bf16 would lose "
            f"small terms.  Use optim.grad_dtype=fp32{less}."
        )


def _tokens(config: Config, sizes: SplitSizes) -> Iterator[str]:
    multiple, seq_length, cp = config.data.doc_multiple, config.data.seq_length, config.parallel.cp
    if not _cp_fits(config, cp):
        yield (
            f"data.doc_multiple = {multiple} is not a multiple of 2 x cp = {2 * cp}, the number of a document's "
            f"chunks.  Smallest that fits: {lcm(multiple, 2 * cp)}."
        )
    # A cp or tp that is refused already must not appear in the message about seq_length.
    fits = _cp_fits(config, cp) and _tp_fits(sizes, config.parallel.tp)
    pack = pack_multiple(config) if fits else multiple
    if config.parallel.dynamic_cp:  # a pack on one rank holds seq_length / cp tokens: a multiple of doc_multiple
        pack = lcm(pack, multiple * cp)
    if seq_length % pack:
        why = _explain_multiple(config) if fits else "doc_multiple"
        nearest = _nearest_multiples(seq_length, pack)
        yield f"data.seq_length = {seq_length} is not a multiple of {pack} ({why}).  {nearest}."


def _explain_multiple(config: Config) -> str:
    """The settings that give the multiple: "doc_multiple 32, cp 2, tp 4 with sequence parallel, ..."."""
    parallel, fp8 = config.parallel, config.run.fp8
    reasons = [f"doc_multiple {config.data.doc_multiple}", f"cp {parallel.cp}"]
    if parallel.dynamic_cp:
        reasons = [f"doc_multiple {config.data.doc_multiple} x cp {parallel.cp}, because of dynamic_cp"]
    if _split(config) > 1:
        reasons.append(f"tp {parallel.tp} with sequence parallel")
    if fp8:
        reasons.append(f"{FP8_TOKENS[fp8]} tokens of a rank for fp8 {fp8}")
    return ", ".join(reasons)


def _nearest_multiples(value: int, multiple: int) -> str:
    """_nearest_multiples(10, 4) -> "Nearest that fit: 8, 12".  0 is never listed."""
    below = value // multiple * multiple
    return "Nearest that fit: " + ", ".join(str(size) for size in (below, below + multiple) if size)


def _listing(sizes: Iterator[int]) -> str:
    return ", ".join(str(size) for size in sizes) or "none"


def _profiled(config: Config, world_size: int) -> Iterator[str]:
    for name, ranks in (("memory", config.profile.memory.ranks), ("torch", config.profile.torch.ranks)):
        if isinstance(ranks, list) and max(ranks) >= world_size:
            have = "only rank 0" if world_size == 1 else f"only ranks 0 to {world_size - 1}"
            yield f"profile.{name}.ranks = {ranks}: this run has no rank {max(ranks)}, {have}."
