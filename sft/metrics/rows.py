"""Every number of metrics.jsonl: one declared row each, in the order of the records.

The records, the names in TensorBoard and W&B, the tables of docs/metrics.md and docs/metrics.schema.json follow from
these rows.  `row.py` says what a row is, `totals.py` declares the quantities that rows are made of.
"""

from collections.abc import Callable

from sft.metrics.row import Derived, Quantity, Ratio, Row, RunFacts
from sft.metrics.totals import ExpertLoad, StepResult, Totals

SCHEMA = 5  # of metrics.jsonl

START, TRAIN, EVAL = ("start",), ("train",), ("eval",)
BOTH, ALL = ("train", "eval"), ("start", "train", "eval")
# How a number compares between two layouts: docs/metrics.md, "What the layout changes".
SAME, ROUNDING, PACKS, MACHINE, SIZES = "same", "rounding", "packs", "machine", "sizes"
# What JSON Schema says of a value.
COUNT = {"type": "integer", "minimum": 0}
SIZE = {"type": "integer", "minimum": 1}
AMOUNT = {"type": "number", "minimum": 0}
ABOVE_0 = {"type": "number", "exclusiveMinimum": 0}
SHARE = {"type": "number", "minimum": 0, "maximum": 1}
NAME = {"type": "string", "minLength": 1}
SWITCH = {"type": "boolean"}
NUMBER = {"type": ["number", "null"]}  # null stands for what is not finite, and for a ratio to 0
AMOUNT_OR_NULL = {**AMOUNT, **NUMBER}


def _objective_differs(totals: Totals, run: RunFacts) -> bool:
    """Whether the objective is something else than -log p of each supervised token."""
    loss = run.config.loss
    return loss.reduction != "token" or bool(loss.z_loss_coef or loss.entropy_coef)


def _measures_entropy(totals: Totals, run: RunFacts) -> bool:
    return run.config.loss.measures_entropy


def _knows_peak(step: StepResult, run: RunFacts) -> bool:
    return run.config.log.peak_tflops is not None


def _has_experts(step: StepResult, run: RunFacts) -> bool:
    return step.experts is not None


def _has_aux_loss(step: StepResult, run: RunFacts) -> bool:
    return step.experts is not None and bool(run.config.model.moe.aux_loss_coef)


def _run(make: Callable[[RunFacts], float]) -> Derived:
    """A fact of the run."""
    return Derived("", lambda totals, run: make(run))


def _experts(make: Callable[[ExpertLoad], float]) -> Derived:
    return Derived("Sum", lambda step, run: make(step.experts))


def _dropped_share(experts: ExpertLoad) -> float:
    return float(experts.dropped.sum() / max(1.0, experts.chosen.sum(axis=1).sum()))


def _per_second(quantity: str) -> Derived:
    return Derived("Ratio", lambda step, run: getattr(step, quantity) / run.seconds)


def _loss_by(name: str, meaning: str) -> tuple[Row, Row]:
    """Broken down by "position" or by "source"."""
    nll, count, key = f"nll_by_{name}", f"num_tokens_by_{name}", f"loss by {name}/NAME"
    loss = Row(f"{key}/loss", BOTH, "nats per token", ROUNDING, Ratio(nll, count), NUMBER, meaning, nested=True)
    return loss, Row(f"{key}/tokens", BOTH, "tokens", SAME, Quantity(count), COUNT, "supervised ones", nested=True)


def _memory(name: str) -> tuple[Row, Row]:
    """What CUDA has "allocated" or "reserved"."""
    field, key = f"memory_{name}", f"memory/{name}"

    def is_measured(step: StepResult, run: RunFacts) -> bool:
        return bool(getattr(step, field).value)

    gib = Derived("Max", lambda step, run: getattr(step, field).value / 2**30)
    rank = Derived("Max", lambda step, run: getattr(step, field).rank)
    return (
        Row(f"{key}-gib", TRAIN, "GiB", MACHINE, gib, ABOVE_0, "peak of any rank; CUDA only", only_if=is_measured),
        Row(f"{key}-rank", TRAIN, "rank", MACHINE, rank, COUNT, "which rank; CUDA only", only_if=is_measured),
    )


def _size(name: str, meaning: str) -> Row:
    return Row(
        f"layout/{name}", START, "ranks", SIZES, _run(lambda run: run.layout.sizes[name]), SIZE, meaning, nested=True
    )


# Columns: name, records, unit, layout, source, what JSON Schema says of the value, meaning.
# fmt: off
GROUPS: dict[str, tuple[Row, ...]] = {
    "The record": (
        Row("schema", START, "", SAME, None, {"const": SCHEMA}, "version of this page"),
        Row("kind", ALL, "", SAME, None, NAME, "`start`, `train` or `eval`", drawn=False),
        Row("step", ALL, "steps", SAME, None, COUNT, "optimizer steps done; the first is 1", drawn=False),
        Row("set", EVAL, "", SAME, None, NAME, "name of the held-out set", drawn=False),
        Row("time", START, "s", MACHINE, None, AMOUNT, "since 1970-01-01 UTC"),
        Row("parameters", START, "", SAME, _run(lambda run: run.num_parameters), SIZE, "of the whole model"),
        Row("num-steps", START, "steps", SAME, None, SIZE, "that the run is to do"),
        _size("world_size", "all of them"),
        _size("tp", "tensor parallel size"),
        _size("cp", "context parallel size"),
        _size("pp", "pipeline parallel size"),
        _size("dp", "data parallel size"),
        _size("ep", "expert parallel size"),
        _size("etp", "expert tensor parallel size"),
    ),
    "Losses": (
        Row("lm loss", BOTH, "nats", ROUNDING, Ratio("objective", "denominator"), NUMBER,
            "the objective over its denominator"),
        Row("nll", BOTH, "nats per token", ROUNDING, Ratio("nll", "num_tokens"), NUMBER,
            "-log p(label); only where `lm loss` is something else", only_if=_objective_differs),
        Row("entropy", BOTH, "nats per token", ROUNDING, Ratio("entropy", "num_tokens"), NUMBER,
            "of the predictions; only with `loss.entropy`", only_if=_measures_entropy),
        Row("token accuracy", BOTH, "share", ROUNDING, Ratio("num_correct", "num_tokens"), {**SHARE, **NUMBER},
            "whose label had the largest score of all; ties count"),
        Row("perplexity/avg", BOTH, "", ROUNDING, Ratio("perplexity", "num_sequences"), AMOUNT_OR_NULL,
            "exp of each document's mean -log p; the mean"),
        Row("perplexity/min", BOTH, "", ROUNDING, Quantity("perplexity_min"), AMOUNT_OR_NULL, "the smallest"),
        Row("perplexity/max", BOTH, "", ROUNDING, Quantity("perplexity_max"), AMOUNT_OR_NULL, "the largest"),
        *_loss_by("position", "-log p by position in the document"),
        *_loss_by("source", "-log p by named source, or by data file"),
        Row("sample loss", EVAL, "nats", ROUNDING, Ratio("sequence_nll", "num_sequences"), NUMBER,
            "mean over documents of each one's mean -log p"),
    ),
    "The update": (
        Row("grad-norm", TRAIN, "", ROUNDING, Quantity("grad_norm"), AMOUNT_OR_NULL,
            "of `lm loss` and balancing losses, before clipping"),
        Row("learning-rate", TRAIN, "", SAME, Quantity("learning_rate"), AMOUNT, "of this step"),
        Row("skipped", TRAIN, "", SAME, Quantity("skipped"), SWITCH, "nothing was updated"),
        Row("bad", TRAIN, "", SAME, Quantity("is_nonfinite"), SWITCH, "the loss or a gradient was not finite"),
    ),
    "Counts": (
        Row("documents", BOTH, "", SAME, Quantity("num_documents"), COUNT, "samples"),
        Row("sequences", BOTH, "", SAME, Quantity("num_sequences"), COUNT, "samples with a supervised token"),
        Row("tokens/supervised", BOTH, "tokens", SAME, Quantity("num_tokens"), COUNT, "labels with a loss"),
        Row("tokens/real", BOTH, "tokens", SAME, Quantity("num_real_tokens"), COUNT, "of samples"),
        Row("tokens/aligned", BOTH, "tokens", SAME, Quantity("num_aligned_tokens"), COUNT,
            "with documents padded to `data.doc_multiple`"),
        Row("tokens/padded", BOTH, "tokens", PACKS, Quantity("num_padded_tokens"), COUNT,
            "with filler documents: what was computed"),
        Row("tokens/capacity", TRAIN, "tokens", SAME, _run(lambda run: run.capacity), SIZE,
            "`data.seq_length` x `train.global_batch_size`"),
        Row("padding/alignment", TRAIN, "tokens", SAME,
            Derived("", lambda step, run: step.num_aligned_tokens - step.num_real_tokens), COUNT, "aligned - real"),
        Row("padding/filler", TRAIN, "tokens", PACKS,
            Derived("", lambda step, run: step.num_padded_tokens - step.num_aligned_tokens), COUNT, "padded - aligned"),
        Row("padding/tail", TRAIN, "tokens", PACKS,
            Derived("", lambda step, run: run.capacity - step.num_padded_tokens), COUNT, "capacity - padded"),
    ),
    "Speed": (
        Row("work-imbalance", TRAIN, "", PACKS, Quantity("work_imbalance"), ABOVE_0,
            "FLOPs of a rank's packs: largest over mean, over dp"),
        Row("tokens-per-second", TRAIN, "tokens / s", MACHINE, _per_second("num_real_tokens"), AMOUNT,
            "real tokens of all ranks"),
        Row("tokens-per-second-per-rank", TRAIN, "tokens / s", MACHINE,
            Derived("Ratio", lambda step, run: step.num_real_tokens / run.seconds / run.layout.world_size), AMOUNT,
            "divided by the number of ranks"),
        Row("tokens-per-second-supervised", TRAIN, "tokens / s", MACHINE, _per_second("num_tokens"), AMOUNT,
            "supervised tokens of all ranks"),
        Row("data-wait-share", TRAIN, "share", MACHINE,
            Derived("Max", lambda step, run: step.data_wait_s.value / run.seconds), AMOUNT,
            "longest wait of any rank for its microbatches"),
        Row("step-time-s", TRAIN, "s", MACHINE, _run(lambda run: run.seconds), ABOVE_0, "rank 0's clock"),
        Row("tflops-per-rank", TRAIN, "TFLOP/s", MACHINE, Derived("Ratio", lambda step, run: run.tflops_per_rank(step)),
            AMOUNT, "model FLOPs of real tokens"),
        Row("mfu", TRAIN, "share", MACHINE, Derived("Ratio", lambda step, run: run.mfu(step)), AMOUNT,
            "of `log.peak_tflops`, where that is given", only_if=_knows_peak),
        Row("eval-time-s", EVAL, "s", MACHINE, _run(lambda run: run.seconds), AMOUNT, "rank 0's clock"),
    ),
    "Experts": (
        Row("experts/imbalance", TRAIN, "", ROUNDING, _experts(lambda load: float(load.imbalance.mean())), AMOUNT,
            "most real tokens of an expert over the mean of all", only_if=_has_experts),
        Row("experts/imbalance-max", TRAIN, "", ROUNDING, _experts(lambda load: float(load.imbalance.max())), AMOUNT,
            "of the most uneven layer", only_if=_has_experts),
        Row("experts/imbalance-layer", TRAIN, "layer", ROUNDING, _experts(lambda load: int(load.imbalance.argmax())),
            COUNT, "which layer that is; the first is 0", only_if=_has_experts),
        Row("experts/unused-share", TRAIN, "share", ROUNDING,
            _experts(lambda load: float((load.chosen == 0).mean())), SHARE,
            "of all layers' experts, those no token chose", only_if=_has_experts),
        Row("experts/dropped-share", TRAIN, "share", PACKS, _experts(_dropped_share), SHARE,
            "of choices, those beyond the capacity", only_if=_has_experts),
        Row("experts/z-loss", TRAIN, "", ROUNDING, _experts(lambda load: float(load.z.mean())), NUMBER,
            "squared log-sum-exp of the router's scores", only_if=_has_experts),
        Row("experts/aux-loss", TRAIN, "", ROUNDING, _experts(lambda load: float(load.aux.mean())), NUMBER,
            "load-balancing loss", only_if=_has_aux_loss),
    ),
    "Memory": (*_memory("allocated"), *_memory("reserved")),
}
# fmt: on
ROWS = tuple(row for group in GROUPS.values() for row in group)
