"""Lists the values that a search may choose: sizes of a layout, values of cp_comm, and savings of memory.

This module repeats no rules of layouts.  `alignment.misfits` checks sizes, and the schema checks combinations of
settings.  Each combination is validated once, before the search.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import product
from typing import Any

from pydantic import ValidationError

from sft.config import Config, ParallelConfig, divisors
from sft.config.parallel import Shard
from sft.parallel.alignment import misfits
from sft.planner.task import P2P, RECOMPUTE, Choice, CpComm, Savings, Shards, Sizes, Task, configured

_MOST_VIRTUAL = 4  # more model chunks send more messages and reduce the bubble only a little
_TILE = 8192  # tokens, enough for efficient GEMMs; with 64K tokens on a rank, an MLP needs an eighth of its memory
_HEAD_CHUNKS = 8  # with more, products and messages of a chunk become small
_CHUNK = 1024  # tokens that the loss head computes at a time


def sizes(task: Task, num_gpus: int) -> Iterator[Sizes]:
    """All sizes that fit the model, the packs and `num_gpus`.  tp stays within a node."""
    config, packs = task.config, task.config.train.global_batch_size
    has_short = bool((task.lengths.tokens < config.data.seq_length).any())
    dynamic = (False, True) if has_short and config.optim.grad_dtype == "fp32" else (False,)
    for tp in divisors(min(task.hardware.gpus_per_node, num_gpus)):
        for pp in divisors(config.model.num_layers):
            if num_gpus % (tp * pp):
                continue
            for cp in divisors(num_gpus // (tp * pp)):
                plainest = Sizes(tp, cp, pp, virtual_stages=1, ep=1, dynamic_cp=False)
                if packs % (num_gpus // (tp * pp * cp)) == 0 and _fits(config, plainest, num_gpus):
                    axes = product(_virtual_stages(config, pp), _expert_sizes(config, num_gpus // pp), dynamic)
                    candidates = (plainest._replace(virtual_stages=v, ep=ep, dynamic_cp=d) for v, ep, d in axes)
                    yield from (size for size in candidates if size == plainest or _fits(config, size, num_gpus))


def _fits(config: Config, size: Sizes, num_gpus: int) -> bool:
    is_valid = not size.dynamic_cp or _is_valid_parallel(size, P2P)
    return is_valid and not misfits(configured(config, Choice(size, P2P, Savings())), num_gpus)


def _virtual_stages(config: Config, pp: int) -> list[int]:
    return divisors(config.model.num_layers // pp, _MOST_VIRTUAL) if pp > 1 else [1]


def _expert_sizes(config: Config, ranks: int) -> list[int]:
    experts = config.model.moe.num_experts
    return [ep for ep in divisors(experts) if ranks % ep == 0] if experts else [1]


def cp_comms(task: Task, size: Sizes, num_gpus: int) -> Iterator[CpComm]:
    """The values of cp_comm that the layout allows, p2p first."""
    special = task.config.model.portable_only or task.config.auto_is_portable
    if special or not task.config.attention.may_be_te(task.config.run.device):
        yield P2P  # only the portable backend can run the model, and it ignores the key
        return
    for cp_comm in _cp_comms_of(size.cp):
        if _is_valid_parallel(size, cp_comm):
            if not misfits(configured(task.config, Choice(size, cp_comm, Savings())), num_gpus):
                yield cp_comm


def shard_kinds(task: Task) -> list[Shard]:
    """The values of parallel.shard, without the default, that the recipe allows."""
    kinds: list[Shard] = ["gradients", "weights"]
    return [kind for kind in kinds if _is_valid(task.config, Savings(), Shards(kind))]


def shards(task: Task, kinds: Iterable[Shard], size: Sizes, num_gpus: int) -> Iterator[Shards]:
    """The values of parallel.shard and shard_size for this layout, the default first.

    If the ranks are on several nodes, gradients and weights may also be divided within a node, with a copy on each.

    kinds: the result of `shard_kinds`
    """
    yield Shards()
    ranks, in_node = num_gpus // (size.tp * size.pp), task.hardware.gpus_per_node // size.tp
    for kind in kinds:
        for shard_size in (None, in_node) if 1 < in_node < ranks else (None,):
            choice = Choice(size, P2P, Savings(), Shards(kind, shard_size))
            if _is_valid_parallel(size, P2P, choice.shards):
                if not misfits(configured(task.config, choice), num_gpus):
                    yield choice.shards


@lru_cache
def _cp_comms_of(cp: int) -> list[CpComm]:
    if cp == 1:
        return [P2P]
    two_levels = [CpComm("a2a+p2p", size) for size in divisors(cp) if 1 < size < cp]
    return [P2P, CpComm("all_gather", None), CpComm("a2a", None), *two_levels]


@lru_cache(maxsize=4096)
def _is_valid_parallel(size: Sizes, cp_comm: CpComm, shards: Shards = Shards()) -> bool:
    try:
        ParallelConfig.model_validate(size._asdict() | cp_comm._asdict() | shards._asdict())
    except ValidationError:
        return False
    return True


def savings(task: Task, *, in_chunks: bool = False) -> list[Savings]:
    """The savings that the recipe allows.  If one `saves_at_least` as much as another, it comes after the other.

    in_chunks: whether attention is computed by chunks of heads
    """
    chunks = (_HEAD_CHUNKS if in_chunks else None,)
    axes: tuple[Any, ...] = (RECOMPUTE, (0.0, 1.0), (0.0, 1.0), (None, _TILE), ("auto", _CHUNK), chunks)
    ordered = sorted(product(*axes), key=lambda values: _levels(Savings(*values)))
    return [saving for values in ordered if _is_valid(task.config, saving := Savings(*values))]


def saves_at_least(more: Savings, less: Savings) -> bool:
    """Whether each setting of `more` saves at least as much memory as that of `less`.  Then `more` cannot be faster.

    selective and attention_kept cannot be compared: in linear attention, selective may save more and take longer.
    """
    if {more.recompute, less.recompute} == {"selective", "attention_kept"}:
        return False
    return all(a >= b for a, b in zip(_levels(more), _levels(less), strict=True))


def _levels(saving: Savings) -> tuple[float, ...]:
    """Each setting as a number that grows with the saved memory.

    The settings that cost the least time come last, so that they vary first in a sorted list.
    """
    return (
        saving.optim_offload_fraction,
        RECOMPUTE.index(saving.recompute),
        saving.offload_fraction,
        saving.mlp_tile is not None,
        saving.chunk_size != "auto",
    )


def _is_valid(config: Config, saving: Savings, shards: Shards = Shards()) -> bool:
    """Whether the schema accepts these settings."""
    plain = Sizes(tp=1, cp=1, pp=1, virtual_stages=1, ep=1, dynamic_cp=False)
    changed = configured(config, Choice(plain, P2P, saving, shards))
    sections = {name: getattr(changed, name) for name in type(changed).model_fields}
    sections |= {
        name: sections[name].model_dump() for name in ("parallel", "train", "optim", "loss")
    }  # validates these again
    try:
        Config.model_validate(sections)
    except ValidationError:
        return False
    return True
