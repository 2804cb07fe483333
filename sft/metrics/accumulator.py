"""From what each rank saw of a step to what all of them saw together: typed sums and one exchange.

Every number has a type, and the type decides which ranks it is added over:

    Sum          each (dp, cp) position holds tokens of its own: added over dp x cp
    Replicated   a fact of a whole pack, the same on each of its cp ranks: added over dp
    PerSequence  parts of a sequence lie on several cp ranks: added over cp first, then exp, mean, min, max over dp
    Max          the largest over all ranks, and which rank
    Ratio        two of the above, divided after both were added: never a mean of means

Names and their order follow from the recipe, so no rank can hold a key that another lacks.  All is float64,
which holds every integer up to 2**53.  Per-token values never leave their rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from sft.batch import Microbatch

SUM = ("objective", "denominator", "nll", "entropy", "tokens", "correct")
REPLICATED = ("real", "aligned", "padded", "documents", "squares", "sequences", "sequence_nll", "perplexity")
MAX = ("data_wait_s", "memory_allocated", "memory_reserved")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which part this rank tells.

    tells_tokens  one rank of each (dp, cp) position: of the last pipeline stage, the first of tp
    tells_packs   one rank of each dp position: of those, the first of cp
    """

    tells_tokens: bool
    tells_packs: bool
    cp: dist.ProcessGroup
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class Schema:
    """What is counted apart, the same on every rank.

    position_edges  [4096, 16384] makes the buckets 0-4K, 4K-16K and 16K+: places in a document, from 0
    sources         names of the data files; none: not told apart
    """

    position_edges: tuple[int, ...]
    sources: tuple[str, ...]

    @property
    def positions(self) -> tuple[str, ...]:
        """Names of the buckets."""
        edges = [0, *self.position_edges]
        return (*(f"{_short(a)}-{_short(b)}" for a, b in zip(edges, edges[1:])), f"{_short(edges[-1])}+")


def _short(tokens: int) -> str:
    """4096 -> 4K, 1000 -> 1000"""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A sum and what it is divided by, kept apart until everything is added."""

    total: float
    count: float

    @property
    def value(self) -> float | None:
        """None where there is nothing to divide by."""
        return self.total / self.count if self.count else None

    def __add__(self, other: "Ratio") -> "Ratio":
        return Ratio(total=self.total + other.total, count=self.count + other.count)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The largest of all ranks, and the first rank that has it."""

    value: float
    rank: int


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What all ranks saw of a step or of a pass over held-out data."""

    loss: float  # the objective, summed
    denominator: float  # what it is divided by: the sum of weights, or the supervised tokens
    nll: float  # sum over supervised tokens of -log p(label), nats
    entropy: float  # sum over supervised tokens, nats; 0 where it is not measured
    num_tokens: int  # supervised
    num_correct: int  # of those, whose label had the largest score; ties count
    num_real_tokens: int  # of samples
    num_aligned_tokens: int  # with padding of documents
    num_padded_tokens: int  # with filler: what was computed
    num_documents: int
    sum_of_squares: int  # of the real lengths of documents: what attention costs
    sequence_nll: Ratio  # mean -log p of each document that has a supervised token, summed; and how many those are
    perplexity: Ratio  # exp of the same
    perplexity_min: float  # inf where no document has one
    perplexity_max: float  # 0 where no document has one
    by_position: tuple[Ratio, ...]  # nll, in the order of the schema
    by_source: tuple[Ratio, ...]
    peaks: Mapping[str, Peak]
    work_imbalance: float  # largest over mean, over dp, of tokens and squares as FLOPs weigh them

    def __add__(self, other: "Totals") -> "Totals":
        """Of two batches together; peaks and imbalance are the larger ones."""
        added = {
            name: value + getattr(other, name)
            for name, value in vars(self).items()
            if isinstance(value, (int, float, Ratio))
        }
        return Totals(
            **{
                **added,
                "perplexity_min": min(self.perplexity_min, other.perplexity_min),
                "perplexity_max": max(self.perplexity_max, other.perplexity_max),
                "by_position": tuple(a + b for a, b in zip(self.by_position, other.by_position, strict=True)),
                "by_source": tuple(a + b for a, b in zip(self.by_source, other.by_source, strict=True)),
                "peaks": {k: max(p, other.peaks[k], key=lambda peak: peak.value) for k, p in self.peaks.items()},
                "work_imbalance": max(self.work_imbalance, other.work_imbalance),
            }
        )


class Accumulator:
    """What one rank saw, until `reduce`.  `work` is FLOPs per token and per squared token of a document."""

    def __init__(self, schema: Schema, work: tuple[float, float]) -> None:
        self._schema, self._work = schema, work
        self._edges = np.array(schema.position_edges)
        self._sums = dict.fromkeys((*SUM, *REPLICATED), 0.0)
        self._positions = np.zeros((2, len(schema.position_edges) + 1))  # nll, tokens
        self._sources = np.zeros((2, len(schema.sources)))
        self._sequences: list[np.ndarray] = []  # nll of each document of each pack, this rank's tokens
        self._counts: list[np.ndarray] = []  # supervised tokens of each document, on all ranks

    def packs(self, microbatches: Sequence[Microbatch]) -> None:
        """Facts of whole packs; on every rank."""
        for mb in microbatches:
            facts = (mb.num_real_tokens, mb.num_aligned_tokens, int(mb.cu_seqlens[-1]), mb.num_documents)
            for name, value in zip(("real", "aligned", "padded", "documents"), facts):
                self._sums[name] += value
            self._sums["squares"] += int((mb.lengths.astype(np.int64) ** 2).sum())
            self._counts.append(mb.supervised)
            self._sequences.append(np.zeros(len(mb.supervised)))

    def tokens(
        self,
        microbatches: Sequence[Microbatch],
        index: int,
        *,
        objective: float,
        denominator: float,
        logprob: np.ndarray,
        entropy: np.ndarray | None,
        correct: np.ndarray,
    ) -> None:
        """The supervised tokens this rank holds of microbatch `index`, after `packs`; arrays [n]."""
        mb = microbatches[index]
        rows = np.flatnonzero(mb.loss_weights.numpy())
        nll = -logprob.astype(np.float64)
        values = {"objective": objective, "denominator": denominator, "nll": nll.sum(), "tokens": len(rows)}
        values["entropy"] = 0.0 if entropy is None else entropy.sum(dtype=np.float64)
        values["correct"] = np.count_nonzero(correct)
        for name, value in values.items():
            self._sums[name] += float(value)
        document = mb.documents.numpy().ravel()[rows]
        bucket = np.searchsorted(self._edges, mb.position_ids.numpy().ravel()[rows], side="right")
        for table, kind in ((self._positions, bucket), (self._sources, mb.sources[document])):
            if table.shape[1] == 0:  # no names of sources: not told apart
                continue
            table[0] += np.bincount(kind, weights=nll, minlength=table.shape[1])
            table[1] += np.bincount(kind, minlength=table.shape[1])
        self._sequences[index] += np.bincount(document, weights=nll, minlength=len(mb.supervised))

    def reduce(self, place: Place, peaks: Mapping[str, float] | None = None) -> Totals:
        """Together with all other ranks.  Collective: one exchange of some hundred numbers over the world, and one
        of a number a document over cp, where cp is above 1."""
        smallest, largest = self._per_sequence(place)
        local_max = [float((peaks or {}).get(name, 0.0)) for name in MAX]
        flags = [float(place.tells_tokens), float(place.tells_packs)]
        parts = [flags, list(self._sums.values()), local_max, [smallest, largest], self._positions, self._sources]
        numbers = np.concatenate([np.asarray(part, dtype=np.float64).ravel() for part in parts])
        mine = torch.from_numpy(numbers).to(place.device)
        everyone = mine.new_empty(dist.get_world_size() * mine.numel())
        dist.all_gather_into_tensor(everyone, mine)
        return self._totals(everyone.view(-1, mine.numel()).cpu().numpy())

    @staticmethod
    def bytes_sent(num_positions: int, num_sources: int, num_documents: int) -> int:
        """Bytes a rank gives to the exchanges of `reduce`, with cp above 1."""
        numbers = 2 + len(SUM) + len(REPLICATED) + len(MAX) + 2 + 2 * (num_positions + num_sources)
        return 8 * (numbers + num_documents)

    def _per_sequence(self, place: Place) -> tuple[float, float]:
        """Adds what documents are as a whole to this rank's facts; smallest and largest perplexity."""
        nll = np.concatenate(self._sequences) if self._sequences else np.zeros(0)
        if place.cp.size() > 1:
            whole = torch.from_numpy(nll).to(place.device)
            dist.all_reduce(whole, group=place.cp)
            nll = whole.cpu().numpy()
        count = np.concatenate(self._counts) if self._counts else np.zeros(0)
        mean = nll[count > 0] / count[count > 0]
        with np.errstate(over="ignore"):
            perplexity = np.exp(mean)
        self._sums["sequences"] = len(mean)
        self._sums["sequence_nll"] = mean.sum()
        self._sums["perplexity"] = perplexity.sum()
        return perplexity.min(initial=np.inf), perplexity.max(initial=0.0)

    def _totals(self, table: np.ndarray) -> Totals:
        """table [ranks, numbers], in the order of `reduce`."""
        tells_tokens, tells_packs = table[:, 0] > 0, table[:, 1] > 0
        columns = iter(table[:, 2:].T)
        sums = {name: next(columns)[tells_tokens].sum() for name in SUM}
        on_packs = {name: next(columns)[tells_packs] for name in REPLICATED}
        facts = {name: values.sum() for name, values in on_packs.items()}
        peaks = {}
        for name in MAX:
            values = next(columns)
            peaks[name] = Peak(value=float(values.max()), rank=int(values.argmax()))
        smallest, largest = next(columns)[tells_packs].min(), next(columns)[tells_packs].max()
        rest = np.array([column[tells_tokens].sum() for column in columns])
        positions, sources = rest[: self._positions.size], rest[self._positions.size :]
        per_token, per_square = self._work
        work = per_token * on_packs["padded"] + per_square * on_packs["squares"]
        return Totals(
            loss=float(sums["objective"]),
            denominator=float(sums["denominator"]),
            nll=float(sums["nll"]),
            entropy=float(sums["entropy"]),
            num_tokens=int(sums["tokens"]),
            num_correct=int(sums["correct"]),
            num_real_tokens=int(facts["real"]),
            num_aligned_tokens=int(facts["aligned"]),
            num_padded_tokens=int(facts["padded"]),
            num_documents=int(facts["documents"]),
            sum_of_squares=int(facts["squares"]),
            sequence_nll=Ratio(total=float(facts["sequence_nll"]), count=int(facts["sequences"])),
            perplexity=Ratio(total=float(facts["perplexity"]), count=int(facts["sequences"])),
            perplexity_min=float(smallest),
            perplexity_max=float(largest),
            by_position=_ratios(positions),
            by_source=_ratios(sources),
            peaks=peaks,
            work_imbalance=float(work.max() / work.mean()) if work.any() else 1.0,
        )


def _ratios(flat: np.ndarray) -> tuple[Ratio, ...]:
    """[nll of each, tokens of each] -> one each"""
    totals, counts = flat.reshape(2, -1)
    return tuple(Ratio(total=float(total), count=int(count)) for total, count in zip(totals, counts))
