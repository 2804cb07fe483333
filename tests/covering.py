"""Computes covering sets: a few cases in which every pair of values of any two dimensions occurs.

A fault of a layout usually needs one setting or a combination of two settings (tp with sequence parallel, virtual
stages with recompute), hardly ever of three.  So a test runs a covering set instead of the whole grid.  The set is
built one case at a time: of all cases that fit, the next one is the first case with the most pairs that the set does
not contain yet, until the set contains every pair of the grid.

    {"a": [1, 2], "b": [1, 2], "c": [1, 2]}, all fit: 8 cases
    -> a b c = 1 1 1, 1 2 2, 2 1 2, 2 2 1: 4 cases, 12 pairs
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

Case = dict[str, Any]
Rule = Callable[..., bool]  # its parameters are dimensions, and it says whether their values fit together


def all_cases(dimensions: Mapping[str, Sequence[Any]], rules: Sequence[Rule]) -> list[Case]:
    """The grid: every case that fits all rules.  The values of the last dimension change fastest.

    A rule is applied as soon as its dimensions have values: the grid of tests/ranks/layouts.py has 20 million cases
    without rules, and every process that imports it waits for it.
    """
    cases: list[Case] = [{}]
    waiting = [(rule, tuple(inspect.signature(rule).parameters)) for rule in rules]
    for name, values in dimensions.items():
        cases = [{**case, name: value} for case in cases for value in values]
        ready = [(rule, names) for rule, names in waiting if cases[0].keys() >= {*names}]
        waiting = [one for one in waiting if one not in ready]
        cases = [case for case in cases if all(rule(*(case[key] for key in names)) for rule, names in ready)]
    assert not waiting, waiting
    return cases


def covering_set(
    dimensions: Mapping[str, Sequence[Any]], rules: Sequence[Rule] = (), in_twos: Sequence[str] = ()
) -> list[Case]:
    """Cases that together contain every pair of values of the grid.  Every call returns the same cases.

    in_twos: dimensions of which two cases of a test must have the same values.  Of several best cases, the next one is
        the first with the values of an odd number of chosen cases
    """
    cases = all_cases(dimensions, rules)
    alike: dict[tuple[Any, ...], int] = {}
    values_of = [alike.setdefault(tuple(case[name] for name in in_twos), len(alike)) for case in cases]
    same, is_single = np.array(values_of), np.zeros(len(alike), dtype=bool)
    places = [np.array([values.index(case[name]) for case in cases], np.int16) for name, values in dimensions.items()]
    sizes = [len(values) for values in dimensions.values()]
    # [pairs of dimensions][cases]: the number of the pair of values that each case has
    held = [places[a] * sizes[b] + places[b] for a, b in combinations(range(len(sizes)), 2)]
    missing = [{*np.unique(numbers).tolist()} for numbers in held]
    scores = np.full(len(cases), len(held), np.int16)  # how many missing pairs each case has
    chosen: list[Case] = []
    while any(missing):
        best = int((2 * scores + is_single[same]).argmax())
        is_single[same[best]] ^= True
        chosen.append(cases[best])
        for numbers, left in zip(held, missing):
            if (covered := int(numbers[best])) in left:
                left.remove(covered)
                scores -= numbers == covered
    return chosen
