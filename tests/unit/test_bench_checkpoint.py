"""tools/bench_checkpoint.py: its model, its table, its bar, its command line; what it finds is not judged."""

from pathlib import Path

import pytest

from tools import bench_checkpoint as bench
from tools.bench_checkpoint import FIRST, STALL, SYNC, Took


def rounds(**seconds: float) -> dict[str, list[Took]]:
    """Every row with three turns of a second, or around what is said of it."""
    found = {name: [Took(1.0, 0), Took(1.0, 3 << 20), Took(1.0, 1 << 20)] for name in bench.ROWS}
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
    assert bench.fit(num_parameters) == (layers, hidden)


def test_a_parameter_of_bf16_takes_14_bytes() -> None:
    """1024 MiB: 76.7 million parameters of bf16, 67.1 million of fp32, which has no narrower copy of them."""
    shapes = {}
    for precision in ("bf16", "fp32"):
        config = bench.config_of(bench.parse(["--precision", precision, "--ranks", "3"]))
        shapes[precision] = (config.model.num_layers, config.model.hidden_size, config.run.precision)
        assert config.train.global_batch_size == 3
    assert shapes == {"bf16": (10, 768, "bf16"), "fp32": (10, 704, "fp32")}


def test_the_slowest_rank_counts() -> None:
    ranks = [{"a": Took(1.0, 7), "b": Took(4.0)}, {"a": Took(2.0, 5), "b": Took(3.0)}]
    assert bench.slowest(ranks) == {"a": Took(2.0, 7), "b": Took(4.0, 0)}


def test_the_table() -> None:
    found = rounds(**{SYNC: 2.0, "torch.save": 0.5, STALL: 0.25, "torch.load": 4.0, bench.BESIDE: 1.5})
    lines = bench.table(found, 3_000_000_000)
    assert [line.split("  ")[0] for line in lines[1:]] == list(bench.ROWS)
    assert lines[0].split() == ["seconds", "GB/s", "peak", "MiB", "ratio"]
    cells = {name: line[26:].split() for name, line in zip(bench.ROWS, lines[1:])}
    assert cells["torch.save"] == ["0.500", "6.00", "2"]
    assert cells[SYNC] == ["2.000", "1.50", "2", "4.000", "of", "torch.save"]
    assert cells[FIRST] == ["0.500", "6.00", "512", "0.250", "of", "sync", "save"]
    assert cells[STALL] == ["0.250", "12.00", "2", "0.125", "of", "sync", "save"]
    assert cells["load, verify full"] == ["1.000", "3.00", "3", "0.250", "of", "torch.load"]
    assert cells["work alone"] == ["1.000"]
    assert cells[bench.BESIDE] == ["1.500", "1.500", "of", "work", "alone"]


@pytest.mark.parametrize("stall, words, status", [(0.3, "15.0% of a sync save (bar 15%, met)", 0), (0.32, "MISSED", 1)])
def test_the_bar(stall: float, words: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The first async save, which allocates, does not count."""
    found = rounds(**{SYNC: 2.0, STALL: stall})
    assert bench.report(found, 1, check=True) == status
    assert words in capsys.readouterr().out.splitlines()[-1]
    assert bench.report(found, 1, check=False) == 0


def test_what_cannot_be_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wrong = {
        f"--folder={tmp_path}/gone": "is not a folder",
        "--ranks=0": "0 is below 1",
        "--mib=0": "0 is below 1",
        "--precision=fp16": "invalid choice",
    }
    for argument, words in wrong.items():
        with pytest.raises(SystemExit) as ended:
            bench.parse([argument])
        assert ended.value.code == 2
        assert words in capsys.readouterr().err
    assert bench.parse([f"--folder={tmp_path}"]).folder == tmp_path


def test_two_ranks_measure_every_row_and_leave_nothing(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert bench.main(["--mib", "4", "--repeats", "1", "--folder", str(tmp_path)]) == 0
    header, _, *lines, last = capfd.readouterr().out.splitlines()
    assert "2 ranks of " in header and "1 layers, 64 hidden, bf16: " in header
    assert [line.split("  ")[0] for line in lines] == list(bench.ROWS)
    assert last.startswith("bench_checkpoint: an async save stalls for ")
    assert list(tmp_path.iterdir()) == []
