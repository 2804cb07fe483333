"""What the plan of a run comes to, before a GPU is touched: `sft data plan`.

Decides what is printed of it.  Everything is taken from a `Loader`, so it is what the run does.  Nothing is read but
lengths: no sample.
"""

from collections.abc import Iterable
from pathlib import Path
from statistics import median

import numpy as np

from sft.config import Config
from sft.data.cache.corpus import Corpus
from sft.data.loader import Loader, make_loader
from sft.data.packing.balance import costs, efficiency
from sft.data.packing.bounds import Bounds, bounds
from sft.data.packing.mixture import Mixture
from sft.data.packing.plan import Plan
from sft.data.packing.plan_files import follows_from, write_plans
from sft.flops import attention_crossover
from sft.parallel.alignment import aligned, smallest_world
from sft.parallel.layout import Layout

LOOKED_AT = 50  # global batches, spread over the epoch, that are balanced for the forecast
LIMITED = 0.95  # below this a larger cp is looked for


def loader_of(config: Config, layout: Layout, corpus: Corpus) -> Loader:
    """The loader of rank 0 as `sft train` makes it, but for the tokens' positions: it plans and makes no microbatch."""
    return make_loader(
        config,
        layout,
        corpus,
        pad_id=0,
        local_indices=lambda cu_seqlens: np.arange(cu_seqlens[-1]),
    )


def forecast(config: Config, layout: Layout, corpus: Corpus) -> dict[str, list[str]]:
    """Lines to print by what they are about, on the first epoch."""
    loader = loader_of(config, layout, corpus)
    plan = loader.plans.plan(0)
    steps = loader.plans.steps_per_epoch(0)
    looked_at = np.unique(np.linspace(0, steps - 1, min(steps, LOOKED_AT)).astype(int)).tolist()
    return {
        "packs": _packs(config, plan, corpus),
        "steps": _steps(config, plan, corpus),
        "sources": _sources(config, plan, corpus),
        "balance": _balance(config, layout, corpus, loader, looked_at),
    }


def write_run(path: Path, config: Config, layout: Layout, corpus: Corpus) -> str:
    """Writes the plans of all epochs of a run, and says how many those are."""
    loader = loader_of(config, layout, corpus)
    epochs = config.train.num_epochs or 1 + loader.plans.locate((config.train.num_steps or 1) - 1)[0]
    plans = [loader.plans.plan(epoch) for epoch in range(epochs)]
    write_plans(path, follows_from(config, corpus), plans, layout.global_batch_size)
    batches = sum(plan.num_batches(layout.global_batch_size) for plan in plans)
    of = f"{batches:,} global batches of {epochs} epoch{'s' * (epochs > 1)}"
    return f"{path}: {of}; a run follows it with data.plan={path}"


def _packs(config: Config, plan: Plan, corpus: Corpus) -> list[str]:
    """Packs and where their capacity goes; the shares add up to 1."""
    packs, size, batch = len(plan), config.data.seq_length, config.train.global_batch_size
    missing = -packs % batch
    capacity = (packs + missing) * size
    lengths = corpus.lengths[plan.samples]
    real, padded = int(lengths.sum()), int(aligned(lengths, config.data.doc_multiple).sum())
    causes = (
        ("tokens", real),
        ("alignment", padded - real),
        ("tail", packs * size - padded),
        (f"filler of the last batch ({missing} packs)", missing * size),
    )
    return [
        f"{packs:,} packs of at most {size:,} tokens, {plan.fill:.2%} full; {len(plan.samples):,} samples of "
        f"{len(corpus):,}",
        "of their capacity: " + ", ".join(f"{name} {tokens / capacity:.2%}" for name, tokens in causes),
    ]


def _steps(config: Config, plan: Plan, corpus: Corpus) -> list[str]:
    batch = config.train.global_batch_size
    tokens, supervised = (_per_step(plan, of[plan.samples], batch) for of in (corpus.lengths, corpus.num_supervised))
    lines = [f"steps per epoch {len(tokens):,} = {len(plan):,} packs / global_batch_size {batch}, rounded up"]
    if config.train.num_steps:
        lines.append(f"num_steps {config.train.num_steps:,} = {config.train.num_steps / len(tokens):.2f} epochs")
    for name, counts in (("tokens", tokens), ("supervised tokens", supervised)):
        low, middle, high = counts.min(), int(np.median(counts)), counts.max()
        lines.append(f"{name} per step {low:,} / {middle:,} / {high:,} (min / median / max), {counts.sum():,} in all")
    return lines


def _per_step(plan: Plan, counts: np.ndarray, global_batch_size: int) -> np.ndarray:
    """Sums over each global batch of counts [samples of the plan]."""
    return np.add.reduceat(counts, plan.starts[:-1:global_batch_size])


def _sources(config: Config, plan: Plan, corpus: Corpus) -> list[str]:
    """chat 70.01% of tokens (wanted 70.00%), each sample 1.75 times"""
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


def _balance(config: Config, layout: Layout, corpus: Corpus, loader: Loader, looked_at: list[int]) -> list[str]:
    crossover, multiple = attention_crossover(config.model), config.data.doc_multiple
    work = costs(corpus.lengths, doc_multiple=multiple, crossover=crossover)
    levels, limits = [], []
    for step in looked_at:
        slots = loader.slots(step)
        levels.append(efficiency(np.array([[work[list(ids)].sum() for ids in rank] for rank in slots])))
        limits.append(_limits(config, corpus, loader, step, layout.dp))
    per_step, per_microbatch = zip(*levels)
    lines = [
        f"attention takes as long as all else at {crossover:,.0f} tokens; {len(looked_at)} batches looked at",
        f"efficiency per step {_spread(per_step)}, of at most {_spread(x.full for x in limits)}",
        f"efficiency per microbatch {_spread(per_microbatch)}, of at most {_spread(x.microbatch for x in limits)}",
        f"longest sequence alone: at most {_spread(x.longest for x in limits)}",
    ]
    if median(x.full for x in limits) < LIMITED:
        lines.append(_larger_cp(config, layout, corpus, loader, looked_at))
    return lines


def _limits(config: Config, corpus: Corpus, loader: Loader, step: int, dp: int) -> Bounds:
    ids = [i for pack in loader.plans.global_batch(step) for i in pack]
    return bounds(
        corpus.lengths[ids],
        dp=dp,
        num_microbatches=config.train.global_batch_size // dp,
        seq_length=config.data.seq_length,
        doc_multiple=config.data.doc_multiple,
        crossover=attention_crossover(config.model),
    )


def _larger_cp(config: Config, layout: Layout, corpus: Corpus, loader: Loader, looked_at: list[int]) -> str:
    """Which cp would do, with the same tp, pp and processes."""
    advice = "no larger cp fits that would do"
    ranks = layout.world_size // smallest_world(config) * layout.cp  # dp * cp
    for cp in range(2 * layout.cp, ranks + 1, layout.cp):
        fits = ranks % cp == 0 and config.train.global_batch_size % (ranks // cp) == 0
        if fits:
            reached = median(_limits(config, corpus, loader, step, ranks // cp).full for step in looked_at)
            if reached >= LIMITED:
                multiple = "" if config.data.doc_multiple % (2 * cp) == 0 else f" and data.doc_multiple={2 * cp}"
                advice = f"parallel.cp={cp}{multiple} would lift the limit to {reached:.1%}"
                break
    return f"no assignment can be level, as one rank has the longest sequence; {advice}"


def _spread(shares: Iterable[float]) -> str:
    values = list(shares)
    return f"{min(values):.1%} / {median(values):.1%} (min / median)"
