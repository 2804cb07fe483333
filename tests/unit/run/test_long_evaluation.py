"""The score of each question, from the tokens that ranks hold."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sft.batch import Microbatch, Sample
from sft.data.packing.pack import Collator
from sft.mcore.loss import RowStatistics
from sft.run import long_evaluation
from tests.builders import answer

# Samples with their ids out of order, in two packs; a third pack has filler only.
SAMPLES = {2: answer(40, 3), 0: answer(70, 5), 1: answer(33, 1), 3: answer(90, 2)}
PACKS = [(2, 0), (1, 3), ()]


def nll_of(sample: int, token: int) -> float:
    """A different -log p for every supervised token."""
    return 1 + sample + token / 1000


def measured(microbatch: Microbatch) -> RowStatistics:
    """What an engine would measure: the second supervised token of sample 0 and the last of 3 are wrong."""
    rows = microbatch.target_rows
    documents = microbatch.documents.numpy().ravel()[rows]
    positions = microbatch.position_ids.numpy().ravel()[rows] + 1  # the label is the next token
    samples = [microbatch.sample_ids[document] for document in documents]
    nll = [nll_of(sample, token) for sample, token in zip(samples, positions)]
    correct = [float((sample, token) not in {(0, 66), (3, 89)}) for sample, token in zip(samples, positions)]
    return RowStatistics(logprob=-torch.tensor(nll).float(), lse=None, entropy=None, correct=torch.tensor(correct))


def summed(engine: Any, loader: Any) -> np.ndarray:
    sums = long_evaluation.score(engine, loader, 4, lambda: True)
    assert sums is not None
    return sums


@pytest.mark.parametrize("cp", [1, 2])
def test_each_token_counts_for_its_question(cp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_evaluation.dist, "all_reduce", lambda total: None)
    parts = []
    for rank in range(cp):
        collator = Collator(doc_multiple=32, pad_id=0, pack_multiple=32, cp_size=cp, cp_rank=rank)
        samples: list[list[Sample]] = [[_with_id(i) for i in pack] for pack in PACKS]
        batches = [[collator.microbatch(pack) for pack in samples]]
        engine: Any = SimpleNamespace(
            groups=SimpleNamespace(reports=True, device=torch.device("cpu")),
            measure=lambda microbatches, forward_only: [(None, measured(mb)) for mb in microbatches],
        )
        loader: Any = SimpleNamespace(eval_batches=lambda batches=batches: iter(batches))
        parts.append(summed(engine, loader))
    nll, wrong, tokens = sum(parts)
    assert tokens.tolist() == [5, 1, 3, 2] and wrong.tolist() == [1, 0, 0, 1]
    expected = [
        sum(nll_of(i, t) for t in range(n - k, n)) for i, (n, k) in enumerate([(70, 5), (33, 1), (40, 3), (90, 2)])
    ]
    assert nll == pytest.approx(expected, rel=1e-6)  # fp32 log-probabilities
    if cp == 2:
        assert all(part[2].any() for part in parts)  # both ranks hold supervised tokens


def test_ranks_that_do_not_report_add_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of tp have the same losses, and only the first of them counts."""
    monkeypatch.setattr(long_evaluation.dist, "all_reduce", lambda total: None)
    engine: Any = SimpleNamespace(
        groups=SimpleNamespace(reports=False, device=torch.device("cpu")), measure=lambda *call, **more: [(None, None)]
    )
    loader: Any = SimpleNamespace(eval_batches=lambda: iter([["a microbatch"]]))
    assert not np.any(summed(engine, loader))


def test_the_scoring_ends_between_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_evaluation.dist, "all_reduce", lambda total: None)
    groups = SimpleNamespace(reports=False, device=torch.device("cpu"))
    measured, asked = list[Any](), iter([True, True, False])
    engine: Any = SimpleNamespace(
        groups=groups, measure=lambda microbatches, forward_only: measured.append(microbatches)
    )
    loader: Any = SimpleNamespace(eval_batches=lambda: iter([[1], [2], [3], [4]]))
    assert long_evaluation.score(engine, loader, 4, lambda: next(asked)) is None and measured == [[1], [2]]


def _with_id(number: int) -> Sample:
    sample = SAMPLES[number]
    return Sample(sample_id=number, tokens=sample.tokens, weights=sample.weights)
