"""From what each rank measured of a step to what all ranks measured together: typed sums and one all-gather.

Which quantities there are is declared in `totals.py`, so no rank can hold a number that another lacks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sft.batch import Microbatch
from sft.metrics.kinds import SupervisedTokens
from sft.metrics.totals import Totals, kinds


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """What this rank contributes, so that nothing is counted twice.

    tokens  True on one rank of each (dp, cp) position: of the last pipeline stage, the first of tp
    packs   True on one rank of each dp position: of those, the first of cp
    cp      the ranks that hold the other parts of the same packs
    """

    tokens: bool
    packs: bool
    cp: dist.ProcessGroup
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The buckets by which losses are broken down, the same on every rank.

    position_edges  [4096, 16384] makes the buckets 0-4K, 4K-16K and 16K+ of positions in a document, from 0
    sources         names of the data files; none: losses are not broken down by source
    """

    position_edges: Sequence[int]
    sources: Sequence[str]

    def names(self, by: str) -> Sequence[str]:
        """Of the buckets by "position" or by "source"."""
        if by == "source":
            return self.sources
        edges = [0, *self.position_edges]
        return (*(f"{_short(a)}-{_short(b)}" for a, b in zip(edges, edges[1:])), f"{_short(edges[-1])}+")

    def supervised_tokens(
        self,
        microbatch: Microbatch,
        *,
        objective: float,
        denominator: float,
        logprob: np.ndarray,
        entropy: np.ndarray | None,
        correct: np.ndarray,
    ) -> SupervisedTokens:
        """What the loss head measured of the supervised tokens of a microbatch, in order; arrays [n]."""
        rows = np.flatnonzero(microbatch.loss_weights.numpy())
        documents = microbatch.documents.numpy().ravel()[rows]
        positions = microbatch.position_ids.numpy().ravel()[rows]
        buckets = {
            "position": np.searchsorted(np.array(self.position_edges), positions, side="right"),
            "source": microbatch.sources[documents],
        }
        return SupervisedTokens(
            objective=objective,
            denominator=denominator,
            nll=-logprob.astype(np.float64),
            entropy=entropy,
            correct=correct,
            documents=documents,
            buckets=buckets,
        )


def _short(tokens: int) -> str:
    """4096 -> 4K, 1000 -> 1000"""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


class Accumulator:
    """Adds up what all ranks measured.  `work` is FLOPs per token and per squared token of a document."""

    def __init__(self, breakdown: Breakdown, contribution: Contribution, work: tuple[float, float]) -> None:
        self._contribution, self._work = contribution, work
        self._kinds = kinds(Totals)
        self._names = {name: breakdown.names(kind.by) if kind.by else () for name, kind in self._kinds.items()}

    def totals(
        self,
        microbatches: Sequence[Microbatch],
        tokens: Sequence[SupervisedTokens],
        peaks: Mapping[str, float] | None = None,
    ) -> Totals:
        """Of all ranks.  Collective: one all-gather of some hundred numbers over the world, and, where cp is above 1,
        one all-reduce of a number for each document over cp.

        tokens  of each microbatch; none where this rank is of another stage than the last
        peaks   what kind Max takes the maximum of, by its key
        """
        measured: dict[str, Sequence[Any]] = {
            "tokens": tokens,
            "packs": microbatches,
            "sequences": [self._sequences(microbatches, tokens)],
            "peaks": [peaks or {}],
        }
        numbers = [kind.local(measured[kind.reads], self._names[name]) for name, kind in self._kinds.items()]
        flags = [float(self._contribution.tokens), float(self._contribution.packs)]
        gathered = self._all_gather(np.concatenate([np.asarray(part, dtype=np.float64) for part in (flags, *numbers)]))
        columns = np.split(gathered[:, 2:], np.cumsum([len(part) for part in numbers])[:-1], axis=1)
        return self._over_ranks(gathered[:, :2] > 0, dict(zip(self._kinds, columns, strict=True)))

    def _sequences(
        self, microbatches: Sequence[Microbatch], tokens: Sequence[SupervisedTokens]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean -log p and perplexity of each document of this rank's packs that has a supervised token on any rank."""
        sums = [np.zeros(len(microbatch.supervised)) for microbatch in microbatches]
        for total, part in zip(sums, tokens):
            total += np.bincount(part.documents, weights=part.nll, minlength=len(total))
        nll = np.concatenate(sums)
        if self._contribution.cp.size() > 1:
            whole = torch.from_numpy(nll).to(self._contribution.device)
            dist.all_reduce(whole, group=self._contribution.cp)
            nll = whole.cpu().numpy()
        count = np.concatenate([microbatch.supervised for microbatch in microbatches])
        mean_nll = nll[count > 0] / count[count > 0]
        with np.errstate(over="ignore"):
            return mean_nll, np.exp(mean_nll)

    def _all_gather(self, numbers: np.ndarray) -> np.ndarray:
        """[numbers] of each rank -> [ranks, numbers]"""
        local = torch.from_numpy(numbers).to(self._contribution.device)
        gathered = local.new_empty(dist.get_world_size() * local.numel())
        dist.all_gather_into_tensor(gathered, local)
        return gathered.view(-1, local.numel()).cpu().numpy()

    def _over_ranks(self, flags: np.ndarray, columns: dict[str, np.ndarray]) -> Totals:
        """flags [ranks, 2]: whose tokens and whose packs count; columns: [ranks, numbers] of each quantity."""
        counts = {"tokens": flags[:, 0], "packs": flags[:, 1], "all": np.full(len(flags), True)}
        per_token, per_square = self._work
        work = per_token * columns["num_padded_tokens"] + per_square * columns["sum_of_squares"]
        columns = {**columns, "work_imbalance": work}
        values: dict[str, Any] = {
            name: kind.over_ranks(columns[name][counts[kind.ranks]], self._names[name])
            for name, kind in self._kinds.items()
        }
        return Totals(**values)
