"""tools/bench/convert.py: its models, its rows, its bound, what it leaves; how fast anything is, is not judged."""

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from tools.bench import __main__ as bench
from tools.bench import convert, fresh_process
from tools.bench.convert import COPY, FULL, IMPORT, SIZE, bars, rows_of
from tools.bench.fresh_process import ProcessTook as Took
from tools.bench.harness import Refused

MIB, GIB = 2**20, 2**30
# tiny: 36,864 numbers a layer and 128 of norms; 65,600 beside the layers


def turns(*peaks: int) -> list[dict[str, Took]]:
    """As many turns; an import grew by these bytes."""
    found = []
    for i, peak in enumerate(peaks):
        copied = 1.0 + i  # 1, 2, 3 seconds
        found.append(
            {
                COPY: Took(copied, 0, 300 * MIB),
                IMPORT: Took(copied * (4.0, 2.0, 6.0)[i], peak, peak + 300 * MIB),
                FULL: Took(9.0, 5 * MIB, 305 * MIB),
                SIZE: Took(0.5, 7 * MIB, 307 * MIB),
            }
        )
    return found


@pytest.mark.parametrize(
    "shape, gib, layers, num_bytes",
    [
        # layers of 60,821,504 numbers, the embedding 262,668,288, a norm 2,048
        ("llama-3.2-1b", 1, 4, 2 * (262_668_288 + 2_048 + 4 * 60_821_504)),
        ("llama-3.2-1b", 0.001, 1, 2 * (262_668_288 + 2_048 + 60_821_504)),  # one, however little is asked for
        # 218,112,000; twice 525,336,576; 4,096
        ("llama-3-8b", 2.9, 2, 2 * (2 * 525_336_576 + 4_096 + 2 * 218_112_000)),
        ("tiny", 0.001, 12, 2 * (65_600 + 12 * 36_992)),  # 1,019,008; one more would be 1,092,992 of 1,073,742
    ],
)
def test_the_model_fits_the_bytes(shape: str, gib: float, layers: int, num_bytes: int) -> None:
    assert convert.num_layers_for(shape, gib * GIB) == layers
    assert convert.num_bytes(convert.tensors_of(convert.config_of(shape, layers))) == num_bytes


def test_the_rows() -> None:
    """Ratios are of one turn: 4, 2, 6, not 8 / 2, and each of the last row's is its own."""
    rows = {row["way"]: row for row in rows_of(turns(10 * MIB, 30 * MIB, 20 * MIB), 6 * GIB)}
    keys = ("seconds", "bytes_per_s", "peak", "total")
    assert {name: tuple(row[key] for key in keys) for name, row in rows.items()} == {
        COPY: (2.0, 3 * GIB, 0, 300 * MIB),
        IMPORT: (4.0, 1.5 * GIB, 30 * MIB, 330 * MIB),
        FULL: (9.0, 6 / 9 * GIB, 5 * MIB, 305 * MIB),
        SIZE: (0.5, 12 * GIB, 7 * MIB, 307 * MIB),
    }
    ratios = {name: tuple(row.get(key) for key in ("ratio", "ratio_min", "ratio_max")) for name, row in rows.items()}
    assert ratios == {COPY: (None,) * 3, IMPORT: (4, 2, 6), FULL: (4.5, 3, 9), SIZE: (0.25, 0.5 / 3, 0.5)}


@pytest.mark.parametrize("more, is_missed", [(0, False), (1, True)])
def test_the_bound(more: int, is_missed: bool) -> None:
    """1 GiB of the largest tensor and 2 GiB; the turn that took most counts, and a copy does not."""
    found = turns(MIB, 3 * GIB + more, MIB)
    found[0][COPY] = Took(1.0, 9 * GIB, 9 * GIB)
    judged = list(bars([{"case": "x", "largest": GIB, **row} for row in rows_of(found, 1)]))
    assert [bar.is_missed for bar in judged] == [is_missed, False, False]
    assert {bar.bound for bar in judged} == {3 * GIB}


def test_what_a_process_took_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It grows by 64 MiB, after 200 that its libraries had for a while; what is here counts for nothing."""
    here = bytearray(500 * MIB)
    (tmp_path / "command.py").write_text(
        "import sys\nbytearray(200 << 20)\n"
        "def main():\n    size = int(sys.argv[1]) << 20\n    bytearray(size)\n    return 0\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    took = fresh_process.measured(tmp_path, "command:main", 64)
    assert 60 * MIB < took.peak < 90 * MIB and took.peak < took.total < 800 * MIB
    assert took.seconds > 0 and len(here) == 500 * MIB


@pytest.mark.parametrize("error, status", [(KeyboardInterrupt, 130), (Refused("it is broken"), 2)])
def test_an_error_leaves_nothing(
    error: Any, status: int, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def measured(folder: Path, *words: object) -> Took:
        seen.append((folder / "model" / "model.safetensors").exists())
        raise error

    monkeypatch.setattr(fresh_process, "measured", measured)
    assert bench.main(["convert", "--tiny", f"--folder={tmp_path}"]) == status
    assert seen == [True] and list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ("convert: it is broken\n" if status == 2 else "")


def test_a_way_back_that_changes_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no measurement."""
    for name, digest in (("megatron/iter_0000000", "a"), ("exported", "b"), ("copied", "c")):
        (tmp_path / name).mkdir(parents=True)
        content = {"format": "sft checkpoint 1", "tensors": {"x": digest}, "files": {}}
        (tmp_path / name / "manifest.json").write_text(json.dumps(content))
    commands: list[str] = []

    def measured(folder: Path, command: str, *words: object) -> Took:
        commands.append(command)
        return Took(1.0, 0, 0)

    monkeypatch.setattr(fresh_process, "measured", measured)
    with pytest.raises(Refused, match="the way there and back gave other numbers"):
        convert.turn(tmp_path)
    # the second export is not begun
    assert commands == ["tools.bench.convert:copy", "tools.import_hf:main", "tools.export_hf:main"]


def test_a_disk_too_small(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3.1 times 1,019,008 bytes are 3,158,924 and a part."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(GIB, GIB - 3_158_923, 3_158_923))
    assert bench.main(["convert", "--tiny", f"--folder={tmp_path}"]) == 2
    message = capsys.readouterr().err
    assert message == f"convert: this takes 3.0 MiB of disk, and {tmp_path} has 3.0 MiB; see --gib, --folder\n"
    assert list(tmp_path.iterdir()) == []
