"""Scores the questions of long-context suites with the packed passes of evaluations, on any layout."""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from sft.batch import Microbatch
from sft.data.loader import Loader, make_loader
from sft.data.long.suite import Suite, digest_of
from sft.errors import TrainingError
from sft.mcore.engine import Engine
from sft.mcore.loss import RowStatistics
from sft.metrics.long import LongScores, scores_of


def score_suite(
    engine: Engine, suite: Suite, pad_id: int, goes_on: Callable[[], bool] = lambda: True
) -> LongScores | None:
    """The scores of the questions of one length; the same on every rank.  Collective.

    pad_id: id of padding tokens
    goes_on: called before each batch; must return the same on all ranks.  False ends the scoring, with the result None
    Raises TrainingError if a loss is not finite.
    """
    tokens = [int(length) - fact.start for length, fact in zip(suite.corpus.lengths, suite.facts, strict=True)]
    facts = [
        {
            "task": fact.task,
            "length": suite.length,
            "depth": fact.depth,
            "number": fact.number,
            "token_depth": fact.token_depth,
            "prompt": fact.start,
            "tokens": count,
        }
        for fact, count in zip(suite.facts, tokens, strict=True)
    ]
    sums = score(engine, _loader(engine, suite, pad_id), len(tokens), goes_on)
    if sums is None:
        return None
    nll, wrong, counted = sums
    assert counted.tolist() == tokens, "each token of each answer is counted once"
    if not math.isfinite(nll.sum()):
        raise TrainingError("the loss of an answer of the long-context suites is not finite.")
    return scores_of(digest_of([suite]), facts, nll.tolist(), wrong.astype(int).tolist())


def _loader(engine: Engine, suite: Suite, pad_id: int) -> Loader:
    config = engine.config
    data = config.data.model_copy(update={"seq_length": suite.length})
    return make_loader(
        config.model_copy(update={"data": data}),
        engine.layout.with_short_batches(),
        suite.corpus,
        pad_id=pad_id,
        dp_rank=engine.groups.dp_rank,
        cp_rank=engine.groups.cp_rank,
        is_held_out=True,
    )


def score(engine: Engine, loader: Loader, num_samples: int, goes_on: Callable[[], bool]) -> np.ndarray | None:
    """Three numbers of each sample, float64 [3, num_samples]: the sum of -log p of its supervised tokens, the number of
    these that do not have the largest score, and their number.  The same on every rank.  Collective.

    None if `goes_on` (see `score_suite`) ended the scoring
    """
    sums = np.zeros((3, num_samples))
    for microbatches in loader.eval_batches():
        if not goes_on():
            return None
        measured = engine.measure(microbatches, forward_only=True)
        for microbatch, (_, rows) in zip(microbatches, measured) if engine.groups.reports else ():
            _add(sums, microbatch, rows)
    total = torch.from_numpy(sums).to(engine.groups.device)
    dist.all_reduce(total)
    return total.cpu().numpy()


def _add(sums: np.ndarray, microbatch: Microbatch, rows: RowStatistics) -> None:
    """Adds the supervised tokens of a microbatch on this rank to the sums of their samples."""
    documents = microbatch.documents.numpy().ravel()[microbatch.target_rows]
    samples = np.array(microbatch.sample_ids, dtype=np.int64)[microbatch.samples_of_documents[documents]]
    values = (-rows.logprob.double().cpu().numpy(), rows.correct.cpu().numpy() == 0, np.ones(len(samples)))
    for total, value in zip(sums, values, strict=True):
        np.add.at(total, samples, value)
