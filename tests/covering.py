"""Covering sets: a few cases in which every pair of values of any two dimensions occurs.

A fault of a layout usually needs one setting or a combination of two settings (tp with sequence parallel, virtual
stages with recompute), hardly ever of three.  So a test runs a covering set instead of the whole grid.  The set is
built one case at a time: of all cases that fit, the next one is the first case with the most pairs that the set does
not contain yet, until the set contains every pair of the grid.

    {"a": [1, 2], "b": [1, 2], "c": [1, 2]}, all fit: 8 cases
    -> a b c = 1 1 1, 1 2 2, 2 1 2, 2 2 1: 4 cases, 12 pairs
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np

Case = dict[str, Any]


def all_cases(dimensions: Mapping[str, Sequence[Any]], fits: Callable[[Case], bool]) -> list[Case]:
    """The grid: every case that fits.  The values of the last dimension change fastest."""
    cases = (dict(zip(dimensions, values)) for values in product(*dimensions.values()))
    return [case for case in cases if fits(case)]


def covering_set(dimensions: Mapping[str, Sequence[Any]], fits: Callable[[Case], bool]) -> list[Case]:
    """Cases that together contain every pair of values of the grid.  Every call returns the same cases."""
    cases = all_cases(dimensions, fits)
    pair_ids: dict[Any, int] = {}
    held = [
        [pair_ids.setdefault(pair, len(pair_ids)) for pair in combinations(case.items(), 2)] for case in cases
    ]  # [cases, pairs of dimensions]: the pair of values that each case has
    missing = np.full(len(pair_ids), True)
    chosen: list[Case] = []
    pairs = np.array(held)
    while missing.any():
        best = int(missing[pairs].sum(axis=1).argmax())
        missing[pairs[best]] = False
        chosen.append(cases[best])
    return chosen
