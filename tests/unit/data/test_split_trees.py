"""A tree that is split into samples: each label counts as in the whole tree, with both values of loss.shared."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from sft.batch import Pack, Sample
from sft.data.cache.tree_samples import split_tree
from sft.data.cache.tree_tables import Trees, to_tables
from sft.data.chat.tree import TreeText, grow
from sft.data.packing.pack import Collator
from tests.trees import rows_before
from tests.unit.fixtures.folder import config

MULTIPLE = 4
Label = tuple[int, ...]  # a label, with the tokens before it in its text


def random_texts(seed: int, count: int = 9) -> list[TreeText]:
    """Texts of 3 to 20 tokens of a small vocabulary, so that they share beginnings, with weights 0, 0.5 and 1."""
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(count):
        length = int(rng.integers(3, 21))
        weights = rng.choice([0, 0.5, 1, 1], size=length).astype(np.float32)
        weights[0], weights[-1] = 0, 1
        texts.append(TreeText(rng.choice(2, p=[0.1, 0.9], size=length).astype(np.int32), weights))
    return texts


def samples_of(texts: Sequence[TreeText], seq_length: int, over_long: str = "error") -> list[Sample]:
    """The samples of the tree of the texts, as a store gives them."""
    data = config(seq_length=seq_length, doc_multiple=MULTIPLE, over_long=over_long)
    parts = list(split_tree(grow(texts), data))
    trees = Trees(to_tables([part.tree for part in parts], [len(part.tokens) for part in parts]))
    for number, part in enumerate(parts):  # weights of the whole file stand beside the tree
        assert part.labels - trees.repeated[number] >= 0
    return [
        Sample(sample_id=number, tokens=part.tokens, weights=part.weights, tree=trees.tree(number))
        for number, part in enumerate(parts)
    ]


def labels_of(pack: Pack) -> Iterator[tuple[Label, float, int]]:
    """Each target of a pack, with its weight, and the number of texts that count it."""
    documents = np.repeat(np.arange(len(pack.lengths)), np.diff(pack.cu_seqlens))

    def named(row: int, label: int) -> Label:
        document = int(documents[row])
        before = [] if pack.branches is None else rows_before(pack.cu_seqlens, pack.branches, document)
        rows = [*before, *range(int(pack.cu_seqlens[document]), row + 1)]
        return (*pack.tokens[rows].tolist(), label)

    counts = pack.loss_mask.astype(int) if pack.label_counts is None else pack.label_counts
    for row in np.flatnonzero(pack.loss_mask).tolist():
        yield named(row, int(pack.labels[row])), float(pack.loss_weights[row]), int(counts[row])
    if pack.further is not None:
        for row, label, weight, count in zip(
            *(getattr(pack.further, n) for n in ("rows", "labels", "weights", "counts"))
        ):
            yield named(int(row), int(label)), float(weight), int(count)


def summed(packs: Sequence[Pack]) -> tuple[Counter[Label], Counter[Label]]:
    weights, counts = Counter[Label](), Counter[Label]()
    for pack in packs:
        for label, weight, count in labels_of(pack):
            weights[label] += weight  # type: ignore[assignment]
            counts[label] += count
    return weights, counts


def wanted(texts: Sequence[TreeText], shared: str, reduction: str) -> tuple[Counter[Label], Counter[Label]]:
    """The same by a loop over the tokens of each text by itself, in the order of the texts."""
    weights, counts = Counter[Label](), Counter[Label]()
    for tokens, of_text in texts:
        number = sum(weight > 0 for weight in of_text)
        factor = {"token": 1.0, "sample": 1 / number}[reduction]
        for position, weight in enumerate(of_text.tolist()):
            label = tuple(tokens[: position + 1].tolist())
            if weight > 0 and not (shared == "once" and label in counts):
                weights[label] += weight * factor
                counts[label] += 1
    return weights, counts


@pytest.mark.parametrize("reduction", ["token", "sample"])
@pytest.mark.parametrize("shared", ["each", "once"])
@pytest.mark.parametrize("seed", range(6))
def test_parts_have_the_labels_of_the_whole_tree(seed: int, shared: str, reduction: str) -> None:
    texts, collator = random_texts(seed), Collator(doc_multiple=MULTIPLE, pad_id=9, reduction=reduction, shared=shared)
    weights, counts = wanted(texts, shared, reduction)
    numbers = set()
    for seq_length in (20, 24, 40, 400):
        samples = samples_of(texts, seq_length)
        packs = [collator.pack([sample]) for sample in samples]
        found = summed(packs)
        assert found[1] == counts
        assert found[0] == pytest.approx(weights, rel=1e-6)  # weights are fp32
        microbatch = collator.microbatch(samples)  # all parts in one pack
        assert microbatch.num_tokens == sum(counts.values()) == sum(int(pack_labels(pack)) for pack in packs)
        numbers.add(len(samples))
    assert 1 in numbers and max(numbers) > 3


def pack_labels(pack: Pack) -> int:
    return sum(count for _, _, count in labels_of(pack))


@pytest.mark.parametrize("seed", range(4))
def test_tables_count_the_labels_that_repeat(seed: int) -> None:
    texts = random_texts(seed)
    each, once = (sum(wanted(texts, shared, "token")[1].values()) for shared in ("each", "once"))
    for seq_length in (20, 24, 40, 400):
        data = config(seq_length=seq_length, doc_multiple=MULTIPLE)
        parts = list(split_tree(grow(texts), data))
        trees = Trees(to_tables([part.tree for part in parts], [len(part.tokens) for part in parts]))
        assert sum(part.labels for part in parts) == each
        assert trees.repeated.sum() == trees.counts().repeated == each - once > 0


def test_windows_of_a_long_text_leave_out_what_a_short_text_has() -> None:
    """Both texts supervise 2 3 4; the second one is too long for a pack of 8 and becomes windows."""
    tokens = np.arange(1, 15, dtype=np.int32)
    short = TreeText(np.array([1, 2, 3, 4, 9], np.int32), np.array([0, 1, 1, 1, 1], np.float32))
    long = TreeText(tokens, np.minimum(np.arange(14), 1).astype(np.float32))
    samples = samples_of([short, long], 8, "windows")
    packs = [Collator(doc_multiple=MULTIPLE, pad_id=0, shared="once").pack([sample]) for sample in samples]
    found = [label[-1] for pack in packs for label, _, _ in labels_of(pack)]
    assert len(packs) > 2 and sorted(found) == sorted([2, 3, 4, 9, *range(5, 15)])
    each = [Collator(doc_multiple=MULTIPLE, pad_id=0).pack([sample]) for sample in samples]
    assert sorted(label[-1] for pack in each for label, _, _ in labels_of(pack)) == sorted([2, 3, 4, 9, *range(2, 15)])
