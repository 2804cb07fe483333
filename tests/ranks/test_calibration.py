"""A calibration with tiny sizes on two ranks: which numbers it measures, and that all ranks get the same ones.  No
measured time is checked."""

import math
import os
from pathlib import Path
from unittest import mock

from sft.calibration.session import Calibration, calibrate
from sft.calibration.sizes import MeasuredSizes
from sft.estimate.constants import Constant, Constants, Curve, read, write
from sft.estimate.gpus import gpu
from tests.ranks.pool import Ranks, join

TINY = MeasuredSizes(
    products=(16, 64), rows=64, documents=(32, 64), heads=2, head_dim=16, message=1 << 18,
    hidden_size=64, seq_length=64, vocab_size=256,
)  # fmt: skip
STEPS = {"layers", "weights", "tokens", "narrow", "recomputed", "experts"}
ON_ONE_DEVICE = {
    *("gemm_tflops", "attention_forward", "attention_backward"),
    *("elementwise_gb_s", "optimizer_gb_s", "layer_overhead_us", "grouped_gemm"),
}
OF_MESSAGES = {"latency_us", "reduce_scatter", "send", "exposed"}


def measured_names(constants: Constants) -> set[str]:
    return {name for name, value in constants.items() if value.is_measured}


def on_each_rank(per_node: int) -> Calibration:
    join()
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(per_node)):
        return calibrate("cpu", TINY)


def test_two_ranks_of_a_node(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2).run(on_each_rank, 2)
    assert first == second and set(first.errors) == STEPS
    constants = first.constants
    assert measured_names(constants) == ON_ONE_DEVICE | OF_MESSAGES | {"intra_gb_s"}
    assert [size for size, _ in constants.gemm_tflops.points] == [16, 64]
    assert [size for size, _ in constants.attention_backward.points] == [32, 64]
    assert constants.attention_kernel == "plain torch"
    assert constants.peak_tflops == max(rate for _, rate in constants.gemm_tflops.points)
    for _, value in constants.items():
        numbers = [rate for _, rate in value.points] if isinstance(value, Curve) else [value.value]
        assert all(math.isfinite(number) and number >= 0 for number in numbers)
        assert "ranks 2" in value.source or value.source.startswith("assumed: ")
    write(constants, tmp_path / "cpu.json")
    assert read(tmp_path / "cpu.json") == constants
    said = first.describe()
    assert said[0].startswith("constants of cpu: measured gemm_tflops, grouped_gemm, attention_forward")
    assert "linear_attention" in said[0].split("; assumed ")[1]


def test_two_nodes_of_a_rank(ranks: Ranks) -> None:
    first, _ = ranks(2).run(on_each_rank, 1)
    assert measured_names(first.constants) == ON_ONE_DEVICE | OF_MESSAGES | {"inter_gb_s"}
    assert first.constants.intra_gb_s == Constant(
        gpu("cpu").intra_node_gb_s, "assumed: 3/4 of the link's one direction"
    )


def test_one_rank_measures_no_messages(ranks: Ranks) -> None:
    (alone,) = ranks(1).run(on_each_rank, 1)
    assert measured_names(alone.constants) == ON_ONE_DEVICE
