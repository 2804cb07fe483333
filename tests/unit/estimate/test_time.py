"""The predicted time of a step, and the limits with which `sft check` compares it.  Expected values by hand."""

from pathlib import Path

import numpy as np
import pytest

from sft.config import LogConfig
from sft.estimate import time
from sft.estimate.gpus import gpu
from sft.estimate.lengths import Lengths
from tests.unit.fixtures.layouts import MILLION, of_millions
from tests.unit.fixtures.rates import flat

# Llama-8B.  Per token 32 layers x (4096 x (2 x 4096 + 2 x 1024) + 3 x 4096 x 14,336) = 6,979,321,856 products, x 6.
# Per supervised token 128,256 x 4096 x 6.  Per token and token of its document 6 x 32 x 4096.
# LAYERS = MILLION x (41,875,931,136 + MILLION x 786,432), HEAD = MILLION x 3,152,019,456
VOCAB = 128_256
NOW = 1_000_000.0


RATES = flat(0.35 * 989)  # a rank computes 3.4615e14 FLOPs in a second


def described(lengths: Lengths = Lengths.all_of(MILLION), **case: dict[str, object]) -> list[str]:
    return time.describe(*of_millions(**case), VOCAB, lengths, RATES, {}, NOW)


def test_the_step_lasts_longer_than_the_limit_of_a_microbatch() -> None:
    """(LAYERS + HEAD) / (8 x 3.4615e14) = 329.3 s, and 8 microbatches.  Only run.grace_s is shorter than a step."""
    assert described() == [
        "predicted and not measured: a step 2,634 s, 398 tokens/s per GPU, MFU 35%, of which attention 95%, linear 5%",
        "if packs of 1,048,576 tokens hold documents of 1,048,576: a step 2,634 s, a microbatch 329 s",
        "constants of h100: measured gemm_tflops, attention_forward, attention_backward, linear_attention; assumed "
        "grouped_gemm, elementwise_gb_s, optimizer_gb_s, host_optimizer_gb_s, pcie_gb_s, intra_gb_s, inter_gb_s, "
        "reduce_scatter, send, latency_us, layer_overhead_us, exposed",
        "assumed kernels of attention: full attention by Transformer Engine (602 / 530 TFLOP/s, measured on one H200 "
        "(docs/numbers/h200.md), cuDNN called by torch)",
        "WARNING: run.grace_s = 100 is shorter than a step, about 2,634 s, and a save: after a stop signal the run "
        "would end without a save.  Raise it, and with it the time that the launcher gives "
        "(TORCH_ELASTIC_SHUTDOWN_TIMEOUT, sbatch --signal), or lower train.global_batch_size.",
    ]


def test_limits_hold_for_the_longest_documents() -> None:
    """Packs full of documents of 8,192: 1,048,576 x 51,470,401,536 / 2.7692e15 = 19.5 s.  The longest is as before."""
    lines = described(Lengths(np.array([8192.0, MILLION]), np.array([1.0, 1e-9])), run={"grace_s": 1000})
    assert lines[0].startswith("predicted and not measured: a step 156 s, ")
    assert lines[1].endswith("hold documents of 1,048,576: a step 2,634 s, a microbatch 329 s")
    assert warned(lines) == ["run.grace_s = 1000"]


def test_the_constants_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFT_CACHE", str(tmp_path))
    config, layout = of_millions()
    base = time.constants_for(config, None)
    assert base is not None and base.gpu == "h100" and base.inter_gb_s.value == config.parallel.inter_node_gb_s
    slow = time.constants_for(config.model_copy(update={"log": LogConfig(peak_tflops=494.7)}), None)
    assert slow is not None and slow.gemm_tflops.at(8192) == pytest.approx(base.gemm_tflops.at(8192) / 2)
    other = time.constants_for(config, gpu("h200"))
    assert other is not None and other.gpu == "h200"
    for unknown in ({"precision": "fp32"}, {"device": "cpu"}):
        assert time.constants_for(of_millions(run=unknown)[0], None) is None
    assert time.describe(config, layout, VOCAB, Lengths.all_of(8), None, {}, NOW) == [
        "not predicted: the rates of the device are unknown in fp32 and on a CPU"
    ]


def warned(lines: list[str]) -> list[str]:
    return [line.removeprefix("WARNING: ").split(" is shorter")[0] for line in lines if line.startswith("WARNING: ")]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"grace_s": 2635}, []),
        ({"grace_s": 2634}, ["run.grace_s = 2634"]),
        ({"grace_s": 2635, "progress_timeout_s": 330}, []),
        ({"grace_s": 2635, "progress_timeout_s": 329}, ["run.progress_timeout_s = 329"]),
        ({"grace_s": 2635, "progress_timeout_s": None}, []),
        ({"grace_s": 2635, "timeout_s": 659}, []),
        ({"grace_s": 2635, "timeout_s": 658}, ["run.timeout_s = 658"]),
        ({"grace_s": 2635, "exit_after_minutes": 44.0}, []),
        ({"grace_s": 2635, "exit_after_minutes": 43.0}, ["run.exit_after_minutes = 43 leaves 2,580 s, which"]),
    ],
)
def test_each_limit(limits: dict[str, object], expected: list[str]) -> None:
    assert warned(described(run=limits)) == expected


@pytest.mark.parametrize(("end", "expected"), [(1_005_270, []), (1_005_269, ["leaves 2,634 s, which"])])
def test_the_end_of_a_slurm_job(end: int, expected: list[str]) -> None:
    """run.grace_s before the end of the job, the run stops."""
    case = of_millions(run={"grace_s": 2635})
    lines = time.describe(*case, VOCAB, Lengths.all_of(MILLION), RATES, {"SLURM_JOB_END_TIME": str(end)}, NOW)
    assert warned(lines) == [f"SLURM_JOB_END_TIME - run.grace_s = 2635 {text}" for text in expected]
