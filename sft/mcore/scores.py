"""Computes the most likely tokens at each supervised position of this rank's packs, with the forward pass of training.

Decides which ranks have results, and where in the pack each result belongs.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sft.batch import Microbatch
from sft.mcore.engine import Engine
from sft.mcore.loss import Targets
from sft.mcore.loss.top_k import TopK, top_k
from sft.mcore.sharding.model import output_weight_in_use
from sft.parallel.context_parallel import local_indices


class Scores(NamedTuple):
    """The most likely tokens at the targets of one microbatch on this rank.

    rows            int64 [n], the token of the pack that predicts each target
    labels          int32 [n], the target
    label_logprobs  float32 [n], the log-probability of the target
    ids             int32 [n, k], the most likely tokens, most likely first; of equal ones, the smaller id first
    logprobs        float32 [n, k], their log-probabilities
    """

    rows: np.ndarray
    labels: np.ndarray
    label_logprobs: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray


def score(engine: Engine, microbatches: Sequence[Microbatch], k: int) -> list[Scores]:
    """The scores of each microbatch of this rank.  Collective.

    Only ranks of the last pipeline stage have results; other ranks get an empty list.  All tp ranks have the same.
    """
    scored = engine.measure(microbatches, forward_only=True, loss=partial(_loss, engine, k))
    return [_located(engine, microbatch, *result) for microbatch, result in zip(microbatches, scored)]


def _loss(
    engine: Engine, k: int, chunk: Any, microbatch: Microbatch, hidden: Tensor, *, second: Tensor | None = None
) -> tuple[Tensor, Tensor, tuple[TopK, Tensor]]:
    """The results that core requires of a loss function, and the scores with the labels of the targets, on the CPU.

    second: hidden states of multi-token prediction, which are not scored
    """
    targets = Targets.of(microbatch, hidden.device)
    with output_weight_in_use(chunk, until_backward=False):
        likely = top_k(hidden, engine.vocab_shard(chunk), targets, engine.config.loss, k)
    further = targets.labels[:0] if targets.further is None else targets.further.labels
    none, count = hidden.new_zeros(()), torch.zeros((), dtype=torch.int32, device=hidden.device)
    return none, count, (likely, torch.cat((targets.labels, further)).cpu())


def _located(engine: Engine, microbatch: Microbatch, likely: TopK, labels: Tensor) -> Scores:
    """Adds the token of the pack to each target.  A token with further targets has its results once for each."""
    rank = engine.groups.cp_group(microbatch.cp_size).rank
    rows = local_indices(microbatch.cu_seqlens.numpy(), microbatch.cp_size, rank)[microbatch.target_rows]
    own = np.flatnonzero(microbatch.loss_weights.numpy())
    index = np.searchsorted(own, microbatch.target_rows)
    return Scores(
        rows,
        labels.numpy().astype(np.int32),
        likely.label_logprobs.numpy(),
        likely.ids.numpy()[index],
        likely.logprobs.numpy()[index],
    )
