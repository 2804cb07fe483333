"""Estimates how long a step takes, and compares the estimate with the time limits of a run.  Arithmetic only.

    time of a microbatch = FLOPs of its pack / (tp x cp x peak x ASSUMED_SHARE)         through all pipeline stages
    time of a step       = time of a microbatch / pp x (num_microbatches + (pp - 1) / virtual_stages)

FLOPs are those of sft/flops.py, and with train.recompute = full those of a second forward pass.  Nothing is measured:
one assumed share of the peak FLOP/s stands for all models, layouts and backends.  The estimate leaves out the update,
saves and waiting for data.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sft.adapters import Trained
from sft.config import Config
from sft.flops import ASSUMED_SHARE, ASSUMED_TFLOPS, TrainFlops
from sft.parallel.layout import Layout


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Estimated seconds of one microbatch through all pipeline stages, and of a whole step."""

    microbatch_s: float
    step_s: float
    tflops: float  # assumed peak of one device


def estimate(
    config: Config, layout: Layout, vocab_size: int, longest: int, trained: Trained = Trained()
) -> StepTime | None:
    """The time of a step whose packs are full of documents of `longest` tokens, all supervised.

    None if the peak of the device is unknown: without log.peak_tflops, in fp32 or on a CPU.
    """
    tflops = config.log.peak_tflops
    if tflops is None:
        if config.run.precision == "fp32" or config.run.device == "cpu":
            return None
        tflops = ASSUMED_TFLOPS
    length, rank = config.data.seq_length, config.lora.rank or 0
    per = TrainFlops.of(config.model, vocab_size, trained, rank)
    attention = per.attention(np.array([longest])) * length / longest
    flops = length * (per.per_token + per.per_label) + attention
    if config.train.recompute == "full":  # forward is a third of forward and backward of trained layers
        flops += (length * (per.per_token + per.saved) + attention) / 3
    microbatch_s = flops / (layout.tp * layout.cp * tflops * 1e12 * ASSUMED_SHARE)
    waiting = (layout.pp - 1) / layout.virtual_stages
    step_s = microbatch_s / layout.pp * (layout.num_microbatches + waiting)
    return StepTime(microbatch_s=microbatch_s, step_s=step_s, tflops=tflops)


def describe(
    config: Config,
    layout: Layout,
    vocab_size: int,
    longest: int,
    environ: Mapping[str, str],
    now: float,
    trained: Trained = Trained(),
) -> list[str]:
    """The estimate in words, and a warning for each time limit that is shorter.

    longest: tokens of the longest document; now: seconds since 1970, to compare with the end of a SLURM job
    """
    time = estimate(config, layout, vocab_size, longest, trained)
    if time is None:
        return ["not estimated: the peak of the device is unknown; log.peak_tflops sets it"]
    assumed = "log.peak_tflops" if config.log.peak_tflops else "H100 SXM; log.peak_tflops sets the peak"
    return [
        f"estimated and not measured: a step {_shown(time.step_s)} s, a microbatch {_shown(time.microbatch_s)} s, "
        f"if packs of {config.data.seq_length:,} tokens hold documents of {longest:,}",
        f"assumed: {ASSUMED_SHARE:.0%} of {time.tflops:,.0f} TFLOP/s ({assumed})",
        *(f"WARNING: {warning}" for warning in _warnings(config, time, environ, now)),
    ]


def _shown(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.2g}"


def _warnings(config: Config, time: StepTime, environ: Mapping[str, str], now: float) -> list[str]:
    run, warnings = config.run, []
    if run.progress_timeout_s is not None and time.microbatch_s > run.progress_timeout_s:
        warnings.append(
            f"run.progress_timeout_s = {run.progress_timeout_s} is shorter than a microbatch, about "
            f"{time.microbatch_s:,.0f} s: the run would end as if it hung.  Raise it, or split documents over more "
            "ranks (parallel.cp)."
        )
    # A rank may wait a microbatch for another rank, in a collective that its host queued a microbatch before.
    if 2 * time.microbatch_s > run.timeout_s:
        warnings.append(
            f"run.timeout_s = {run.timeout_s} is shorter than two microbatches, about {2 * time.microbatch_s:,.0f} s, "
            "which a rank may wait for another rank.  Raise it."
        )
    if time.step_s > run.grace_s:
        warnings.append(
            f"run.grace_s = {run.grace_s} is shorter than a step, about {time.step_s:,.0f} s, and a save: after a stop "
            "signal the run would end without a save.  Raise it, and with it the time that the launcher gives "
            "(TORCH_ELASTIC_SHUTDOWN_TIMEOUT, sbatch --signal), or lower train.global_batch_size."
        )
    for name, seconds in _remaining(config, environ, now).items():
        if time.step_s > seconds:
            warnings.append(
                f"{name} leaves {seconds:,.0f} s, which is shorter than a step, about {time.step_s:,.0f} s."
            )
    return warnings


def _remaining(config: Config, environ: Mapping[str, str], now: float) -> dict[str, float]:
    """Seconds that a limit of the whole start leaves for training: {"run.exit_after_minutes = 30": 1800.0}."""
    limits, minutes = {}, config.run.exit_after_minutes
    if minutes is not None:
        limits[f"run.exit_after_minutes = {minutes:g}"] = 60 * minutes
    end = environ.get("SLURM_JOB_END_TIME", "")
    if end.strip().isdecimal():
        key = f"SLURM_JOB_END_TIME - run.grace_s = {config.run.grace_s}"
        limits[key] = int(end) - now - config.run.grace_s
    return limits
