"""The tensor-parallel group of the tests of the loss head."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.unit.loss_cases import world_of_one


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with world_of_one() as tp:
        yield tp
