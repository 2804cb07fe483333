"""Summarises the plan of a run without a GPU, for `sft data plan`.

Decides which numbers of a plan are printed.  Also computes the best balance that any assignment of samples to ranks can
reach (`bounds`).  The packs come from a `Loader`, so a run trains on the same packs.  Reads only lengths, no tokens.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from sft.config import Config
from sft.data.cache.corpus import Corpus
from sft.data.inspect import cp_forecast
from sft.data.loader import Loader
from sft.data.packing.balance import costs, efficiency
from sft.data.packing.mixture import Mixture
from sft.data.packing.plan import PackingPlan
from sft.data.packing.plan_files import follows_from, write_plans
from sft.layers.flops import AttentionCost
from sft.parallel.alignment import smallest_world
from sft.parallel.shapes import SampleSizes, padded

LOOKED_AT = 50  # number of global batches whose balance is computed, at equal distances in the epoch
LIMITED = 0.95  # if no assignment can reach this efficiency, the forecast suggests a larger cp


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Upper limits of dp efficiency (mean cost of a rank / largest cost of a rank) for any assignment.  1: no limit

    longest     one rank computes the costliest sequence:  total cost / (dp * cost of the costliest sequence)
    full        this rank also computes the tokens that do not fit into the packs of other ranks
    microbatch  the limit if ranks wait for each other after every microbatch

    The costliest sequence costs 100, all sequences cost 400, dp 8 -> longest 400 / (8 * 100) = 0.5.  Only a larger cp
    raises the limit: dp becomes smaller, and more ranks share this sequence.
    """

    longest: float
    full: float
    microbatch: float


def forecast(config: Config, loader: Loader) -> dict[str, list[str]]:
    """The lines of `sft data plan` about the first epoch: {topic: lines}"""
    corpus, plan = loader.corpus, loader.plans.plan(0)
    lines = {
        "packs": _packs(config, plan, corpus),
        "steps": _steps(config, plan, corpus),
        "sources": _sources(config, plan, corpus),
    }
    if loader.layout.cp_sizes:
        batches = cp_forecast.batches_of(loader, LOOKED_AT)
        return lines | {"cp size": cp_forecast.lines(config, batches), "balance": _dynamic_balance(config, batches)}
    return lines | {"balance": [*_balance(config, loader), *cp_forecast.advice(config, loader)]}


def write_run(path: Path, config: Config, loader: Loader) -> str:
    """Writes the plans of all epochs of a run to `path`, for data.plan.  Returns a line with the numbers of batches and
    epochs."""
    num_steps, batch_size = config.train.num_steps or 1, loader.layout.global_batch_size
    loader.plans.check_work(config.train.num_epochs or -(-num_steps // loader.plans.steps_per_epoch(0)))
    epochs = config.train.num_epochs or 1 + loader.plans.locate(num_steps - 1)[0]
    plans = [loader.plans.plan(epoch) for epoch in range(epochs)]
    write_plans(path, follows_from(config, loader.corpus), plans, batch_size)
    batches = sum(plan.num_batches(batch_size) for plan in plans)
    of = f"{batches:,} global batches of {epochs} epoch{'s' * (epochs > 1)}"
    return f"{path}: {of}; a run follows it with data.plan={path}"


def _packs(config: Config, plan: PackingPlan, corpus: Corpus) -> list[str]:
    """Lines about packs, and about the shares of their capacity that tokens and each kind of padding take."""
    packs, size, batch = len(plan), config.data.seq_length, config.train.global_batch_size
    missing = -packs % batch
    capacity = (packs + missing) * size
    samples = corpus.shapes[plan.samples]
    real, aligned_tokens = int(np.asarray(samples).sum()), int(padded(samples, config.data.doc_multiple).sum())
    causes = (
        ("tokens", real),
        ("alignment", aligned_tokens - real),
        ("ends of packs", packs * size - aligned_tokens),
        (f"empty packs of the last batch ({missing})", missing * size),
    )
    return [
        f"{packs:,} packs of at most {size:,} tokens, {plan.fill:.2%} full; {len(plan.samples):,} samples of "
        f"{len(corpus):,}",
        "of their capacity: " + ", ".join(f"{name} {tokens / capacity:.2%}" for name, tokens in causes),
    ]


def length_lines(config: Config, plan: PackingPlan) -> list[str]:
    """Lines about the number of steps per epoch and the number of epochs of the run."""
    batch = config.train.global_batch_size
    steps = plan.num_batches(batch)
    lines = [f"steps per epoch {steps:,} = {len(plan):,} packs / global_batch_size {batch}, rounded up"]
    if config.train.num_steps:
        lines.append(f"num_steps {config.train.num_steps:,} = {config.train.num_steps / steps:.2f} epochs")
    return lines


def _steps(config: Config, plan: PackingPlan, corpus: Corpus) -> list[str]:
    lines, firsts = length_lines(config, plan), plan.starts[: -1 : config.train.global_batch_size]
    labels = corpus.num_supervised - (corpus.num_repeated if config.loss.shared == "once" else 0)
    for name, of_sample in (("tokens", corpus.lengths), ("supervised tokens", labels)):
        counts = np.add.reduceat(of_sample[plan.samples], firsts)  # sum of each step
        low, middle, high = counts.min(), int(np.median(counts)), counts.max()
        lines.append(f"{name} per step {low:,} / {middle:,} / {high:,} (min / median / max), {counts.sum():,} in all")
    return lines


def _sources(config: Config, plan: PackingPlan, corpus: Corpus) -> list[str]:
    """One line per source, such as "chat 70.01% of tokens (wanted 70.00%), seen 1.75 times"."""
    sources, lengths = corpus.source_ids, corpus.lengths
    taken = np.bincount(sources[plan.samples], weights=lengths[plan.samples], minlength=len(corpus.sources))
    held = np.bincount(sources, weights=lengths, minlength=len(corpus.sources))
    mixture = Mixture.of(config.data.sources, sources, lengths)
    wanted = np.array(mixture.wanted) if mixture else held
    return [
        f"{name} {have / taken.sum():.2%} of tokens (wanted {want / wanted.sum():.2%}), seen {have / own:.2f} times"
        for name, have, want, own in zip(corpus.sources, taken, wanted, held, strict=True)
        if own
    ]


def _balance(config: Config, loader: Loader) -> list[str]:
    looked_at = cp_forecast.spread_steps(loader, LOOKED_AT)
    work = costs(loader.corpus.shapes, doc_multiple=config.data.doc_multiple, attention=loader.attention)
    levels, limits = [], []
    for step in looked_at:
        slots = loader.slots(step)
        levels.append(efficiency(np.array([[work[list(ids)].sum() for ids in rank] for rank in slots])))
        limits.append(_limits(loader, step, loader.layout.dp))
    per_step, per_microbatch = zip(*levels)
    lines = [
        f"{_equal_length(loader.attention)}; {len(looked_at)} batches checked",
        f"efficiency per step {_spread(per_step)}, of at most {_spread(x.full for x in limits)}",
        f"efficiency per microbatch {_spread(per_microbatch)}, of at most {_spread(x.microbatch for x in limits)}",
        f"longest sequence alone: at most {_spread(x.longest for x in limits)}",
    ]
    if median(x.full for x in limits) < LIMITED:
        lines.append(_larger_cp(config, loader, looked_at))
    return lines


def _dynamic_balance(config: Config, batches: Sequence[cp_forecast.BatchForecast]) -> list[str]:
    return [
        f"{_equal_length(AttentionCost.of(config.model))}; {len(batches)} batches checked",
        f"efficiency per step {_spread(b.dynamic.per_step for b in batches)}",
        f"efficiency per microbatch {_spread(b.dynamic.per_microbatch for b in batches)}",
    ]


def _equal_length(attention: AttentionCost) -> str:
    length = attention.equal_length()
    if math.isinf(length):
        return "attention takes fewer FLOPs than all else at any length"
    return f"attention takes as many FLOPs as all else at {length:,.0f} tokens"


def _limits(loader: Loader, step: int, dp: int) -> Bounds:
    ids = [i for pack in loader.plans.global_batch(step) for i in pack]
    return bounds(
        loader.corpus.shapes[ids],
        dp=dp,
        num_microbatches=loader.layout.global_batch_size // dp,
        seq_length=loader.seq_length,
        doc_multiple=loader.layout.doc_multiple,
        attention=loader.attention,
    )


def _larger_cp(config: Config, loader: Loader, looked_at: list[int]) -> str:
    """A line of advice: the next larger cp with which `Bounds.full` is at least LIMITED, with the same tp, pp and world
    size."""
    advice, layout = "no larger cp that fits would help", loader.layout
    ranks = layout.world_size // smallest_world(config) * layout.cp  # dp * cp
    for cp in range(2 * layout.cp, ranks + 1, layout.cp):
        fits = ranks % cp == 0 and config.train.global_batch_size % (ranks // cp) == 0
        if fits:
            reached = median(_limits(loader, step, ranks // cp).full for step in looked_at)
            if reached >= LIMITED:
                multiple = "" if config.data.doc_multiple % (2 * cp) == 0 else f" and data.doc_multiple={2 * cp}"
                advice = f"parallel.cp={cp}{multiple} would lift the limit to {reached:.1%}"
                break
    return f"no assignment is balanced, because one rank must take the longest sequence; {advice}"


def _spread(shares: Iterable[float]) -> str:
    values = list(shares)
    return f"{min(values):.1%} / {median(values):.1%} (min / median)"


def bounds(
    lengths: SampleSizes,
    *,
    dp: int,
    num_microbatches: int,
    seq_length: int,
    doc_multiple: int,
    attention: AttentionCost,
) -> Bounds:
    """The limits for the sequences of one global batch on dp ranks with num_microbatches packs each.

    lengths: the sizes of the n sequences, without padding
    """
    sizes = padded(lengths, doc_multiple)
    work = costs(lengths, doc_multiple=doc_multiple, attention=attention)
    total, longest = int(work.sum()), int(work.argmax())
    full = _rest_of_its_rank(sizes, work - sizes, longest, int(sizes.sum()) - (dp - 1) * num_microbatches * seq_length)
    rows = _cost_of_rows(np.asarray(lengths), sizes, work, (num_microbatches, dp), seq_length, attention)
    return Bounds(
        longest=min(1.0, total / (dp * int(work[longest]))),
        full=min(1.0, total / (dp * (int(work[longest]) + full))),
        microbatch=min(1.0, total / (dp * rows)),
    )


def _rest_of_its_rank(sizes: np.ndarray, squares: np.ndarray, longest: int, least: int) -> int:
    """A lower limit of the cost of the further sequences on the rank with the costliest sequence.

    sizes, squares  int64 [n]: padded tokens, and attention cost, of each sequence
    longest         index of the costliest sequence
    least           number of tokens that this rank takes at least, because the packs of other ranks are full

    A token costs 1 without attention.  Attention costs least for the sequences with the least attention per token.
    """
    tokens = max(0, least - int(sizes[longest]))
    cheapest = np.argsort(squares / sizes, kind="stable")
    cheapest = cheapest[cheapest != longest]
    whole = np.cumsum(sizes[cheapest]) <= tokens
    return tokens + int(squares[cheapest][whole].sum())


def _cost_of_rows(
    lengths: np.ndarray,
    sizes: np.ndarray,
    work: np.ndarray,
    shape: tuple[int, int],
    seq_length: int,
    attention: AttentionCost,
) -> float:
    """A lower limit of the time of a step whose ranks wait for each other after every microbatch.

    The packs of one microbatch on all ranks are a row; a row takes as long as its costliest pack.

    lengths, sizes, work  [n]: tokens, padded tokens and cost of each sequence
    shape                 number of rows (microbatches), and number of packs in a row (dp)

    Two sequences longer than half a pack never share a pack.  So if there are k such sequences, the k-th costliest pack
    costs at least as much as the k-th costliest of these sequences.  A pack costs at most as much as a full pack of
    sequences as long as its longest.
    """
    count = shape[0] * shape[1]
    order = np.argsort(-lengths, kind="stable")[:count]
    longest = lengths[order]
    floors, ceilings = np.zeros((2, count))
    costliest = np.sort(work[sizes > seq_length // 2])[::-1][:count]
    floors[: len(costliest)] = costliest
    whole = seq_length // longest
    of_attention = whole * attention(longest) + attention(seq_length - whole * longest)
    ceilings[: len(order)] = seq_length + of_attention + len(lengths) / 2  # costs are rounded
    floors, ceilings = floors.reshape(shape), ceilings.reshape(shape)
    least = floors[:, :1]
    missing = work.sum() - np.minimum(least, ceilings).sum()
    return float(least.sum() + max(0.0, missing) / shape[1])
