"""Every token that predicts a label has the distribution of that label, in every part of a pack."""

import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from sft.batch import Sample
from sft.data.packing.pack import Collator
from sft.parallel.context_parallel import gathered_positions
from tests.builders import answer
from tests.tree_samples import nested

TYPE = np.dtype([("ids", np.int32, (2,)), ("logprobs", np.float16, (2,))])


def of_prefix(tokens: np.ndarray) -> int:
    """A number that the tokens before a label determine, as they determine the distribution."""
    return zlib.crc32(tokens.tobytes()) % 2**31


def taught(sample: Sample, prefixes: dict[int, int]) -> Sample:
    """The sample with distributions whose first id is the number of the prefix of each label."""
    rows = np.zeros(len(sample.labels), dtype=TYPE)
    rows["ids"][:, 0] = [prefixes[label] for label in sample.labels.tolist()]
    rows["ids"][:, 1], rows["logprobs"][:, 0] = -1, -np.arange(len(rows))
    return replace(sample, teacher=rows)


def plain(length: int, supervised: int, seed: int) -> Sample:
    sample = answer(length, supervised, seed=seed)
    return taught(sample, {i: of_prefix(sample.tokens[:i]) for i in range(length)})


def whole(samples: Sequence[Sample], cp: int) -> tuple[np.ndarray, np.ndarray]:
    """ids and log-probabilities [t, 2] of the whole pack, from the parts of all ranks."""
    parts = [Collator(doc_multiple=8, pad_id=0, cp_size=cp, cp_rank=rank).microbatch(samples) for rank in range(cp)]
    order = gathered_positions(parts[0].cu_seqlens.numpy(), cp)
    ids = np.concatenate([part.teacher.ids.numpy() for part in parts])[order]
    logprobs = np.concatenate([part.teacher.logprobs.numpy() for part in parts])[order]
    assert ids.dtype == np.int32 and logprobs.dtype == np.float32
    return ids, logprobs


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_samples_and_a_sample_without_a_teacher(cp: int) -> None:
    samples = [plain(21, 9, 1), answer(16, 8, seed=2), plain(33, 32, 3)]
    ids, logprobs = whole(samples, cp)
    expected = np.full((24 + 16 + 40, 2), -1)
    for first, sample, labels in ((0, samples[0], range(12, 21)), (40, samples[2], range(1, 33))):
        for label in labels:
            expected[first + label - 1, 0] = of_prefix(sample.tokens[:label])
    np.testing.assert_array_equal(ids, expected)
    assert logprobs[:24, 0].tolist() == [0.0] * 11 + [-float(i) for i in range(9)] + [0.0] * 4


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_all_labels_after_a_token_of_a_tree_share_its_distribution(cp: int) -> None:
    tree, texts = nested(5, 50)
    assert tree.tree is not None
    prefixes: dict[int, int] = {}
    rows: dict[int, int] = {}  # {token of the pack: the number that it must have}
    starts = 24 + np.cumsum([0, 96, 24, 40, 8])  # documents of 90, 20, 33, 7 and 41 tokens
    for text, (end, count) in zip(texts, tree.tree.ends.tolist(), strict=True):
        pieces = [*((p.document, p.length) for p in tree.tree.branches.path(end)), (end, count)]
        stored = np.concatenate([tree.tree.starts[owner] + np.arange(length) for owner, length in pieces])
        in_pack = np.concatenate([starts[owner] + np.arange(length) for owner, length in pieces])
        for label in np.flatnonzero(text.weights).tolist():
            prefixes[int(stored[label])] = rows[int(in_pack[label - 1])] = of_prefix(text.tokens[:label])
    first = plain(21, 9, 1)
    ids, _ = whole([first, taught(tree, prefixes)], cp)
    expected = np.full((len(ids), 2), -1)
    expected[11:20, 0] = [of_prefix(first.tokens[:label]) for label in range(12, 21)]
    for row, number in rows.items():
        expected[row, 0] = number
    assert len(rows) > 90
    np.testing.assert_array_equal(ids, expected)


def test_no_teacher() -> None:
    assert Collator(doc_multiple=8, pad_id=0).microbatch([answer(16, 8)]).teacher is None
