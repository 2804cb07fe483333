"""Every quantity that is added up over a step or a held-out pass: its name, its kind and the line that measures it.

The kind (`kinds.py`) decides over which ranks a quantity is combined and how two batches are merged.  What is made of
the quantities, and what the log calls it, is declared in `rows.py`.
"""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np

from sft.metrics.kinds import Imbalance, Kind, Max, Peak, PerSequence, Replicated, Sum, SumBy


def quantity(kind: Kind) -> Any:
    """A field of Totals."""
    return field(metadata={"kind": kind})


def kinds(of: type["Totals"]) -> dict[str, Kind]:
    """The kind of each field, in their order.  Raises TypeError where a field has none."""
    declared = {}
    for quantity_field in fields(of):
        if "kind" not in quantity_field.metadata:
            raise TypeError(f"{of.__name__}.{quantity_field.name} is no quantity: nothing says how to add it up.")
        declared[quantity_field.name] = quantity_field.metadata["kind"]
    return declared


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What all ranks together measured of a step or of a held-out pass."""

    # The objective, summed, and what it is divided by: the sum of weights, or the supervised tokens.
    objective: float = quantity(Sum(lambda tokens: tokens.objective, float))
    denominator: float = quantity(Sum(lambda tokens: tokens.denominator, float))
    # Over supervised tokens, in nats.  The entropy is 0 where it is not measured.
    nll: float = quantity(Sum(lambda tokens: tokens.nll.sum(), float))
    entropy: float = quantity(
        Sum(lambda tokens: 0.0 if tokens.entropy is None else tokens.entropy.sum(dtype=np.float64), float)
    )
    num_tokens: int = quantity(Sum(lambda tokens: len(tokens.nll)))  # supervised
    num_correct: int = quantity(Sum(lambda tokens: int(np.count_nonzero(tokens.correct))))
    nll_by_position: dict[str, float] = quantity(SumBy("position", lambda tokens: tokens.nll, float))
    num_tokens_by_position: dict[str, int] = quantity(SumBy("position"))
    nll_by_source: dict[str, float] = quantity(SumBy("source", lambda tokens: tokens.nll, float))
    num_tokens_by_source: dict[str, int] = quantity(SumBy("source"))
    # Of packs: tokens of samples, with padding of documents, with filler; squares of the lengths of documents.
    num_real_tokens: int = quantity(Replicated(lambda pack: pack.num_real_tokens))
    num_aligned_tokens: int = quantity(Replicated(lambda pack: pack.num_aligned_tokens))
    num_padded_tokens: int = quantity(Replicated(lambda pack: int(pack.cu_seqlens[-1])))
    num_documents: int = quantity(Replicated(lambda pack: pack.num_documents))
    sum_of_squares: int = quantity(Replicated(lambda pack: int((pack.lengths.astype(np.int64) ** 2).sum())))
    work_imbalance: float = quantity(Imbalance())  # largest over mean, over dp, of FLOPs
    # Of sequences with a supervised token.  Without one the smallest perplexity is inf, the largest -inf.
    num_sequences: int = quantity(PerSequence(lambda nll, perplexity: len(nll), int))
    sequence_nll: float = quantity(PerSequence(lambda nll, perplexity: nll.sum()))
    perplexity: float = quantity(PerSequence(lambda nll, perplexity: perplexity.sum()))
    perplexity_min: float = quantity(
        PerSequence(lambda nll, perplexity: perplexity.min(initial=np.inf), combine=np.minimum)
    )
    perplexity_max: float = quantity(
        PerSequence(lambda nll, perplexity: perplexity.max(initial=-np.inf), combine=np.maximum)
    )
    data_wait_s: Peak = quantity(Max("data_wait_s"))
    memory_allocated: Peak = quantity(Max("memory_allocated"))  # bytes
    memory_reserved: Peak = quantity(Max("memory_reserved"))

    @property
    def lm_loss(self) -> float | None:
        """The objective over its denominator, in nats; None without a supervised token."""
        return self.objective / self.denominator if self.num_tokens else None

    def __add__(self, other: Self) -> Self:
        """Of two batches together."""
        merged: dict[str, Any] = {
            name: kind.merge(getattr(self, name), getattr(other, name)) for name, kind in kinds(type(self)).items()
        }
        return replace(self, **merged)


@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """How evenly the experts of each layer were loaded in one step, over all ranks; float64.

    chosen   [layers, experts] real tokens that chose each expert, before any was dropped
    dropped  [layers] choices of real tokens that found no room
    aux, z   [layers] mean over real tokens; aux is 0 where its coefficient is
    """

    chosen: np.ndarray
    dropped: np.ndarray
    aux: np.ndarray
    z: np.ndarray

    @property
    def imbalance(self) -> np.ndarray:
        """[layers]: most tokens of an expert over the mean of all; 0 where no token chose."""
        return self.chosen.max(axis=1) / np.maximum(self.chosen.mean(axis=1), 1.0 / self.chosen.shape[1])


@dataclass(frozen=True, kw_only=True)
class StepResult(Totals):
    """The totals of an optimizer step, and the result of its update: norm, learning rate, whether it was skipped."""

    grad_norm: float  # before clipping, of the mean loss
    learning_rate: float
    skipped: bool  # nothing was updated: no supervised token in the whole global batch, or non-finite
    experts: ExpertLoad | None = None  # None in a dense model

    @property
    def is_nonfinite(self) -> bool:
        """The loss or a gradient is not finite.  The same on all ranks."""
        return not (math.isfinite(self.objective) and math.isfinite(self.grad_norm))
