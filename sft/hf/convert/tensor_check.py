"""Whether the tensors that are there are the tensors of the model; what is wrong is told all at once."""

import re
from collections.abc import Iterable, Mapping, Sequence

from sft.errors import CheckpointError

_LAYER, _EXPERT = (re.compile(rf"\.{what}\.(\d{{1,9}})\.") for what in ("layers", "experts"))
Shape = tuple[int, ...]


def check_tensors(
    found: Mapping[str, Shape], wanted: Mapping[str, Shape], where: str, *, other: Sequence[str] = ()
) -> None:
    """Raise CheckpointError listing what is missing, surplus or of another shape.  other: further problems"""
    shapes: dict[tuple[Shape, Shape], list[str]] = {}
    for name, shape in wanted.items():
        if name in found and found[name] != shape:
            shapes.setdefault((found[name], shape), []).append(name)
    problems = [
        *(f"missing: {line}" for line in fold_by_layer(name for name in wanted if name not in found)),
        *(f"surplus: {line}" for line in fold_by_layer(name for name in found if name not in wanted)),
        *(
            f"another shape: {name} is {_shown(there)}, expected {_shown(shape)}{where}"
            for (there, shape), names in shapes.items()
            for name, where in _folded(names)
        ),
        *other,
    ]
    if problems:
        raise CheckpointError(f"{where} does not hold this model:\n  " + "\n  ".join(problems))


def fold_by_layer(names: Iterable[str]) -> list[str]:
    """model.layers.0.a, model.layers.1.a, model.b -> model.b; model.layers.*.a (layers 0-1)

    Experts are folded in each layer, and layers with the same experts: (layers 0-47; experts 0-127)
    """
    return [name + where for name, where in _folded(names)]


def _folded(names: Iterable[str]) -> list[tuple[str, str]]:
    """Names without their numbers, and where they stand: ("model.layers.*.a", " (layers 0-1)")"""
    experts: dict[tuple[str, str], list[str]] = {}  # of a name and a layer
    for name in names:
        layer, rest = _without_number(_LAYER, name)
        expert, rest = _without_number(_EXPERT, rest)
        experts.setdefault((rest, layer), []).append(expert)
    layers: dict[tuple[str, str], list[str]] = {}  # of a name and some experts
    for (name, layer), numbers in experts.items():
        layers.setdefault((name, _counted("expert", numbers)), []).append(layer)
    found = []
    for (name, which), numbers in layers.items():
        where = "; ".join(part for part in (_counted("layer", numbers), which) if part)
        found.append((name, f" ({where})" if where else ""))
    return sorted(found, key=lambda pair: pair[0])


def _without_number(kind: re.Pattern[str], name: str) -> tuple[str, str]:
    """(layers, "model.layers.12.a") -> "12", "model.layers.*.a"; no number: "" and the name"""
    found = kind.search(name)
    return (found[1], name[: found.start(1)] + "*" + name[found.end(1) :]) if found else ("", name)


def _counted(what: str, numbers: Iterable[str]) -> str:
    """("layer", ["0", "1", "5"]) -> layers 0-1, 5; no numbers: nothing"""
    found = sorted({int(number) for number in numbers if number})
    return f"{what}{'s' if len(found) > 1 else ''} {_ranges(found)}" if found else ""


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
