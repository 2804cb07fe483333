"""Refuses parallel sizes that would divide numbers of a row with one scale, of frozen weights in low bits."""

from collections.abc import Iterator

from sft.config import Config, divisors
from sft.layers.low_bits import split_columns, weight_format


def divided_scales(config: Config) -> Iterator[str]:
    """Yield a message for each of tp and etp that would divide such numbers, with sizes that would not."""
    stored = weight_format(config.model)
    if stored is None or stored.columns is None:
        return
    for name, size, by_expert in (("tp", config.parallel.tp, False), ("etp", config.parallel.etp, True)):
        columns = split_columns(config.model, stored, by_expert=by_expert)
        broken = {key: number for key, number in columns.items() if not _keeps_scales(number, size, stored.columns)}
        if broken:
            names = ", ".join(f"{key} has {number:,} columns" for key, number in broken.items())
            fitting = [
                str(other)
                for other in divisors(max(columns.values()))
                if all(_keeps_scales(number, other, stored.columns) for number in columns.values())
            ]
            yield (
                f"parallel.{name} = {size} would divide columns that share a scale: with model.base_dtype = "
                f"{config.model.base_dtype}, {stored.columns} columns share a scale ({stored.name}), and {names}.  "
                f"Sizes that fit: {', '.join(fitting)}."
            )


def _keeps_scales(columns: int, ranks: int, block: int) -> bool:
    """Whether each rank has whole blocks of columns that share a scale."""
    return ranks == 1 or columns % (ranks * block) == 0
