"""Covering sets: few cases in which every pair of values of any two dimensions meets.

A fault of a layout needs one setting or two together (tp with sequence parallel, virtual stages with recompute), hardly
ever three.  So a test runs over a covering set instead of a grid: of all cases that fit, take the one in which most
pairs meet that have not met yet, the first of equals, until every pair that meets in any case has met.

    {"a": [1, 2], "b": [1, 2], "c": [1, 2]}, all fit: 8 cases
    -> a b c = 1 1 1, 1 2 2, 2 1 2, 2 2 1: 4 cases, 12 pairs
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np

Case = dict[str, Any]


def all_cases(dimensions: Mapping[str, Sequence[Any]], fits: Callable[[Case], bool]) -> list[Case]:
    """The grid: every case that fits, the last dimension fastest."""
    cases = (dict(zip(dimensions, values)) for values in product(*dimensions.values()))
    return [case for case in cases if fits(case)]


def covering_set(dimensions: Mapping[str, Sequence[Any]], fits: Callable[[Case], bool]) -> list[Case]:
    """Cases that together hold every pair of values that some case holds; the same at every call."""
    cases = all_cases(dimensions, fits)
    pair_ids: dict[Any, int] = {}
    held = [
        [pair_ids.setdefault(pair, len(pair_ids)) for pair in combinations(case.items(), 2)] for case in cases
    ]  # [cases, pairs of dimensions]: which pair of values each case holds
    missing = np.full(len(pair_ids), True)
    chosen: list[Case] = []
    pairs = np.array(held)
    while missing.any():
        best = int(missing[pairs].sum(axis=1).argmax())
        missing[pairs[best]] = False
        chosen.append(cases[best])
    return chosen
