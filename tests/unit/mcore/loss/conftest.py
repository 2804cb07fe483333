"""The tensor-parallel group for tests of the loss head."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    # Imported here because this imports Triton, and test_loss_triton.py must first set a variable.
    from tests.unit.loss_cases import world_of_one

    with world_of_one() as tp:
        yield tp
