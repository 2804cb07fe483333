"""What torch's flash kernel is fed gives the numbers of the plain tiles, with a stand-in for the kernel on the CPU."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest

from sft.mcore.backends import kernels
from tests.plain_flash import PLAIN
from tests.ranks import scenarios
from tests.ranks.layouts import GRADIENT_TOLERANCE
from tests.ranks.pool import Ranks

LOSS_TOLERANCE = 1e-6  # fp32, sums in another order
PACKS = [[1, 2, 3, 5], [0], [11, 10, 6]]


def by_flash(overrides: Sequence[str], packs: Sequence[Sequence[int]]) -> dict[str, Any]:
    with mock.patch.object(kernels, "FLASH", {"a replacement": PLAIN}):
        return scenarios.gradients(overrides, packs)


@pytest.mark.parametrize("cp,recompute", [(1, "none"), (2, "selective"), (4, "full")])
def test_loss_and_gradients_are_those_of_the_tiles(ranks: Ranks, cp: int, recompute: str) -> None:
    recipe = [f"parallel.cp={cp}", "train.global_batch_size=3", "model.init_std=0.2", f"train.recompute={recompute}"]
    expected = ranks(cp).run(scenarios.gradients, recipe, PACKS)
    for tiles, found in zip(expected, ranks(cp).run(by_flash, recipe, PACKS)):
        assert found["num_tokens"] == tiles["num_tokens"]
        assert found["loss"] == pytest.approx(tiles["loss"], rel=LOSS_TOLERANCE)
        for name, gradient in tiles["gradients"].items():
            error = np.linalg.norm(found["gradients"][name] - gradient)
            assert error <= GRADIENT_TOLERANCE * np.linalg.norm(gradient), name
