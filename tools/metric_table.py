"""The lines that compare_runs prints: steps as spans, and one aligned line for each metric."""

from collections.abc import Collection, Mapping, Sequence

from tools.metric_differences import Row


def spans(steps: Collection[int], limit: int = 8) -> str:
    """[1, 2, 3, 7, 9, 10] -> "1-3, 7, 9-10"; where there are more than `limit`: "0, 30, 60, ..., 300 (11 in all)" """
    ends: list[list[int]] = []
    for step in sorted(steps):
        if ends and step == ends[-1][1] + 1:
            ends[-1][1] = step
        else:
            ends.append([step, step])
    texts = [f"{first}-{last}" if first < last else str(first) for first, last in ends]
    return ", ".join(texts if len(texts) <= limit else [*texts[:3], "...", f"{texts[-1]} ({len(steps)} in all)"])


def short(number: float) -> str:
    """A count as it is, else 3 digits."""
    return str(number) if isinstance(number, int) else f"{number:.3g}"


def table(rows: Sequence[Row]) -> list[str]:
    """One aligned line per metric."""
    cells = [("kind", "metric", "differs", "first at step", "A", "B", "largest", "relative")]
    for row in rows:
        step, a, b = row.first or ("-", "-", "-")
        largest, relative = map(short, row.largest) if row.largest else ("-", "-")
        count = f"{row.num_different} of {row.num_steps}"
        cells.append((row.kind, row.name, count, str(step), a, b, largest, relative))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]


def extent(records: Mapping[str, Mapping[int, object]]) -> str:
    """train 1-24; eval 0, 12, 24"""
    return "; ".join(f"{kind} {spans(steps)}" for kind, steps in records.items() if steps)
