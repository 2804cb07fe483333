"""tools/bench/checkpoint.py: its model, its rows, its bar; how fast anything is, is not judged."""

import pytest

from tools.bench import checkpoint
from tools.bench.checkpoint import COMPARED_WITH, bars, rows_of
from tools.bench.checkpoint_rank import BESIDE, FIRST, STALL, SYNC, WORK, Took, slowest


def turns(**seconds: float) -> dict[str, list[Took]]:
    """Every row with three turns of a second, or around what is given for it."""
    found = {name: [Took(1.0, 0), Took(1.0, 3 << 20), Took(1.0, 1 << 20)] for name in COMPARED_WITH}
    found[FIRST] = [Took(0.5, 512 << 20)]
    for name, value in seconds.items():
        found[name] = [Took(9.0), Took(value, 2 << 20), Took(0.001)]  # the median is the one in the middle
    return found


@pytest.mark.parametrize(
    "num_parameters, layers, hidden",
    [
        (1, 1, 64),  # the least there is
        (4096 * 64 + 2 * 13 * 64**2, 1, 128),  # 368,640: 4096 x 128 alone is more
        (4096 * 512 + 8 * 13 * 512**2, 8, 512),
        (4096 * 512 + 6.6 * 13 * 512**2, 7, 512),
        (80e6, 10, 768),
    ],
)
def test_the_model_fits_the_bytes(num_parameters: float, layers: int, hidden: int) -> None:
    assert checkpoint.sizes_for(num_parameters) == (layers, hidden)


def test_a_parameter_of_bf16_takes_14_bytes() -> None:
    """1024 MiB: 76.7 million parameters of bf16, 67.1 million of fp32, which has no narrower copy of them."""
    shapes = {}
    for precision in ("bf16", "fp32"):
        config = checkpoint.config_of(precision, 1024, 3)
        shapes[precision] = (config.model.num_layers, config.model.hidden_size, config.run.precision)
        assert config.train.global_batch_size == 3
    assert shapes == {"bf16": (10, 768, "bf16"), "fp32": (10, 704, "fp32")}


def test_the_slowest_rank_counts() -> None:
    ranks = [{"a": Took(1.0, 7), "b": Took(4.0)}, {"a": Took(2.0, 5), "b": Took(3.0)}]
    assert slowest(ranks) == {"a": Took(2.0, 7), "b": Took(4.0, 0)}


def test_the_rows() -> None:
    found = turns(**{SYNC: 2.0, "torch.save": 0.5, STALL: 0.25, "torch.load": 4.0, BESIDE: 1.5})
    rows = {row.pop("way"): row for row in rows_of(found, 3_000_000_000)}
    assert list(rows) == list(COMPARED_WITH)
    assert rows["torch.save"] == {"seconds": 0.5, "bytes_per_s": 6e9, "peak": 2 << 20}
    of_save, of_load = {"compared_with": "torch.save"}, {"compared_with": "torch.load"}
    assert rows[SYNC] == {"seconds": 2.0, "bytes_per_s": 1.5e9, "peak": 2 << 20, "ratio": 4.0, **of_save}
    assert (rows[FIRST]["peak"], rows[FIRST]["ratio"], rows[STALL]["ratio"]) == (512 << 20, 0.25, 0.125)
    verified = {"seconds": 1.0, "bytes_per_s": 3e9, "peak": 3 << 20, "ratio": 0.25, **of_load}
    assert rows["load, verify full"] == verified
    assert rows[WORK] == {"seconds": 1.0}
    assert rows[BESIDE] == {"seconds": 1.5, "ratio": 1.5, "compared_with": WORK}


@pytest.mark.parametrize("stall, is_missed", [(0.3, False), (0.32, True)])
def test_the_bar(stall: float, is_missed: bool) -> None:
    """The first async save, which allocates, does not count."""
    rows = [{"case": "bf16", **row} for row in rows_of(turns(**{SYNC: 2.0, STALL: stall}), 1)]
    (bar,) = bars(rows)
    assert bar.is_missed == is_missed and (bar.value, bar.bound) == (stall / 2, 0.15)
