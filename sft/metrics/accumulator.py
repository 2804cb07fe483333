"""Combines the measurements of a step over all ranks.  `totals.py` declares the quantities.

One all-gather combines all values.  Before it, an all-reduce for each CP size above 1 adds the losses of sequences that
several ranks share.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from sft.batch import Microbatch
from sft.console import short_count
from sft.layers.flops import TrainFlops
from sft.metrics.totals import Totals, quantities
from sft.parallel.cp_bytes import CpBytes
from sft.parallel.cp_group import CpGroup


@dataclass(frozen=True, kw_only=True)
class TaughtTokens:
    """The divergences of supervised tokens of one microbatch from a teacher; float64 [n], 0 for tokens without one."""

    divergence: np.ndarray  # from the teacher, in nats
    agrees: np.ndarray  # 1 if no token has a larger score than the teacher's first id
    covered: np.ndarray  # sum of the teacher's probabilities of its list
    is_taught: np.ndarray  # bool, whether the token has a teacher


@dataclass(frozen=True, kw_only=True)
class SupervisedTokens:
    """The supervised tokens of one microbatch that this rank holds, in order; arrays [n] on the CPU."""

    objective: float  # sum of the objective over these tokens, from the loss head
    denominator: float  # contribution of these tokens to the objective's denominator
    nll: np.ndarray  # float64, -log p(label) in nats
    entropy: np.ndarray | None  # in nats; None if it is not measured
    correct: np.ndarray  # above 0 if no token has a larger score than the label
    num_rows: int  # tokens whose scores were computed; in trees, one token may have the labels of several texts
    mtp_nll: float = 0.0  # sum of -log p over the tokens that multi-token prediction predicts
    num_mtp_tokens: int = 0  # number of tokens that multi-token prediction predicts
    teacher: TaughtTokens | None = None  # None: no token has a teacher
    buckets: Mapping[str, np.ndarray]  # {name of a breakdown: the bucket of each token} (`Accumulator.buckets`)


class SequenceLosses(NamedTuple):
    """The mean -log p and the perplexity of each sequence that has a supervised token on any rank; float64 [n]."""

    mean_nll: np.ndarray
    perplexity: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Accumulator:
    """Adds up the measurements of all ranks.  Counts each token and each pack once.

    position_edges  log.position_edges: [4096, 16384] makes the buckets 0-4K, 4K-16K and 16K+ of positions in a document
    flops           computes FLOPs
    reports         True on tp rank 0 of the last pipeline stage, that is, on one rank of each (dp, cp) position
    cp_bytes        computes the bytes that ranks that share a pack receive from each other
    cp_group        returns the ranks that share a pack of this CP size with this rank; the first of them counts the
                    pack
    """

    position_edges: Sequence[int]
    sources: Sequence[str]  # names of sources or data files; empty: losses are not broken down by source
    cp_sizes: Sequence[int]  # the CP sizes of packs; empty without dynamic CP: nothing is broken down by CP size
    flops: TrainFlops
    cp_bytes: CpBytes
    reports: bool
    cp_group: Callable[[int], CpGroup]
    device: torch.device

    def names(self, by: str) -> Sequence[str]:
        """Names of the buckets of the breakdown "position", "source" or "cp_size"; empty for ""."""
        if by == "cp_size":
            return tuple(map(str, self.cp_sizes))
        if by != "position":
            return self.sources if by else ()
        edges = [0, *self.position_edges]
        return (*(f"{short_count(a)}-{short_count(b)}" for a, b in zip(edges, edges[1:])), f"{short_count(edges[-1])}+")

    def buckets(self, microbatch: Microbatch) -> dict[str, np.ndarray]:
        """Three integer arrays [n] by name: for each supervised token on this rank, the index of its document, of its
        position bucket, and of its source.  All documents of a tree count as its first document."""
        rows = np.repeat(microbatch.target_rows, microbatch.target_counts)
        documents = microbatch.documents.numpy().ravel()[rows]
        if microbatch.firsts is not None:
            documents = microbatch.firsts[documents]
        positions = microbatch.position_ids.numpy().ravel()[rows]
        return {
            "document": documents,
            "position": np.searchsorted(np.array(self.position_edges), positions, side="right"),
            "source": microbatch.sources[documents],
        }

    def totals(
        self,
        microbatches: Sequence[Microbatch],
        tokens: Sequence[SupervisedTokens],
        peaks: Mapping[str, float] | None = None,
    ) -> Totals:
        """The totals over all ranks.  Collective: one all-gather of about a hundred values per rank, and for each CP
        size above 1 one all-reduce of a value per document over the ranks that share a pack.

        microbatches  the microbatches of this rank in the step or batch
        tokens        supervised tokens of each microbatch; empty on all pipeline stages except the last
        peaks         measurements of kind Max, by name
        """
        declared = quantities(Totals)
        names = {name: self.names(quantity.by) for name, quantity in declared.items()}
        counted = [microbatch for microbatch in microbatches if self._counts(microbatch)]
        parts: dict[str, Sequence[Any]] = {
            "Sum": tokens,
            "Replicated": counted,
            "PerSequence": [self._sequences(microbatches, tokens)],
            "Max": [peaks or {}],
        }
        numbers = [quantity.local(parts[quantity.kind], names[name]) for name, quantity in declared.items()]
        attention = sum(map(self._attention, counted))
        over_cp = sum(map(self._bytes_over_cp, counted), np.zeros(2))
        own = np.array([self.reports, attention, sum(map(self._work, microbatches)), *over_cp], dtype=np.float64)
        gathered = self._all_gather(np.concatenate([own, *numbers]))

        reports = gathered[:, 0] > 0
        attention_flops, work, cp_bytes, cp_bytes_fixed = gathered[reports, 1:5].T
        split = np.split(gathered[:, 5:], np.cumsum([len(part) for part in numbers])[:-1], axis=1)
        columns = {
            name: column if declared[name].kind == "Max" else column[reports]
            for name, column in zip(declared, split, strict=True)
        }
        values = {
            name: quantity.over_ranks(columns[name], names[name])
            for name, quantity in declared.items()
            if quantity.measure is not None
        }
        return Totals(
            **values,
            attention_flops=float(attention_flops.sum()),
            work_imbalance=float(work.max() / work.mean()) if work.any() else 1.0,
            cp_bytes=float(cp_bytes.sum()),
            cp_bytes_fixed=float(cp_bytes_fixed.sum()),
        )

    def _counts(self, microbatch: Microbatch) -> bool:
        return self.cp_group(microbatch.cp_size).rank == 0

    def _work(self, microbatch: Microbatch) -> float:
        """The FLOPs of this rank's part of a microbatch."""
        of_pack = self.flops.per_token * float(microbatch.cu_seqlens[-1]) + self._attention(microbatch)
        return of_pack / microbatch.cp_size

    def _attention(self, microbatch: Microbatch) -> float:
        """The FLOPs of attention over the whole pack of a microbatch."""
        depths = None if microbatch.branches is None else microbatch.branches.depths
        return self.flops.attention(microbatch.lengths, depths)

    def _bytes_over_cp(self, microbatch: Microbatch) -> np.ndarray:
        """float64 [2]: the bytes that the ranks of a pack receive from each other on the pack's group, filler documents
        included; and what they would receive for its samples alone on a group of the largest size.  Zeros without
        dynamic CP."""
        if not self.cp_sizes:
            return np.zeros(2)
        padded, is_real = np.diff(microbatch.cu_seqlens.numpy().astype(np.int64)), microbatch.lengths > 0
        own, fixed = (
            self.cp_bytes.document_bytes(padded, size, microbatch.branches)
            for size in (microbatch.cp_size, max(self.cp_sizes))
        )
        return np.array([own.sum(), fixed[is_real].sum()])

    def _sequences(self, microbatches: Sequence[Microbatch], tokens: Sequence[SupervisedTokens]) -> SequenceLosses:
        """Losses of the sequences in the packs that this rank counts, added over the ranks that share a pack."""
        sums = [np.zeros(len(microbatch.supervised)) for microbatch in microbatches]
        for total, part in zip(sums, tokens):
            total += np.bincount(part.buckets["document"], weights=part.nll, minlength=len(total))
        for cp_size in sorted({microbatch.cp_size for microbatch in microbatches} - {1}):
            of_size = [total for total, microbatch in zip(sums, microbatches) if microbatch.cp_size == cp_size]
            whole = torch.from_numpy(np.concatenate(of_size)).to(self.device)
            dist.all_reduce(whole, group=self.cp_group(cp_size).members)
            for total, added in zip(of_size, whole.cpu().split([len(total) for total in of_size])):
                total[:] = added.numpy()
        counted = [i for i, microbatch in enumerate(microbatches) if self._counts(microbatch)]
        nll = np.concatenate([np.zeros(0), *(sums[i] for i in counted)])
        count = np.concatenate([np.zeros(0, dtype=np.int32), *(microbatches[i].supervised for i in counted)])
        mean_nll = nll[count > 0] / count[count > 0]
        with np.errstate(over="ignore"):
            return SequenceLosses(mean_nll, np.exp(mean_nll))

    def _all_gather(self, numbers: np.ndarray) -> np.ndarray:
        """The values [n] of every rank: float64 [ranks, n].  Collective."""
        local = torch.from_numpy(numbers).to(self.device)
        gathered = local.new_empty(dist.get_world_size() * local.numel())
        dist.all_gather_into_tensor(gathered, local)
        return gathered.view(-1, local.numel()).cpu().numpy()
