"""What declares a number of metrics.jsonl: a row, its source, and the facts of a run that sources use.

`rows.py` is the table of all rows; `totals.py` declares the quantities that rows are made of.
"""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from sft.config import Config
from sft.flops import num_parameters, train_flops
from sft.metrics.totals import Totals, kinds
from sft.parallel.layout import Layout


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the numbers of a run are made with, besides its totals."""

    config: Config
    layout: Layout
    num_parameters: int
    flops: tuple[float, float, float]  # per token, per supervised token, per squared length of a document
    seconds: float = 0.0  # that the step or the held-out pass took

    @staticmethod
    def of(config: Config, layout: Layout, vocab_size: int) -> "RunFacts":
        return RunFacts(
            config=config,
            layout=layout,
            num_parameters=num_parameters(config.model, vocab_size),
            flops=train_flops(config.model, vocab_size),
        )

    @property
    def capacity(self) -> int:
        """Tokens that the packs of a global batch have room for."""
        return self.config.data.seq_length * self.layout.global_batch_size

    def tflops_per_rank(self, totals: Totals) -> float:
        per_token, per_label, per_square = self.flops
        flops = totals.num_real_tokens * per_token + totals.num_tokens * per_label + totals.sum_of_squares * per_square
        return flops / self.seconds / self.layout.world_size / 1e12

    def mfu(self, totals: Totals) -> float | None:
        """Model FLOPs utilisation; None without log.peak_tflops."""
        peak = self.config.log.peak_tflops
        return None if peak is None else self.tflops_per_rank(totals) / peak


def _kind(quantity: str) -> str:
    """What docs/metrics.md calls the kind of a field of Totals; "" where nothing was added up."""
    declared = kinds(Totals)
    return declared[quantity].name if quantity in declared else ""


@dataclass(frozen=True)
class Quantity:
    """The value of a field of Totals or StepResult."""

    field: str

    @property
    def kind(self) -> str:
        return _kind(self.field)

    def value(self, totals: Any, run: RunFacts) -> Any:
        return getattr(totals, self.field)


@dataclass(frozen=True)
class Ratio:
    """One quantity over another, divided after both were added up over all ranks; None where the other is 0."""

    numerator: str
    denominator: str

    @property
    def kind(self) -> str:
        return "PerSequence" if _kind(self.numerator) == "PerSequence" else "Ratio"

    def value(self, totals: Any, run: RunFacts) -> Any:
        numerator, denominator = getattr(totals, self.numerator), getattr(totals, self.denominator)
        if isinstance(denominator, Mapping):
            return {name: numerator[name] / count if count else None for name, count in denominator.items()}
        return numerator / denominator if denominator else None


@dataclass(frozen=True)
class Derived:
    """A metric that is computed from several quantities, or from facts of the run such as its layout."""

    kind: str
    make: Callable[[Any, RunFacts], Any]

    def value(self, totals: Any, run: RunFacts) -> Any:
        return self.make(totals, run)


@dataclass(frozen=True)
class Row:
    """One number of the log.

    name      its key; "/" joins the keys of nested objects where `nested`, and NAME stands for the name of a bucket
    records   the kinds of records that have it
    layout    how it compares between two layouts: docs/metrics.md, "What the layout changes"
    source    None: whoever makes the record gives it
    json      what JSON Schema says of the value; where it may be null, null stands for what is not finite
    only_if   whether a record has it; None: every one
    drawn     whether TensorBoard and W&B get it
    """

    name: str
    records: tuple[str, ...]
    unit: str
    layout: str
    source: Quantity | Ratio | Derived | None
    json: Mapping[str, Any]
    meaning: str
    _: KW_ONLY
    only_if: Callable[[Any, RunFacts], bool] | None = None
    nested: bool = False
    drawn: bool = True

    @property
    def kind(self) -> str:
        """Sum, Ratio, ...: over which ranks the number is combined."""
        return self.source.kind if self.source else ""
