"""Draws docs/pictures/packing.svg: one global batch on 8 ranks with 4 microbatches each, in order and balanced.

    python -m tools.pages

Lengths have the distribution `longmix` of tools/bench/mixes.py, with seq_length 128K.  The length of a bar is the work
of a rank in a step.  A block of a bar is one long document, or all short documents of a pack.  A black line ends a
microbatch.
"""

import numpy as np

from sft.data.packing.balance import Slots, assign, costs
from sft.data.packing.plan import plan_epoch
from sft.layers.flops import AttentionCost

SEQ_LENGTH, MULTIPLE, CROSSOVER, DP, MICROBATCHES = 131072, 32, 53_248.0, 8, 4
WIDTH, ROW, LEFT, PANEL = 620, 18, 60, 190
LONG = 4096
SHADES = ((65536, "#1f4e79"), (16384, "#2e75b6"), (LONG, "#9dc3e6"), (0, "#deebf7"))


def panel(title: str, slots: Slots, lengths: np.ndarray, work: np.ndarray, scale: float, top: int) -> list[str]:
    """SVG elements of one assignment: the bars of all ranks, and lines at the mean and at the largest bar."""
    loads = [sum(int(work[i]) for ids in rank for i in ids) for rank in slots]
    mean, largest = sum(loads) / DP, max(loads)
    parts = [f'<text x="{LEFT}" y="{top}" font-weight="bold">{title}: {mean / largest:.0%} of ideal</text>']
    for rank, packs in enumerate(slots):
        x, y, ends = float(LEFT), top + 10 + ROW * rank, []
        parts.append(f'<text x="{LEFT - 6}" y="{y + 11}" text-anchor="end">rank {rank}</text>')
        for ids in packs:
            long = sorted((i for i in ids if lengths[i] >= LONG), key=lambda i: -lengths[i])
            short = sum(int(work[i]) for i in ids if lengths[i] < LONG)
            for length, cost in [*((int(lengths[i]), int(work[i])) for i in long), (0, short)]:
                wide, shade = cost * scale, next(colour for least, colour in SHADES if length >= least)
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="14" fill="{shade}" stroke="white"/>'
                )
                x += wide
            ends.append(f'<path d="M{x:.1f} {y - 1}v16" stroke="black" stroke-width="1.2"/>')
        parts += ends
    for load, dash in ((mean, "4 3"), (largest, "none")):
        x = LEFT + load * scale
        parts.append(f'<path d="M{x:.1f} {top + 6}v{ROW * DP + 2}" stroke="#c00000" stroke-dasharray="{dash}"/>')
    return parts


def picture() -> str:
    rng = np.random.default_rng(5)
    long = rng.random(6000) < 0.02
    drawn = np.where(long, 8192 * 16 ** rng.random(6000), rng.lognormal(np.log(600), 1.1, 6000))
    lengths = np.clip(drawn.astype(np.int64), 1, SEQ_LENGTH)
    work = costs(lengths, doc_multiple=MULTIPLE, attention=AttentionCost(CROSSOVER))
    plan = plan_epoch(lengths, capacity=SEQ_LENGTH, doc_multiple=MULTIPLE, seed=0, epoch=0, shuffle=True)
    packs = plan.batch(0, DP * MICROBATCHES)
    plain = [packs[rank::DP] for rank in range(DP)]
    level = assign(
        packs, lengths, dp=DP, seq_length=SEQ_LENGTH, doc_multiple=MULTIPLE, attention=AttentionCost(CROSSOVER)
    )
    scale = (WIDTH - LEFT - 20) / max(sum(int(work[i]) for ids in rank for i in ids) for rank in plain)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {2 * PANEL + 30}" font-family="sans-serif" '
        'font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        *panel("packs as planned, in order", plain, lengths, work, scale, 18),
        *panel("the same sequences, balanced", level, lengths, work, scale, 18 + PANEL),
    ]
    for index, (least, colour) in enumerate(SHADES):
        x, y = LEFT + 140 * index, 2 * PANEL + 12
        parts.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{y}">{f"{least >> 10}K tokens or more" if least else "shorter"}</text>')
    return "\n".join([*parts, "</svg>\n"])
