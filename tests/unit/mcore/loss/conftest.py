"""The tensor-parallel group of the tests of the loss head."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    # Not at the top: this imports Triton, for which test_loss_triton.py sets a variable first.
    from tests.unit.loss_cases import world_of_one

    with world_of_one() as tp:
        yield tp
