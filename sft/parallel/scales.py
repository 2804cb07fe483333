"""Refuses parallel sizes that would divide numbers of a row with one scale, of frozen weights in low bits."""

from collections.abc import Iterator

from sft.config import Config, divisors
from sft.layers.low_bits import SharedScales


def divided_scales(config: Config, scales: SharedScales | None) -> Iterator[str]:
    """Yield a message for each of tp and etp that would divide such numbers, with sizes that would not.

    scales: those of the model; None: no numbers of a part of a row share a scale
    """
    if scales is None:
        return
    stored, block = scales.stored, scales.stored.columns or 1
    for name, size, columns in (("tp", config.parallel.tp, scales.by_tp), ("etp", config.parallel.etp, scales.by_etp)):
        broken = {key: number for key, number in columns.items() if not _keeps_scales(number, size, block)}
        if broken:
            names = ", ".join(f"{key} has {number:,} columns" for key, number in broken.items())
            fitting = [
                str(other)
                for other in divisors(max(columns.values()))
                if all(_keeps_scales(number, other, block) for number in columns.values())
            ]
            yield (
                f"parallel.{name} = {size} would divide columns that share a scale: with model.base_dtype = "
                f"{config.model.base_dtype}, {block} columns share a scale ({stored.name}), and {names}.  "
                f"Sizes that fit: {', '.join(fitting)}."
            )


def _keeps_scales(columns: int, ranks: int, block: int) -> bool:
    """Whether each rank has whole blocks of columns that share a scale."""
    return ranks == 1 or columns % (ranks * block) == 0
