"""The inputs of the loss: weights of tokens by `loss.reduction`, supervised tokens, and a slice of the vocabulary."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from sft.data.packing.pack import Collator
from sft.data.packing.tree_packs import token_weight
from sft.mcore.loss import Targets, VocabShard
from tests.builders import sample
from tests.unit.loss_cases import microbatch


@pytest.mark.parametrize("reduction, four, one", [("token", 1.0, 1.0), ("sample", 0.25, 1.0), ("sqrt", 0.5, 1.0)])
def test_weights_of_a_pack_in_numbers(reduction: str, four: float, one: float) -> None:
    """Samples with 4, 1 and 0 supervised labels (the first token is never a label); then filler."""
    samples = [
        sample(range(10, 16), [1, 1, 1, 0, 1, 1]),
        sample(range(10, 13), [0, 0, 1]),
        sample(range(10, 12), [1, 0]),
    ]
    pack = Collator(doc_multiple=4, pad_id=0, reduction=reduction, pack_multiple=20).pack(samples)
    first, second = [four, four, 0, four, four, 0, 0, 0], [0, one, 0, 0]
    assert pack.loss_weights.tolist() == first + second + [0] * 8
    assert pack.loss_weights.dtype == np.float32
    assert pack.loss_mask.tolist() == [w > 0 for w in first + second + [0] * 8]


def test_packs_weigh_tokens_alike_by_default() -> None:
    pack = Collator(doc_multiple=4, pad_id=0).pack([sample(range(10, 13), [1, 1, 1])])
    assert pack.loss_weights.tolist() == [1, 1, 0, 0]
    assert token_weight(0, "sample") == 1.0  # no token has this weight


def test_targets_are_the_tokens_with_a_weight() -> None:
    found = Targets.of(
        microbatch(torch.tensor([[-100, 4, 5, -100, 0]]), torch.tensor([[0.0, 0.5, 2.0, 0.0, 1.0]])),
        torch.device("cpu"),
    )
    assert (found.rows.tolist(), found.labels.tolist(), found.weights.tolist()) == ([1, 2, 4], [4, 5, 0], [0.5, 2, 1])
    assert (found.rows.dtype, found.labels.dtype, found.weights.dtype) == (torch.int64, torch.int64, torch.float32)
    assert len(found) == 3


@pytest.mark.parametrize(
    "rank, vocab, first, num_real", [(0, 70, 0, 32), (1, 70, 32, 32), (2, 70, 64, 6), (3, 70, 96, 0), (3, 128, 96, 32)]
)
def test_which_rows_of_a_slice_are_tokens(rank: int, vocab: int, first: int, num_real: int) -> None:
    """70 tokens in 128 rows over 4 ranks: 32, 32, 6 and none."""
    weight, group = torch.zeros(32, 4), Mock(rank=lambda: rank)
    shard = VocabShard.of(weight, vocab, group, sequence_parallel=False)
    assert (shard.first, shard.num_real) == (first, num_real)
    assert shard.weight is weight
