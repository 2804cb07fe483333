"""Prints the predicted time of a step (`step_time.py`), and compares it with the time limits of a run.

The printed time is for packs full of documents of the data's lengths.  Limits must hold for every step, so they are
compared with packs full of documents as long as the longest one.
"""

from collections.abc import Mapping

from sft.config import Config
from sft.estimate import attention_kernels, gpus
from sft.estimate.constants import Constants, constants_of
from sft.estimate.lengths import Lengths
from sft.estimate.step_time import StepTime, step_time
from sft.layers.adapters import Trained
from sft.parallel.layout import Layout

ASSUMED_GPU = "h100"
_SMALL = 0.01  # a part below this share of the step is not printed
# A step whose documents are all as long as the longest one is printed if it takes more than this many times as long.
_ALIKE = 1.05


def constants_for(config: Config, gpu: gpus.Gpu | None) -> Constants | None:
    """The constants of the GPU.  Without a GPU, the constants of an H100, with the peak log.peak_tflops if it is set.

    None: the run is in fp32 or on a CPU.
    """
    if config.run.precision == "fp32" or config.run.device == "cpu":
        return None
    constants = constants_of(gpu or gpus.gpu(ASSUMED_GPU), config.parallel.inter_node_gb_s)
    return constants if gpu or not config.log.peak_tflops else constants.with_peak(config.log.peak_tflops)


def describe(
    config: Config,
    layout: Layout,
    vocab_size: int,
    lengths: Lengths,
    constants: Constants | None,
    environ: Mapping[str, str],
    now: float,
    trained: Trained = Trained(),
) -> list[str]:
    """The prediction in words, and a warning for each time limit that is shorter.

    constants: the result of `constants_for`; now: seconds since 1970, to compare with the end of a SLURM job
    """
    if constants is None:
        return ["not predicted: the rates of the device are unknown in fp32 and on a CPU"]
    time = step_time(config, layout, vocab_size, lengths, constants, trained)
    longest = min(int(lengths.tokens.max()), config.data.seq_length)
    slowest = step_time(config, layout, vocab_size, Lengths.all_of(longest), constants, trained)
    lines = [
        f"predicted and not measured: a step {shown(time.step_s)} s, {time.tokens_per_gpu_s:,.0f} tokens/s per GPU, "
        f"MFU {time.mfu:.0%}, of which {_parts(time)}"
    ]
    if slowest.step_s > _ALIKE * time.step_s or len(lengths.tokens) == 1:
        lines.append(
            f"if packs of {config.data.seq_length:,} tokens hold documents of {longest:,}: a step "
            f"{shown(slowest.step_s)} s, a microbatch {shown(slowest.microbatch_s)} s"
        )
    return [
        *lines,
        constants.describe(),
        attention_kernels.describe(config, constants.gpu),
        *(f"WARNING: {warning}" for warning in _warnings(config, slowest, environ, now)),
    ]


def _parts(time: StepTime) -> str:
    """`attention 74%, recompute 23%, linear 3%`"""
    shares = {name: seconds / time.step_s for name, seconds in time.parts.items()}
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {share:.0%}" for name, share in ordered if share >= _SMALL)


def shown(seconds: float) -> str:
    """A number of seconds as text: 2634.4 -> `2,634`, 0.01234 -> `0.012`."""
    return f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.2g}"


def _warnings(config: Config, time: StepTime, environ: Mapping[str, str], now: float) -> list[str]:
    run, warnings = config.run, []
    if run.progress_timeout_s is not None and time.microbatch_s > run.progress_timeout_s:
        warnings.append(
            f"run.progress_timeout_s = {run.progress_timeout_s} is shorter than a microbatch, about "
            f"{time.microbatch_s:,.0f} s: the run would end as if it hung.  Raise it, or split documents over more "
            "ranks (parallel.cp)."
        )
    # A rank may wait one microbatch for another rank, in a collective that its host queued one microbatch earlier.
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
    """Seconds of training that each limit on the start allows: {"run.exit_after_minutes = 30": 1800.0}."""
    limits, minutes = {}, config.run.exit_after_minutes
    if minutes is not None:
        limits[f"run.exit_after_minutes = {minutes:g}"] = 60 * minutes
    end = environ.get("SLURM_JOB_END_TIME", "")
    if end.strip().isdecimal():
        key = f"SLURM_JOB_END_TIME - run.grace_s = {config.run.grace_s}"
        limits[key] = int(end) - now - config.run.grace_s
    return limits
