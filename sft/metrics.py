"""From sums over all ranks to numbers a person reads: console, metrics.jsonl and TensorBoard.

Every number is made here from exact integer counts and a float64 sum that the engine has reduced over all ranks
(`tally.Totals`); nothing is averaged twice.  Only rank 0 writes.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from sft.config import Config, LossConfig
from sft.layout import Layout, train_flops
from sft.mcore.engine import StepResult
from sft.tally import Ratio, Schema, Totals

SCHEMA = 2  # of metrics.jsonl
Record = dict[str, Any]


class Console:
    """The one place that prints.  Rank 0 speaks; the others are quiet."""

    def __init__(self, rank: int, stream: TextIO = sys.stdout) -> None:
        self._speaks, self._stream = rank == 0, stream

    def say(self, text: str) -> None:
        """Print a line (or several) at once, so that a pipe shows progress as it happens."""
        if self._speaks:
            print(text, file=self._stream, flush=True)


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
        "grad-norm": result.grad_norm,
        "learning-rate": result.learning_rate,
        "skipped": result.skipped,
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
    for name in ("allocated", "reserved"):
        peak = totals.peaks[f"memory_{name}"]
        if peak.value:  # CUDA only
            record[f"memory/{name}-gib"], record[f"memory/{name}-rank"] = peak.value / 2**30, peak.rank
    return record


def eval_record(step: int, totals: Totals, config: Config, *, schema: Schema, seconds: float) -> Record:
    """Everything metrics.jsonl says about one pass over the held-out data."""
    return {
        "kind": "eval",
        "step": step,
        **_losses(totals, config.loss, schema),
        "sample loss": totals.sequence_nll.value,
        **_counts(totals),
        "eval-time-s": seconds,
    }


def _losses(totals: Totals, loss: LossConfig, schema: Schema) -> Record:
    """None (null in JSON) where no token was supervised, or a perplexity is beyond what a float holds."""
    count = totals.num_tokens
    found: Record = {"lm loss": totals.loss / totals.denominator if count else None}
    if loss.reduction != "token" or loss.z_loss_coef or loss.entropy_coef:
        found["nll"] = totals.nll / count if count else None
    if loss.measures_entropy:
        found["entropy"] = totals.entropy / count if count else None
    found["perplexity/avg"] = _finite(totals.perplexity.value)
    found["perplexity/min"] = _finite(totals.perplexity_min)
    found["perplexity/max"] = _finite(totals.perplexity_max) if totals.perplexity.count else None
    found["loss by position"] = _apart(schema.positions, totals.by_position)
    found["loss by source"] = _apart(schema.sources, totals.by_source)
    return found


def _apart(names: Sequence[str], ratios: Sequence[Ratio]) -> Record:
    return {n: {"loss": r.value, "tokens": int(r.count)} for n, r in zip(names, ratios, strict=True)}


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


class Metrics:
    """Writes records of a run into its folder.  `step` is the last step already done: what lies beyond it in the
    files is of a run that was cut off and is removed, so that no step is told twice."""

    def __init__(
        self,
        folder: Path,
        console: Console,
        *,
        rank: int,
        step: int,
        num_steps: int,
        every: int,
        tensorboard: bool,
    ) -> None:
        self._console, self._num_steps, self._every = console, num_steps, every
        self._first, self._busy_s = step, 0.0
        self._losses: dict[str, list[tuple[int, float]]] = {"train": [], "held-out": []}
        self._file: TextIO | None = None
        self._events: Any = None
        if rank == 0:
            path = folder / "metrics.jsonl"
            _forget_after(path, step)
            self._file = path.open("a", encoding="utf-8")
            if tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def start(self, facts: Record) -> None:
        """Note the beginning (or continuation) of a run."""
        self._write({"schema": SCHEMA, "kind": "start", "step": self._first, "time": time.time(), **facts})

    def train(self, record: Record) -> None:
        self._remember("train", record)
        self._busy_s += record["step-time-s"]
        self._write(record)
        step = record["step"]
        if step % self._every == 0 or step == self._num_steps:
            self._console.say(self._line(record))

    def eval(self, record: Record) -> None:
        self._remember("held-out", record)
        self._write(record)
        self._console.say(
            f"held-out after step {record['step']}: lm loss {_number(record['lm loss'])} on "
            f"{record['tokens/supervised']:,} supervised tokens, {record['eval-time-s']:.1f} s"
        )

    def summarise(self) -> None:
        """How far the loss came, first to last of what this process did."""
        for name, losses in self._losses.items():
            if losses:
                (first, before), (last, after) = losses[0], losses[-1]
                self._console.say(f"lm loss, {name}: {before:.4f} (step {first}) -> {after:.4f} (step {last})")

    def close(self) -> None:
        if self._file:
            self._file.close()
        if self._events:
            self._events.close()

    def _line(self, record: Record) -> str:
        step, width = record["step"], len(str(self._num_steps))
        left = self._busy_s / (step - self._first) * (self._num_steps - step)  # evaluation and saving not counted
        note = " | skipped: no supervised token" if record["skipped"] else ""
        return (
            f"step {step:>{width}}/{self._num_steps} | lm loss {_number(record['lm loss'])} | "
            f"grad-norm {record['grad-norm']:9.3f} | lr {record['learning-rate']:.2e} | "
            f"supervised {record['tokens/supervised']:>9,} of {record['tokens/real']:>11,} tokens | "
            f"{record['tokens-per-second']:>9,.0f} tok/s | {record['step-time-s']:6.2f} s | left {_clock(left)}{note}"
        )

    def _remember(self, name: str, record: Record) -> None:
        if record["lm loss"] is not None:
            self._losses[name].append((record["step"], record["lm loss"]))

    def _write(self, record: Record) -> None:
        if self._file:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        if self._events and record["kind"] != "start":
            for name, value in flat(record):
                if name not in ("kind", "step") and value is not None:
                    self._events.add_scalar(_tag(record["kind"], name), float(value), record["step"])
            self._events.flush()


def _forget_after(path: Path, step: int) -> None:
    """Drop the records of steps after `step`, by a new file and a rename; a last line cut short goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        again = record["kind"] == "eval" and record["step"] == step  # told anew by the run that continues
        if record["step"] <= step and not again:
            kept.append(line + "\n")
    temporary = path.with_suffix(".jsonl.tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)


def _tag(kind: str, name: str) -> str:
    """TensorBoard names as Megatron-LM users know them: `lm loss`, `lm loss validation`."""
    return name if kind == "train" else f"{name} validation"


def _number(loss: float | None) -> str:
    return "      -" if loss is None else f"{loss:7.4f}"


def _clock(seconds: float) -> str:
    """3725 -> 1:02:05"""
    whole = int(math.ceil(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
