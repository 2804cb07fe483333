"""From sums over all ranks to the numbers a person reads: one record a step, one a pass over held-out data.

Every number is made here from exact integer counts and a float64 sum that the engine has reduced over all ranks
(`tally.Totals`); nothing is averaged twice.  Does not write anything (`writers.py`).
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sft.config import Config, LossConfig, MoeConfig
from sft.flops import train_flops
from sft.mcore.engine import StepResult
from sft.mcore.experts import Balance
from sft.metrics.accumulator import Ratio, Schema, Totals
from sft.parallel.layout import Layout

SCHEMA = 5  # of metrics.jsonl: docs/metrics.schema.json
Record = dict[str, Any]


def train_record(
    step: int,
    result: StepResult,
    layout: Layout,
    config: Config,
    *,
    schema: Schema,
    vocab_size: int,
    seconds: float,
) -> Record:
    """Everything metrics.jsonl says about one step; docs/metrics.md explains each name."""
    totals = result.totals
    capacity = config.data.seq_length * layout.global_batch_size
    record = {
        "kind": "train",
        "step": step,
        **_losses(totals, config.loss, schema),
        "grad-norm": _finite(result.grad_norm),
        "learning-rate": result.learning_rate,
        "skipped": result.skipped,
        "bad": result.is_bad,
        **_counts(totals),
        "tokens/capacity": capacity,
        "padding/alignment": totals.num_aligned_tokens - totals.num_real_tokens,
        "padding/filler": totals.num_padded_tokens - totals.num_aligned_tokens,
        "padding/tail": capacity - totals.num_padded_tokens,
        "work-imbalance": totals.work_imbalance,
        "tokens-per-second": totals.num_real_tokens / seconds,
        "tokens-per-second-per-rank": totals.num_real_tokens / seconds / layout.world_size,
        "tokens-per-second-supervised": totals.num_tokens / seconds,
        "data-wait-share": totals.peaks["data_wait_s"].value / seconds,
        "step-time-s": seconds,
    }
    per_token, per_label, per_square = train_flops(config.model, vocab_size)
    flops = totals.num_real_tokens * per_token + totals.num_tokens * per_label + totals.sum_of_squares * per_square
    record["tflops-per-rank"] = flops / seconds / layout.world_size / 1e12
    if config.log.peak_tflops is not None:
        record["mfu"] = record["tflops-per-rank"] / config.log.peak_tflops
    if result.balance:
        record |= _experts(result.balance, config.model.moe)
    for name in ("allocated", "reserved"):
        peak = totals.peaks[f"memory_{name}"]
        if peak.value:  # CUDA only
            record[f"memory/{name}-gib"], record[f"memory/{name}-rank"] = peak.value / 2**30, peak.rank
    return record


def eval_record(step: int, totals: Totals, config: Config, *, set_name: str, schema: Schema, seconds: float) -> Record:
    """Everything metrics.jsonl says about one pass over the held-out set `set_name`."""
    return {
        "kind": "eval",
        "step": step,
        "set": set_name,
        **_losses(totals, config.loss, schema),
        "sample loss": totals.sequence_nll.value,
        **_counts(totals),
        "eval-time-s": seconds,
    }


def _experts(balance: Balance, moe: MoeConfig) -> Record:
    """Load of experts: real tokens only, all ranks."""
    choices = balance.chosen.sum(axis=1)
    uneven = balance.chosen.max(axis=1) / np.maximum(balance.chosen.mean(axis=1), 1.0 / balance.chosen.shape[1])
    found: Record = {
        "experts/imbalance": float(uneven.mean()),
        "experts/imbalance-max": float(uneven.max()),
        "experts/imbalance-layer": int(uneven.argmax()),
        "experts/unused-share": float((balance.chosen == 0).mean()),
        "experts/dropped-share": float(balance.dropped.sum() / max(1.0, choices.sum())),
        "experts/z-loss": _finite(float(balance.z.mean())),
    }
    if moe.aux_loss_coef:
        found["experts/aux-loss"] = _finite(float(balance.aux.mean()))
    return found


def _losses(totals: Totals, loss: LossConfig, schema: Schema) -> Record:
    """None (null in JSON) where no token was supervised, or a number is none that a float holds."""
    count = totals.num_tokens
    found: Record = {"lm loss": _finite(totals.loss / totals.denominator) if count else None}
    if loss.reduction != "token" or loss.z_loss_coef or loss.entropy_coef:
        found["nll"] = _finite(totals.nll / count) if count else None
    if loss.measures_entropy:
        found["entropy"] = _finite(totals.entropy / count) if count else None
    found["token accuracy"] = totals.num_correct / count if count else None
    found["perplexity/avg"] = _finite(totals.perplexity.value)
    found["perplexity/min"] = _finite(totals.perplexity_min)
    found["perplexity/max"] = _finite(totals.perplexity_max) if totals.perplexity.count else None
    found["loss by position"] = _apart(schema.positions, totals.by_position)
    found["loss by source"] = _apart(schema.sources, totals.by_source)
    return found


def _apart(names: Sequence[str], ratios: Sequence[Ratio]) -> Record:
    return {n: {"loss": _finite(r.value), "tokens": int(r.count)} for n, r in zip(names, ratios, strict=True)}


def _counts(totals: Totals) -> Record:
    return {
        "documents": totals.num_documents,
        "sequences": int(totals.perplexity.count),
        "tokens/supervised": totals.num_tokens,
        "tokens/real": totals.num_real_tokens,
        "tokens/aligned": totals.num_aligned_tokens,
        "tokens/padded": totals.num_padded_tokens,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def flat(record: Record) -> Iterator[tuple[str, Any]]:
    """{"a": 1, "b": {"c": {"d": 2}}} -> ("a", 1), ("b/c/d", 2)"""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{inner}", x) for inner, x in flat(value))
        else:
            yield name, value
