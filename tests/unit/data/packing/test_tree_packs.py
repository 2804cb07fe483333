"""Packs with trees: labels, weights, positions and counts of documents that continue others."""

from typing import Any

import numpy as np
import pytest

from sft.batch import Sample, Tree
from sft.data.packing.pack import Collator
from sft.parallel.branches import Branches

# Tokens 1 .. 7 | 8 9 10 continue 1 2 3 | 11 12 continue 1 2 3 8.  Texts: the first document; 1 2 3 8 9 10, of which
# 8 9 10 are supervised; 1 2 3 8 11 12, of which 8 11 12 are supervised.  So two texts supervise token 8.
TREE = Sample(
    sample_id=4,
    tokens=np.arange(1, 13, dtype=np.int32),
    weights=np.array([0, 0, 0, 0, 0, 1, 1, 2, 1, 1, 1, 1], dtype=np.float32),
    source=1,
    tree=Tree(
        starts=np.array([0, 7, 10, 12]),
        branches=Branches.of([-1, 0, 1], [0, 3, 1]),
        ends=np.array([[0, 7], [1, 3], [2, 2]]),
        spans=np.array([[0, 5, 7], [1, 7, 10], [2, 7, 8], [2, 10, 12]]),
        span_weights=np.ones(4, dtype=np.float32),
    ),
)
PLAIN = Sample(sample_id=9, tokens=np.array([5, 6, 7], np.int32), weights=np.array([0, 1, 1], np.float32))
OPTIONS: dict[str, Any] = dict(doc_multiple=4, pad_id=99)


def test_a_pack_written_out() -> None:
    pack = Collator(**OPTIONS).pack([PLAIN, TREE])
    assert pack.tokens.tolist() == [5, 6, 7, 99, 1, 2, 3, 4, 5, 6, 7, 99, 8, 9, 10, 99, 11, 12, 99, 99]
    # Token 3 has the label 8, not 4, which no text supervises.  Token 8 has the labels 9 and 11.
    assert pack.labels.tolist() == [6, 7, 99, 99, 2, 3, 8, 5, 6, 7, 99, 99, 9, 10, 99, 99, 12, 99, 99, 99]
    assert pack.loss_weights.tolist() == [1, 1, 0, 0, 0, 0, 2, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0]
    assert pack.label_counts is not None and pack.label_counts.tolist() == pack.loss_weights.tolist()
    assert pack.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 3, 4, 5, 6, 4, 5, 6, 7]
    assert pack.further is not None and pack.branches is not None and pack.texts is not None
    further = pack.further
    assert (further.rows.tolist(), further.labels.tolist(), further.weights.tolist()) == ([12], [11], [1.0])
    assert (pack.branches.parents.tolist(), pack.branches.forks.tolist()) == ([-1, -1, 1, 2], [0, 0, 3, 1])
    assert pack.firsts is not None and pack.firsts.tolist() == [0, 1, 1, 1]
    assert pack.texts.tolist() == [[0, 3], [1, 7], [2, 3], [3, 2]]
    assert (pack.cu_seqlens.tolist(), pack.lengths.tolist()) == ([0, 4, 12, 16, 20], [3, 7, 3, 2])
    assert (pack.sources.tolist(), pack.sample_ids, pack.max_seqlen) == ([0, 1, 1, 1], (9, 4), 8)


def test_weights_are_those_of_each_text() -> None:
    """With reduction = sample, the texts of 2, 3 and 3 supervised tokens weigh 1/2, 1/3 and 1/3 a token."""
    pack = Collator(**OPTIONS, reduction="sample").pack([TREE])
    third = 1 / 3
    weights = [0, 0, 2 * third, 0, 0.5, 0.5, 0, 0, third, third, 0, 0, third, 0, 0, 0]
    assert pack.loss_weights == pytest.approx(np.array(weights), rel=1e-6)
    assert pack.further is not None and pack.further.weights == pytest.approx([third], rel=1e-6)


def test_a_token_of_several_texts_may_count_once() -> None:
    pack = Collator(**OPTIONS, shared="once").pack([TREE])
    assert pack.loss_weights.tolist() == [0, 0, 1, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0]
    assert pack.label_counts is not None and pack.label_counts.tolist() == pack.loss_weights.tolist()


def test_the_parts_of_ranks_cover_all_targets() -> None:
    whole = Collator(**OPTIONS).microbatch([PLAIN, TREE])
    found = []
    for cp_rank in range(2):
        mb = Collator(**OPTIONS, cp_size=2, cp_rank=cp_rank).microbatch([PLAIN, TREE])
        assert mb.further is not None
        labels = np.concatenate([mb.labels.numpy()[mb.loss_mask.numpy()], mb.further.labels])
        found += list(zip(labels.tolist(), mb.tokens[0].numpy()[mb.target_rows].tolist(), mb.target_counts.tolist()))
        assert (mb.num_documents, mb.num_real_tokens, mb.num_rendered_tokens, mb.num_tokens) == (2, 15, 22, 10)
    # (label, token before it, number of texts that supervise it)
    wanted = [(6, 5, 1), (7, 6, 1), (8, 3, 2), (6, 5, 1), (7, 6, 1), (9, 8, 1), (10, 9, 1), (12, 11, 1), (11, 8, 1)]
    assert sorted(found) == sorted(wanted)
    assert whole.denominator("weights") == whole.denominator("tokens") == 10.0
    assert whole.samples_of_documents.tolist() == [0, 1, 1, 1]
    assert whole.supervised.tolist() == [2, 8, 0, 0]
