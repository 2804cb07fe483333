"""Fits the constants that can be measured only in whole training steps, by least squares.  Arithmetic only.

The predicted time of a step is linear in the reciprocals of rates and in overheads:

    seconds of a step = known + elementwise bytes / elementwise_gb_s + optimizer bytes / optimizer_gb_s + ...

`known` are the parts whose constants were measured directly.  The fit minimises the relative errors of all steps, with
no negative time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import inf
from typing import Any

import numpy as np

from sft.calibration.steps import Step
from sft.estimate.constants import Constant, Constants
from sft.estimate.lengths import Lengths
from sft.estimate.step_time import step_time

# name: whether the constant is a rate, whose reciprocal is fitted
FITTED: Mapping[str, bool] = {
    "elementwise_gb_s": True,
    "optimizer_gb_s": True,
    "layer_overhead_us": False,
    "grouped_gemm": True,
}
# The largest fitted rate is MOST times the assumed rate.  So a part that takes no time in the measured steps still gets
# a small time.
MOST = 100.0


def fitted(constants: Constants, steps: Sequence[Step], source: str) -> Constants:
    """`constants` with new values for the names in FITTED: the values that explain the measured steps best.

    source: the source of the new values
    """
    without = {name: Constant(inf if is_rate else 0.0, "") for name, is_rate in FITTED.items()}
    known = _predicted(constants, steps, without)
    columns = [_predicted(constants, steps, without | {name: Constant(1.0, "")}) - known for name in FITTED]
    measured = np.array([step.seconds for step in steps])
    solved = least_squares(np.stack(columns, axis=1) / measured[:, None], (measured - known) / measured)
    changes: dict[str, Any] = {}
    for (name, is_rate), number in zip(FITTED.items(), solved.tolist(), strict=True):
        largest = MOST * getattr(constants, name).value
        value = min(largest, 1 / number if number else inf) if is_rate else number
        changes[name] = Constant(value, source)
    return replace(constants, **changes)


def errors(constants: Constants, steps: Sequence[Step]) -> dict[str, float]:
    """(predicted - measured) / measured, by step."""
    predicted = _predicted(constants, steps, {})
    return {step.name: float(seconds / step.seconds - 1) for step, seconds in zip(steps, predicted)}


def least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x >= 0 [n] with the smallest |matrix x - target|; matrix [m, n], target [m].

    Tries every subset of the elements of x as the positive elements.

    matrix [[1, 0], [0, 1]], target [2, -1] -> [2, 0]
    """
    number = matrix.shape[1]
    best, least = np.zeros(number), float(target @ target)
    for size in range(1, number + 1):
        for used in map(list, combinations(range(number), size)):
            solved = np.linalg.lstsq(matrix[:, used], target, rcond=None)[0]
            rest = matrix[:, used] @ solved - target
            if (solved > 0).all() and float(rest @ rest) < least:
                best, least = np.zeros(number), float(rest @ rest)
                best[used] = solved
    return best


def _predicted(constants: Constants, steps: Sequence[Step], changes: Mapping[str, Any]) -> np.ndarray:
    """Predicted seconds of each step: float64 [steps].  changes: values that replace fields of `constants`"""
    changed = replace(constants, **changes)
    return np.array(
        [
            step_time(
                step.config, step.layout, step.config.model.vocab_size or 0,
                Lengths.all_of(step.config.data.seq_length), changed,
            ).step_s
            for step in steps
        ]
    )  # fmt: skip
