"""Declares the quantities that are added up over a step or a held-out pass.

The kind of a quantity determines what a rank measures it on, and over which ranks it is combined:

    Sum          measured on the supervised tokens that a rank holds; combined over dp x cp
    Replicated   measured on whole packs by the first of the ranks that share a pack; combined over dp x cp
    PerSequence  measured on whole sequences by the first of the ranks that share a pack, after the losses of a sequence
                 are added over these ranks; combined over dp x cp
    Max          measured on every rank by the engine or its caller; combined to the maximum over all ranks, with the
                 first rank that has it

The accumulator computes the Replicated quantities that have no `measure`.  One of them, `work_imbalance`, compares
ranks: each rank of dp x cp adds the FLOPs of its own parts of packs.

`rows.py` computes the logged numbers from these quantities.  Ranks send all numbers as float64, which represents every
integer up to 2**53 exactly.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The largest value of all ranks, the first rank that has it, and the median of all ranks."""

    value: float
    rank: int
    median: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Quantity:
    """Measures a quantity on a rank, combines it over ranks, and merges it over batches.

    measure  computes the number from SupervisedTokens (Sum), a Microbatch (Replicated), SequenceLosses (PerSequence),
             or the measurements `peaks` by name (Max); None if the accumulator computes the quantity
    number   type of the value
    combine  combines the numbers of ranks, and of two batches
    by       name of a breakdown with one value per bucket; `measure` of kind Sum then returns a value for each token,
             [n], or None to count tokens
    """

    kind: Literal["Sum", "Replicated", "PerSequence", "Max"]
    measure: Callable[[Any], Any] | None
    number: type = int
    combine: np.ufunc = np.add
    by: str = ""

    def local(self, parts: Sequence[Any], names: Sequence[str]) -> np.ndarray:
        """This rank's sum over all parts, float64 [buckets], or [1] without a breakdown.  Empty without `measure`.

        names: the names of the buckets
        """
        if self.measure is None:
            return np.zeros(0)
        sums = np.zeros(len(names) if self.by else 1)
        for part in parts if len(sums) else ():  # if no source has a name, nothing is counted by source
            value = self.measure(part)
            if self.by == "cp_size":
                sums[names.index(str(part.cp_size))] += float(value)
            elif self.by:
                sums += np.bincount(part.buckets[self.by], weights=value, minlength=len(sums))
            else:
                sums += float(value)
        return sums

    def over_ranks(self, numbers: np.ndarray, names: Sequence[str]) -> Any:
        """The value combined over ranks.  numbers: float64 [ranks, buckets], the results of `local`"""
        if self.kind == "Max":
            of_ranks = numbers[:, 0]
            return Peak(value=float(of_ranks.max()), rank=int(of_ranks.argmax()), median=float(np.median(of_ranks)))
        values = [self.number(self.combine.reduce(column)) for column in numbers.T]
        return dict(zip(names, values, strict=True)) if self.by else values[0]

    def merge(self, a: Any, b: Any) -> Any:
        """The combined value of two batches."""
        if self.kind == "Max":
            return max(a, b, key=lambda peak: peak.value)
        if self.by:
            assert a.keys() == b.keys()
            return {name: self.number(self.combine(a[name], b[name])) for name in a}
        return self.number(self.combine(a, b))


def quantity(*declared: Any, **options: Any) -> Any:
    """Declares a field of Totals with the arguments of `Quantity`."""
    return field(metadata={"quantity": Quantity(*declared, **options)})


def quantities(of: type["Totals"]) -> dict[str, Quantity]:
    """The quantity of each field, in the order of the fields.  Raises TypeError if a field has no quantity."""
    declared = {}
    for declared_field in fields(of):
        if "quantity" not in declared_field.metadata:
            raise TypeError(f"{of.__name__}.{declared_field.name} must be declared with quantity().")
        declared[declared_field.name] = declared_field.metadata["quantity"]
    return declared


def _entropy(tokens: Any) -> float:
    """The sum of entropies; 0 if entropy is not measured."""
    return 0.0 if tokens.entropy is None else tokens.entropy.sum(dtype=np.float64)


def _of_teacher(name: str) -> Callable[[Any], np.ndarray]:
    """Measures a number of TaughtTokens for each supervised token; zeros without a teacher."""

    def measure(tokens: Any) -> np.ndarray:
        zeros = np.zeros(len(tokens.nll))
        return zeros if tokens.teacher is None else zeros + getattr(tokens.teacher, name)

    return measure


def _sum_of_teacher(name: str) -> Callable[[Any], float]:
    return lambda tokens: float(_of_teacher(name)(tokens).sum())


@dataclass(frozen=True, kw_only=True)
class Totals:
    """The quantities of a step or of a held-out pass, over all ranks."""

    # The summed objective and its denominator, which is the sum of weights or the number of supervised tokens.
    objective: float = quantity("Sum", lambda tokens: tokens.objective, float)
    denominator: float = quantity("Sum", lambda tokens: tokens.denominator, float)
    # Sums over supervised tokens; `nll` and `entropy` in nats.
    nll: float = quantity("Sum", lambda tokens: tokens.nll.sum(), float)
    entropy: float = quantity("Sum", _entropy, float)
    num_tokens: int = quantity("Sum", lambda tokens: len(tokens.nll))  # supervised tokens
    num_rows: int = quantity("Sum", lambda tokens: tokens.num_rows)  # tokens whose scores were computed
    num_correct: int = quantity("Sum", lambda tokens: np.count_nonzero(tokens.correct))
    mtp_nll: float = quantity("Sum", lambda tokens: tokens.mtp_nll, float)  # of multi-token prediction
    num_mtp_tokens: int = quantity("Sum", lambda tokens: tokens.num_mtp_tokens)
    nll_by_position: dict[str, float] = quantity("Sum", lambda tokens: tokens.nll, float, by="position")
    num_tokens_by_position: dict[str, int] = quantity("Sum", lambda tokens: None, by="position")
    nll_by_source: dict[str, float] = quantity("Sum", lambda tokens: tokens.nll, float, by="source")
    num_tokens_by_source: dict[str, int] = quantity("Sum", lambda tokens: None, by="source")
    # Sums over supervised tokens with a teacher: of divergences in nats, of agreements, and of the teacher's
    # probabilities of its list.
    num_taught: int = quantity("Sum", _sum_of_teacher("is_taught"))
    divergence: float = quantity("Sum", _sum_of_teacher("divergence"), float)
    num_agreeing: int = quantity("Sum", _sum_of_teacher("agrees"))
    covered: float = quantity("Sum", _sum_of_teacher("covered"), float)
    num_taught_by_source: dict[str, int] = quantity("Sum", _of_teacher("is_taught"), by="source")
    divergence_by_source: dict[str, float] = quantity("Sum", _of_teacher("divergence"), float, by="source")
    # Tokens of samples (real), plus padding inside documents (aligned), plus filler documents (padded).
    num_real_tokens: int = quantity("Replicated", lambda pack: pack.num_real_tokens)
    num_aligned_tokens: int = quantity("Replicated", lambda pack: pack.num_aligned_tokens)
    num_padded_tokens: int = quantity("Replicated", lambda pack: pack.cu_seqlens[-1])
    num_documents: int = quantity("Replicated", lambda pack: pack.num_documents)
    # By the CP size of a pack, with dynamic CP; filler documents, and packs of nothing else, do not count.
    num_packs_by_cp_size: dict[str, int] = quantity("Replicated", lambda pack: pack.num_documents > 0, by="cp_size")
    num_aligned_by_cp_size: dict[str, int] = quantity("Replicated", lambda pack: pack.num_aligned_tokens, by="cp_size")
    num_slots: int = quantity("Replicated", lambda pack: pack.cp_size)  # microbatches of all ranks of dp x cp
    attention_flops: float = quantity("Replicated", None, float)  # forward and backward, by the lengths of documents
    # With dynamic CP, the bytes that ranks that share a pack receive from each other, and what they would receive if
    # all packs were on the largest CP group.  Both count one tp rank and the average pipeline stage.
    cp_bytes: float = quantity("Replicated", None, float)
    cp_bytes_fixed: float = quantity("Replicated", None, float)
    work_imbalance: float = quantity("Replicated", None, float, np.maximum)  # FLOPs of dp x cp ranks: largest / mean
    # Only sequences with a supervised token are measured.  Without such a sequence, min is inf and max is -inf.
    num_sequences: int = quantity("PerSequence", lambda losses: len(losses.mean_nll))
    sequence_nll: float = quantity("PerSequence", lambda losses: losses.mean_nll.sum(), float)
    perplexity: float = quantity("PerSequence", lambda losses: losses.perplexity.sum(), float)
    perplexity_min: float = quantity("PerSequence", lambda x: x.perplexity.min(initial=np.inf), float, np.minimum)
    perplexity_max: float = quantity("PerSequence", lambda x: x.perplexity.max(initial=-np.inf), float, np.maximum)
    data_wait_s: Peak = quantity("Max", lambda peaks: peaks.get("data_wait_s", 0.0))
    passes_s: Peak = quantity(
        "Max", lambda peaks: peaks.get("passes_s", 0.0)
    )  # from the first pass to the sum of gradients
    memory_allocated: Peak = quantity("Max", lambda peaks: peaks.get("memory_allocated", 0.0))  # bytes
    memory_reserved: Peak = quantity("Max", lambda peaks: peaks.get("memory_reserved", 0.0))

    @property
    def lm_loss(self) -> float | None:
        """The objective divided by its denominator, in nats; None without a supervised token."""
        return self.objective / self.denominator if self.num_tokens else None

    def __add__(self, other: Self) -> Self:
        """The totals of both batches together."""
        merged: dict[str, Any] = {
            name: declared.merge(getattr(self, name), getattr(other, name))
            for name, declared in quantities(type(self)).items()
        }
        return replace(self, **merged)


@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """The load of the experts of each layer that has experts, in one step, over all ranks; float64.

    layers: the numbers of these layers, from 0; None: all layers
    """

    chosen: np.ndarray  # [layers, experts] real tokens that chose each expert, with dropped choices
    dropped: np.ndarray  # [layers] choices of real tokens beyond the experts' capacity
    aux: np.ndarray  # [layers] load-balancing loss, mean over real tokens; 0 if its coefficient is 0
    z: np.ndarray  # [layers] squared log-sum-exp of the router's scores, mean over real tokens
    layers: Sequence[int] | None = None

    @property
    def imbalance(self) -> np.ndarray:
        """For each layer, the tokens of the expert with most tokens / the mean of all experts; 0 without tokens."""
        return self.chosen.max(axis=1) / np.maximum(self.chosen.mean(axis=1), 1.0 / self.chosen.shape[1])

    @property
    def worst_layer(self) -> int:
        """The layer with the largest imbalance, from 0."""
        row = int(self.imbalance.argmax())
        return row if self.layers is None else self.layers[row]


@dataclass(frozen=True, kw_only=True)
class StepResult(Totals):
    """The totals of an optimizer step, and the result of its update: norm, learning rate, whether it was skipped."""

    grad_norm: float  # norm of the gradient of the mean loss, before clipping
    learning_rate: float
    skipped: bool  # whether no weight was updated: the global batch has no supervised token, or the step is non-finite
    experts: ExpertLoad | None = None  # None in a dense model

    @property
    def is_nonfinite(self) -> bool:
        """Whether the loss or a gradient is not finite.  All ranks have the same value."""
        return not (math.isfinite(self.objective) and math.isfinite(self.grad_norm))
