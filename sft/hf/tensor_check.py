"""Compares the tensors of a folder with those of a model, and reports all differences in one error."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from sft.errors import CheckpointError, first_few

_LAYER, _EXPERT = (re.compile(rf"\.{axis}\.(\d{{1,9}})\.") for axis in ("layers", "experts"))
_LINES = 20  # lines for each kind of difference; most models have fewer names after layers are folded
Shape = tuple[int, ...]


def check_tensors(
    stored: Mapping[str, Shape], wanted: Mapping[str, Shape], folder: str, *, other: Sequence[str] = ()
) -> None:
    """Raise CheckpointError if the tensors differ from the wanted ones in names or shapes, or if `other` is not empty.

    stored, wanted: shape of each tensor by name; other: lines about other problems
    The error has up to 20 lines each for missing tensors, surplus tensors, wrong shapes, and `other`.
    """
    shapes: dict[tuple[Shape, Shape], list[str]] = {}
    for name, shape in wanted.items():
        if name in stored and stored[name] != shape:
            shapes.setdefault((stored[name], shape), []).append(name)
    missing = [f"missing: {line}" for line in fold_by_layer(name for name in wanted if name not in stored)]
    surplus = [f"surplus: {line}" for line in fold_by_layer(name for name in stored if name not in wanted)]
    different = [
        f"different shape: {name} is {_shown(stored_shape)}, expected {_shown(shape)}{numbers}"
        for (stored_shape, shape), names in shapes.items()
        for name, numbers in _folded(names)
    ]
    problems = [line for kind in (missing, surplus, different, other) for line in first_few(kind, _LINES)]
    if problems:
        raise CheckpointError(f"{folder} does not hold the expected tensors:\n  " + "\n  ".join(problems))


def fold_by_layer(names: Iterable[str]) -> list[str]:
    """Join names that differ only in the numbers of layer and expert.

    ["model.layers.0.a", "model.layers.1.a", "model.b"] -> ["model.b", "model.layers.*.a (layers 0-1)"]
    Experts are joined within each layer, then layers with the same experts: (layers 0-47; experts 0-127)
    """
    return [name + numbers for name, numbers in _folded(names)]


def _folded(names: Iterable[str]) -> list[tuple[str, str]]:
    """The parts of the lines of `fold_by_layer`: ("model.layers.*.a", " (layers 0-1)")"""
    experts: dict[tuple[str, str], list[str]] = {}  # by name and layer
    for name in names:
        layer, rest = _without_number(_LAYER, name)
        expert, rest = _without_number(_EXPERT, rest)
        experts.setdefault((rest, layer), []).append(expert)
    layers: dict[tuple[str, str], list[str]] = {}  # by name and experts
    for (name, layer), numbers in experts.items():
        layers.setdefault((name, _counted("expert", numbers)), []).append(layer)
    folded = []
    for (name, expert_numbers), numbers in layers.items():
        text = "; ".join(part for part in (_counted("layer", numbers), expert_numbers) if part)
        folded.append((name, f" ({text})" if text else ""))
    return sorted(folded, key=lambda pair: pair[0])


def _without_number(pattern: re.Pattern[str], name: str) -> tuple[str, str]:
    """Replace the number that the pattern finds by *: (_LAYER, "model.layers.12.a") -> "12", "model.layers.*.a"

    Returns "" and the name if there is no number.
    """
    match = pattern.search(name)
    return (match[1], name[: match.start(1)] + "*" + name[match.end(1) :]) if match else ("", name)


def _counted(noun: str, numbers: Iterable[str]) -> str:
    """The noun and its numbers as ranges: ("layer", ["0", "1", "5"]) -> layers 0-1, 5.  "" if there are no numbers."""
    ordered = sorted({int(number) for number in numbers if number})
    return f"{noun}{'s' if len(ordered) > 1 else ''} {_ranges(ordered)}" if ordered else ""


def _ranges(numbers: Sequence[int]) -> str:
    """Write sorted numbers as ranges: [0, 1, 2, 5] -> 0-2, 5"""
    by_distance = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])  # equal for consecutive numbers
    runs = [[number for _, number in run] for _, run in by_distance]
    return ", ".join(first_few((str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs), _LINES))


def _shown(shape: Shape) -> str:
    return " x ".join(first_few(map(str, shape))) or "a single number"
