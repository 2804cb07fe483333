"""Whether the tensors that are there are the tensors of the model; what is wrong is told all at once."""

import re
from collections.abc import Iterable, Mapping, Sequence

from sft.errors import CheckpointError

_LAYER = re.compile(r"\.layers\.(\d+)\.")
Shape = tuple[int, ...]


def check(found: Mapping[str, Shape], wanted: Mapping[str, Shape], where: str, *, other: Sequence[str] = ()) -> None:
    """Raise CheckpointError listing what is missing, surplus or of another shape.  other: further problems"""
    shapes = [
        f"{name} is {_shown(found[name])}, expected {_shown(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    problems = [
        *(f"missing: {line}" for line in by_layer(name for name in wanted if name not in found)),
        *(f"surplus: {line}" for line in by_layer(name for name in found if name not in wanted)),
        *(f"another shape: {line}" for line in shapes),
        *other,
    ]
    if problems:
        raise CheckpointError(f"{where} does not hold this model:\n  " + "\n  ".join(problems))


def by_layer(names: Iterable[str]) -> list[str]:
    """model.layers.0.a, model.layers.1.a, model.b -> model.b; model.layers.*.a (layers 0-1)"""
    layers: dict[str, list[int]] = {}
    for name in names:
        found = _LAYER.search(name)
        layers.setdefault(_LAYER.sub(".layers.*.", name, count=1), []).extend([int(found[1])] if found else [])
    return [
        name + (f" (layer{'s' if len(numbers) > 1 else ''} {_ranges(sorted(numbers))})" if numbers else "")
        for name, numbers in sorted(layers.items())
    ]


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> 0-2, 5"""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _shown(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "a single number"
