"""The kinds of quantities: what each is measured on, over which ranks it is combined, and how two batches are merged.

    Sum          of tokens that no other rank holds; added over dp x cp
    SumBy        the same, for each bucket of a breakdown
    Replicated   of whole packs, the same on each of their cp ranks; added over dp, never over cp
    PerSequence  of whole sequences, parts of which lie on several cp ranks: their losses are added over cp first, then
                 measured, then combined over dp
    Max          the maximum over all ranks, and the first rank that has it
    Imbalance    the largest over the mean of what dp ranks compute; follows from other quantities

A kind gives `local`, this rank's numbers; `over_ranks`, the value of the numbers of all ranks that count, an array
[ranks, numbers of a rank]; and `merge`, the value of two batches together.  Sums add, maxima take the maximum.
All numbers are float64, which holds every integer up to 2**53.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from sft.batch import Microbatch


@dataclass(frozen=True, kw_only=True)
class SupervisedTokens:
    """The supervised tokens of one microbatch that this rank holds; arrays [n] on the CPU.

    objective    their sum of the objective, from the loss head
    denominator  what they add to the number that the objective is divided by
    nll          float64, -log p(label) in nats
    entropy      in nats; None where it is not measured
    correct      above 0 where no score is above the label's
    documents    which document of the pack each belongs to
    buckets      by the name of a breakdown, the bucket of each
    """

    objective: float
    denominator: float
    nll: np.ndarray
    entropy: np.ndarray | None
    correct: np.ndarray
    documents: np.ndarray
    buckets: Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The largest value of all ranks, and the first rank that has it."""

    value: float
    rank: int


@dataclass(frozen=True)
class Sum:
    """`measure` is called with the supervised tokens of each microbatch."""

    measure: Callable[[SupervisedTokens], float]
    number: type = int

    name: ClassVar[str] = "Sum"
    reads: ClassVar[str] = "tokens"
    ranks: ClassVar[str] = "tokens"
    by: ClassVar[str] = ""

    def local(self, tokens: Sequence[SupervisedTokens], names: Sequence[str]) -> Sequence[float]:
        total = 0.0
        for part in tokens:  # Python's sum() rounds otherwise from 3.12 on
            total += float(self.measure(part))
        return [total]

    def over_ranks(self, numbers: np.ndarray, names: Sequence[str]) -> Any:
        return self.number(numbers[:, 0].sum())

    @staticmethod
    def merge(a: Any, b: Any) -> Any:
        return a + b


@dataclass(frozen=True)
class SumBy:
    """`measure` gives a number of each token, [n]; they are added by the token's bucket of the breakdown `by`.

    Without `measure`, the tokens of each bucket are counted.
    """

    by: str
    measure: Callable[[SupervisedTokens], np.ndarray] | None = None
    number: type = int

    name: ClassVar[str] = "Sum"
    reads: ClassVar[str] = "tokens"
    ranks: ClassVar[str] = "tokens"

    def local(self, tokens: Sequence[SupervisedTokens], names: Sequence[str]) -> np.ndarray:
        sums = np.zeros(len(names))
        for part in tokens if names else ():  # without names of sources nothing is counted by source
            weights = None if self.measure is None else self.measure(part)
            sums += np.bincount(part.buckets[self.by], weights=weights, minlength=len(names))
        return sums

    def over_ranks(self, numbers: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
        return {name: self.number(column.sum()) for name, column in zip(names, numbers.T, strict=True)}

    @staticmethod
    def merge(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
        assert a.keys() == b.keys()
        return {name: a[name] + b[name] for name in a}


@dataclass(frozen=True)
class Replicated:
    """`measure` is called with each microbatch, and gives an integer of the whole pack."""

    measure: Callable[[Microbatch], int]

    name: ClassVar[str] = "Replicated"
    reads: ClassVar[str] = "packs"
    ranks: ClassVar[str] = "packs"
    by: ClassVar[str] = ""

    def local(self, packs: Sequence[Microbatch], names: Sequence[str]) -> Sequence[float]:
        return [float(sum(self.measure(microbatch) for microbatch in packs))]

    def over_ranks(self, numbers: np.ndarray, names: Sequence[str]) -> int:
        return int(numbers[:, 0].sum())

    @staticmethod
    def merge(a: int, b: int) -> int:
        return a + b


@dataclass(frozen=True)
class PerSequence:
    """`measure` is called with the mean -log p and the perplexity of each sequence that has a supervised token, [n]."""

    measure: Callable[[np.ndarray, np.ndarray], float]
    number: type = float
    combine: np.ufunc = np.add

    name: ClassVar[str] = "PerSequence"
    reads: ClassVar[str] = "sequences"
    ranks: ClassVar[str] = "packs"
    by: ClassVar[str] = ""

    def local(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]], names: Sequence[str]) -> Sequence[float]:
        ((mean_nll, perplexity),) = sequences
        return [float(self.measure(mean_nll, perplexity))]

    def over_ranks(self, numbers: np.ndarray, names: Sequence[str]) -> Any:
        return self.number(self.combine.reduce(numbers[:, 0]))

    def merge(self, a: Any, b: Any) -> Any:
        return self.number(self.combine(a, b))


@dataclass(frozen=True)
class Max:
    """`key` names what the engine measured on this rank; 0 where it measured nothing."""

    key: str

    name: ClassVar[str] = "Max"
    reads: ClassVar[str] = "peaks"
    ranks: ClassVar[str] = "all"
    by: ClassVar[str] = ""

    def local(self, peaks: Sequence[Mapping[str, float]], names: Sequence[str]) -> Sequence[float]:
        (measured,) = peaks
        return [float(measured.get(self.key, 0.0))]

    def over_ranks(self, numbers: np.ndarray, names: Sequence[str]) -> Peak:
        return Peak(value=float(numbers[:, 0].max()), rank=int(numbers[:, 0].argmax()))

    @staticmethod
    def merge(a: Peak, b: Peak) -> Peak:
        return max(a, b, key=lambda peak: peak.value)


@dataclass(frozen=True)
class Imbalance:
    """Sends nothing; `over_ranks` gets the FLOPs of each dp rank's packs."""

    name: ClassVar[str] = "Replicated"
    reads: ClassVar[str] = "packs"
    ranks: ClassVar[str] = "packs"
    by: ClassVar[str] = ""

    def local(self, packs: Sequence[Microbatch], names: Sequence[str]) -> Sequence[float]:
        return []

    def over_ranks(self, numbers: np.ndarray, names: Sequence[str]) -> float:
        return float(numbers.max() / numbers.mean()) if numbers.any() else 1.0

    @staticmethod
    def merge(a: float, b: float) -> float:
        return max(a, b)


Kind = Sum | SumBy | Replicated | PerSequence | Max | Imbalance
