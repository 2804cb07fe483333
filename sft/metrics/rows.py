"""Declares every number of metrics.jsonl as a row, in the order of the records.

These rows determine the records, the names in TensorBoard, W&B and MLflow, and the tables and the schema of
docs/reference/metrics.md.  `totals.py` declares the quantities from which rows are computed.
"""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from sft.metrics.long_records import BY_TASK
from sft.metrics.run_facts import Formula, RunFacts
from sft.metrics.totals import ExpertLoad, StepResult, Totals, quantities

SCHEMA = 10  # version of the schema of metrics.jsonl


@dataclass(frozen=True)
class Row:
    """One number of the log.

    name  key in the record; if `nested`, "/" separates the keys of nested objects, and NAME stands for a bucket's name
    json  JSON Schema of the value.  If it allows null, null stands for a number that is not finite, or for a ratio
          whose denominator is 0
    """

    name: str
    records: tuple[str, ...]  # the kinds of records that contain the row
    unit: str
    layout: str  # how the number differs between two layouts: docs/reference/metrics.md, "What the layout changes"
    source: str | Formula | None  # a field of Totals or StepResult; None: the caller of `_record` gives the value
    json: Mapping[str, Any]
    meaning: str
    _: KW_ONLY
    only_if: Callable[[Any, RunFacts], bool] | None = None  # whether a record contains the row; None: always
    nested: bool = False
    drawn: bool = True  # whether TensorBoard, W&B and MLflow also show the number

    @property
    def kind(self) -> str:
        """The word for the ranks over which the number is combined (`Formula.kind`): Sum, Ratio, ..."""
        return _KINDS.get(self.source, "") if isinstance(self.source, str) else self.source.kind if self.source else ""

    def value(self, totals: Any, run: RunFacts) -> Any:
        """The number of this row, which must have a source."""
        assert self.source is not None, self.name
        return getattr(totals, self.source) if isinstance(self.source, str) else self.source.value(totals, run)


_KINDS = {name: quantity.kind for name, quantity in quantities(Totals).items()}


def ratio(numerator: str, denominator: str) -> Formula:
    """The formula of one quantity divided by another, each summed over all ranks; None if the denominator is 0."""

    def value(totals: Any, run: RunFacts) -> Any:
        above, below = getattr(totals, numerator), getattr(totals, denominator)
        if isinstance(below, Mapping):
            return {name: above[name] / count if count else None for name, count in below.items()}
        return above / below if below else None

    return Formula("PerSequence" if _KINDS[numerator] == "PerSequence" else "Ratio", value)


START, TRAIN, EVAL, LONG = ("start",), ("train",), ("eval",), ("long",)
BOTH, ALL = ("train", "eval"), ("start", "train", "eval", "long")
# How a number differs between two layouts: docs/reference/metrics.md, "What the layout changes".
SAME, ROUNDING, PACKS, MACHINE, SIZES = "same", "rounding", "packs", "machine", "sizes"
# JSON Schemas of values.
COUNT = {"type": "integer", "minimum": 0}
SIZE = {"type": "integer", "minimum": 1}
AMOUNT = {"type": "number", "minimum": 0}
ABOVE_0 = {"type": "number", "exclusiveMinimum": 0}
SHARE = {"type": "number", "minimum": 0, "maximum": 1}
NAME = {"type": "string", "minLength": 1}
ONES = {"type": "string", "pattern": "^[01]+$"}
SWITCH = {"type": "boolean"}
NUMBER = {"type": ["number", "null"]}  # null: a number that is not finite, or a ratio with denominator 0
AMOUNT_OR_NULL = {**AMOUNT, **NUMBER}


def _fact(make: Callable[[RunFacts], float]) -> Formula:
    """The formula of a number that depends only on the facts of the run."""
    return Formula("", lambda totals, run: make(run))


def _per_second(quantity: str) -> Formula:
    return Formula("Ratio", lambda step, run: getattr(step, quantity) / run.seconds)


def _loss_by(name: str, meaning: str) -> tuple[Row, Row]:
    """The two rows of the loss by "position" or by "source"."""
    nll, count, key = f"nll_by_{name}", f"num_tokens_by_{name}", f"loss by {name}/NAME"
    loss = Row(f"{key}/loss", BOTH, "nats per token", ROUNDING, ratio(nll, count), NUMBER, meaning, nested=True)
    return loss, Row(f"{key}/tokens", BOTH, "tokens", SAME, count, COUNT, "supervised tokens of NAME", nested=True)


def _objective_differs(totals: Totals, run: RunFacts) -> bool:
    """Whether the objective is not the mean -log p of supervised tokens."""
    loss = run.config.loss
    return loss.reduction != "token" or bool(loss.z_loss_coef or loss.entropy_coef or loss.distill.is_on)


def _is_dynamic(step: StepResult, run: RunFacts) -> bool:
    return bool(run.layout.cp_sizes)


def _has_mtp(totals: Totals, run: RunFacts) -> bool:
    return run.config.model.has_mtp


def _has_teacher(totals: Totals, run: RunFacts) -> bool:
    return totals.num_taught > 0 or run.config.loss.distill.is_on


def _experts(make: Callable[[ExpertLoad], float]) -> Formula:
    return Formula("Sum", lambda step, run: make(step.experts))


def _has_experts(step: StepResult, run: RunFacts) -> bool:
    return step.experts is not None


def _has_aux_loss(step: StepResult, run: RunFacts) -> bool:
    return step.experts is not None and bool(run.config.model.moe.aux_loss_coef)


def _dropped_share(experts: ExpertLoad) -> float:
    return float(experts.dropped.sum() / max(1.0, experts.chosen.sum(axis=1).sum()))


def _memory(name: str) -> tuple[Row, Row]:
    """The two rows of the memory that CUDA has "allocated" or "reserved"."""
    field, key = f"memory_{name}", f"memory/{name}"

    def is_measured(step: StepResult, run: RunFacts) -> bool:
        return bool(getattr(step, field).value)

    gib = Formula("Max", lambda step, run: getattr(step, field).value / 2**30)
    rank = Formula("Max", lambda step, run: getattr(step, field).rank)
    return (
        Row(f"{key}-gib", TRAIN, "GiB", MACHINE, gib, ABOVE_0, "largest peak of ranks; CUDA only", only_if=is_measured),
        Row(f"{key}-rank", TRAIN, "rank", MACHINE, rank, COUNT, "rank with this peak; CUDA only", only_if=is_measured),
    )


def _size(name: str, meaning: str) -> Row:
    source = _fact(lambda run: run.layout.sizes[name])
    return Row(f"layout/{name}", START, "ranks", SIZES, source, SIZE, meaning, nested=True)


# Columns: name, records, unit, layout, source, JSON Schema of the value, meaning.
# fmt: off
GROUPS: dict[str, tuple[Row, ...]] = {
    "The record": (
        Row("schema", START, "", SAME, None, {"const": SCHEMA}, "version of the schema of records"),
        Row("kind", ALL, "", SAME, None, NAME, "`start`, `train`, `eval` or `long`", drawn=False),
        Row("step", ALL, "steps", SAME, None, COUNT, "number of optimizer steps done; 1 after the first",
            drawn=False),
        Row("set", EVAL, "", SAME, None, NAME, "name of the held-out set", drawn=False),
        Row("time", START, "s", MACHINE, None, AMOUNT, "time of the record, since 1970-01-01 UTC"),
        Row("parameters", START, "", SAME, _fact(lambda run: run.num_parameters), SIZE,
            "number of parameters of the whole model"),
        Row("num-steps", START, "steps", SAME, None, SIZE, "number of steps of the whole run"),
        _size("world_size", "number of ranks"),
        _size("tp", "tensor parallel size"),
        _size("cp", "context parallel size"),
        _size("pp", "pipeline parallel size"),
        _size("dp", "data parallel size"),
        _size("ep", "expert parallel size"),
        _size("etp", "expert tensor parallel size"),
    ),
    "Losses": (
        Row("lm loss", BOTH, "nats", ROUNDING, ratio("objective", "denominator"), NUMBER,
            "the objective divided by its denominator"),
        Row("nll", BOTH, "nats per token", ROUNDING, ratio("nll", "num_tokens"), NUMBER,
            "mean -log p(label); only if `lm loss` is not this mean", only_if=_objective_differs),
        Row("entropy", BOTH, "nats per token", ROUNDING, ratio("entropy", "num_tokens"), NUMBER,
            "mean over tokens; only with `loss.entropy`", only_if=lambda x, run: run.config.loss.measures_entropy),
        Row("token accuracy", BOTH, "share", ROUNDING, ratio("num_correct", "num_tokens"), {**SHARE, **NUMBER},
            "share of labels whose logit is the largest, ties included"),
        Row("perplexity/avg", BOTH, "", ROUNDING, ratio("perplexity", "num_sequences"), AMOUNT_OR_NULL,
            "mean of the perplexities of documents, each exp(mean -log p)"),
        Row("perplexity/min", BOTH, "", ROUNDING, "perplexity_min", AMOUNT_OR_NULL,
            "smallest perplexity of a document"),
        Row("perplexity/max", BOTH, "", ROUNDING, "perplexity_max", AMOUNT_OR_NULL,
            "largest perplexity of a document"),
        Row("mtp loss", BOTH, "nats per token", ROUNDING, ratio("mtp_nll", "num_mtp_tokens"), NUMBER,
            "mean -log p of multi-token prediction; not in `lm loss`", only_if=_has_mtp),
        *_loss_by("position", "mean -log p by position in the document"),
        *_loss_by("source", "mean -log p by named source, or by data file"),
        Row("sample loss", EVAL, "nats", ROUNDING, ratio("sequence_nll", "num_sequences"), NUMBER,
            "mean over documents of the mean -log p of each document"),
    ),
    "The teacher": (
        Row("teacher/divergence", BOTH, "nats per token", ROUNDING, ratio("divergence", "num_taught"), NUMBER,
            "mean divergence from the teacher", only_if=_has_teacher),
        Row("teacher/agreement", BOTH, "share", ROUNDING, ratio("num_agreeing", "num_taught"), {**SHARE, **NUMBER},
            "share of tokens with the teacher's first choice", only_if=_has_teacher),
        Row("teacher/covered", BOTH, "share", ROUNDING, ratio("covered", "num_taught"), AMOUNT_OR_NULL,
            "mean probability of the teacher's list", only_if=_has_teacher),
        Row("teacher/tokens", BOTH, "tokens", SAME, "num_taught", COUNT,
            "supervised tokens with a teacher", only_if=_has_teacher),
        Row("teacher by source/NAME/divergence", BOTH, "nats per token", ROUNDING,
            ratio("divergence_by_source", "num_taught_by_source"), NUMBER,
            "by source or data file", only_if=_has_teacher, nested=True),
        Row("teacher by source/NAME/tokens", BOTH, "tokens", SAME, "num_taught_by_source", COUNT,
            "`teacher/tokens` of NAME", only_if=_has_teacher, nested=True), ),
    "The update": (
        Row("grad-norm", TRAIN, "", ROUNDING, "grad_norm", AMOUNT_OR_NULL,
            "gradient norm of the whole objective, before clipping"),
        Row("learning-rate", TRAIN, "", SAME, "learning_rate", AMOUNT, "learning rate of this step"),
        Row("skipped", TRAIN, "", SAME, "skipped", SWITCH, "true: the step updated no weight"),
        Row("bad", TRAIN, "", SAME, "is_nonfinite", SWITCH, "true: the loss or a gradient was not finite"), ),
    "Counts": (
        Row("documents", BOTH, "", SAME, "num_documents", COUNT, "number of samples"),
        Row("sequences", BOTH, "", SAME, "num_sequences", COUNT, "number of samples with a supervised token"),
        Row("tokens/supervised", BOTH, "tokens", SAME, "num_tokens", COUNT,
            "labels with a weight above 0; of a tree, one for each text"),
        Row("tokens/mtp", BOTH, "tokens", SAME, "num_mtp_tokens", COUNT,
            "labels of multi-token prediction", only_if=_has_mtp),
        Row("tokens/real", BOTH, "tokens", SAME, "num_real_tokens", COUNT, "tokens of samples, without padding"),
        Row("tokens/aligned", BOTH, "tokens", SAME, "num_aligned_tokens", COUNT,
            "real tokens, padded per document to `data.doc_multiple`"),
        Row("tokens/padded", BOTH, "tokens", PACKS, "num_padded_tokens", COUNT,
            "computed tokens: aligned tokens and filler documents"),
        Row("tokens/capacity", TRAIN, "tokens", PACKS, Formula("Replicated", lambda step, run: run.capacity(step)),
            SIZE, "largest number of tokens that the packs can hold"),
        Row("padding/alignment", TRAIN, "tokens", SAME,
            Formula("", lambda step, run: step.num_aligned_tokens - step.num_real_tokens), COUNT,
            "`tokens/aligned` - `tokens/real`"),
        Row("padding/filler", TRAIN, "tokens", PACKS,
            Formula("", lambda step, run: step.num_padded_tokens - step.num_aligned_tokens), COUNT,
            "`tokens/padded` - `tokens/aligned`"),
        Row("padding/tail", TRAIN, "tokens", PACKS,
            Formula("", lambda step, run: run.capacity(step) - step.num_padded_tokens), COUNT,
            "`tokens/capacity` - `tokens/padded`"),
    ),
    "Speed": (
        Row("work-imbalance", TRAIN, "", PACKS, "work_imbalance", ABOVE_0,
            "largest FLOPs of a dp x cp rank, divided by their mean"),
        Row("tokens-per-second", TRAIN, "tokens / s", MACHINE, _per_second("num_real_tokens"), AMOUNT,
            "real tokens of all ranks"),
        Row("tokens-per-second-per-rank", TRAIN, "tokens / s", MACHINE,
            Formula("Ratio", lambda step, run: step.num_real_tokens / run.seconds / run.layout.world_size), AMOUNT,
            "real tokens divided by the number of ranks"),
        Row("tokens-per-second-supervised", TRAIN, "tokens / s", MACHINE, _per_second("num_tokens"), AMOUNT,
            "supervised tokens of all ranks"),
        Row("data-wait-share", TRAIN, "share", MACHINE,
            Formula("Max", lambda step, run: step.data_wait_s.value / run.seconds), AMOUNT,
            "longest wait of a rank for data, divided by the step time"),
        Row("data-wait-rank", TRAIN, "rank", MACHINE, Formula("Max", lambda step, run: step.data_wait_s.rank), COUNT,
            "rank with this wait"),
        Row("passes-time-s", TRAIN, "s", MACHINE, Formula("Max", lambda step, run: step.passes_s.value), AMOUNT,
            "passes of the slowest rank, until gradients are added over ranks"),
        Row("passes-time-median-s", TRAIN, "s", MACHINE, Formula("Max", lambda step, run: step.passes_s.median),
            AMOUNT, "the same, median of all ranks"),
        Row("passes-rank", TRAIN, "rank", MACHINE, Formula("Max", lambda step, run: step.passes_s.rank), COUNT,
            "the slowest rank"),
        Row("step-time-s", TRAIN, "s", MACHINE, _fact(lambda run: run.seconds), ABOVE_0,
            "duration of the step by rank 0's clock"),
        Row("tflops-per-rank", TRAIN, "TFLOP/s", MACHINE, Formula("Ratio", lambda step, run: run.tflops_per_rank(step)),
            AMOUNT, "model FLOPs of real tokens"),
        Row("mfu", TRAIN, "share", MACHINE, Formula("Ratio", lambda step, run: run.mfu(step)), AMOUNT,
            "`tflops-per-rank` / peak of the GPU, if it is known", only_if=lambda step, run: run.mfu(step) is not None),
        Row("eval-time-s", EVAL, "s", MACHINE, _fact(lambda run: run.seconds), AMOUNT,
            "duration of the held-out pass by rank 0's clock"), ),
    "Dynamic CP": (
        Row("microbatches", TRAIN, "packs", PACKS, Formula("Replicated", lambda step, run: run.num_microbatches(step)),
            SIZE, "number of packs on each rank, filler included", only_if=_is_dynamic),
        Row("cp-size", TRAIN, "ranks", PACKS, Formula("Ratio", lambda step, run: run.cp_size(step)), AMOUNT,
            "mean over aligned tokens of the CP size of their packs", only_if=_is_dynamic),
        Row("cp-bytes", TRAIN, "bytes", PACKS, Formula("Replicated", lambda x, run: run.over_all_ranks(x.cp_bytes)),
            COUNT, "what ranks that share packs sent each other, over all ranks", only_if=_is_dynamic),
        Row("cp-bytes-fixed", TRAIN, "bytes", PACKS, Formula("Replicated", lambda x, run: run.over_all_ranks(
            x.cp_bytes_fixed)), COUNT, "the same if all packs were on `parallel.cp` ranks", only_if=_is_dynamic),
        Row("by cp size/NAME/packs", TRAIN, "packs", PACKS, "num_packs_by_cp_size", COUNT, "packs on NAME ranks",
            only_if=_is_dynamic, nested=True),
        Row("by cp size/NAME/tokens", TRAIN, "tokens", PACKS, "num_aligned_by_cp_size", COUNT,
            "aligned tokens of these packs", only_if=_is_dynamic, nested=True),
    ),
    "Experts": (
        Row("experts/imbalance", TRAIN, "", ROUNDING, _experts(lambda load: float(load.imbalance.mean())), AMOUNT,
            "largest number of real tokens of an expert, divided by the mean", only_if=_has_experts),
        Row("experts/imbalance-max", TRAIN, "", ROUNDING, _experts(lambda load: float(load.imbalance.max())), AMOUNT,
            "largest imbalance of a layer", only_if=_has_experts),
        Row("experts/imbalance-layer", TRAIN, "layer", ROUNDING, _experts(lambda load: load.worst_layer),
            COUNT, "index of the layer with the largest imbalance, from 0", only_if=_has_experts),
        Row("experts/unused-share", TRAIN, "share", ROUNDING,
            _experts(lambda load: float((load.chosen == 0).mean())), SHARE,
            "share of the experts of all layers that no token chose", only_if=_has_experts),
        Row("experts/dropped-share", TRAIN, "share", PACKS, _experts(_dropped_share), SHARE,
            "share of choices dropped for lack of capacity", only_if=_has_experts),
        Row("experts/z-loss", TRAIN, "", ROUNDING, _experts(lambda load: float(load.z.mean())), NUMBER,
            "squared log-sum-exp of the router's scores", only_if=_has_experts),
        Row("experts/aux-loss", TRAIN, "", ROUNDING, _experts(lambda load: float(load.aux.mean())), NUMBER,
            "load-balancing loss", only_if=_has_aux_loss),
    ),
    "Long-context questions": (
        Row("length", LONG, "tokens", SAME, None, SIZE, "largest number of tokens of a question with its answer",
            drawn=False),
        Row("digest", LONG, "", SAME, None, NAME, "hash of all tokens of these questions", drawn=False),
        Row(f"{BY_TASK}/NAME/right", LONG, "share", ROUNDING, None, SHARE, "share of right answers to the task NAME",
            nested=True),
        Row(f"{BY_TASK}/NAME/loss", LONG, "nats per token", ROUNDING, None, AMOUNT,
            "mean over answers of the mean -log p", nested=True),
        Row(f"{BY_TASK}/NAME/each", LONG, "", ROUNDING, None, ONES,
            "1: a right answer, 0: a wrong one, in the order of depths", nested=True),
        Row("long-time-s", LONG, "s", MACHINE, _fact(lambda run: run.seconds), AMOUNT,
            "duration of these questions by rank 0's clock"),
    ),
    "Memory": (*_memory("allocated"), *_memory("reserved")),
}
# fmt: on
ROWS = tuple(row for group in GROUPS.values() for row in group)
