"""tools/bench_convert.py: its models, its table, its bound, what it leaves; how fast anything is, is not judged."""

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tools import bench_convert as bench
from tools.bench_convert import COPY, FULL, IMPORT, SIZE, Failed, Took

MIB, GIB = 2**20, 2**30
TINY = (64, 128, 4, 2, 512, False)  # 36,864 numbers a layer and 128 of norms; 65,600 beside the layers


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.SHAPES, "tiny", TINY)


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
@pytest.mark.usefixtures("tiny")
def test_the_model_fits_the_bytes(shape: str, gib: float, layers: int, num_bytes: int) -> None:
    assert bench.fit(shape, gib * GIB) == layers
    assert bench.num_bytes(bench.planned(bench.config_of(shape, layers))) == num_bytes


@pytest.mark.usefixtures("tiny")
def test_a_model_of_finite_numbers(tmp_path: Path) -> None:
    bench.make(tmp_path / "model", bench.config_of("tiny", 2))
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert found["model.layers.1.mlp.down_proj.weight"].shape == (64, 128) and len(found) == 3 + 2 * 9
    for tensor in found.values():
        assert tensor.dtype == torch.bfloat16 and tensor.isfinite().all()
    assert found["lm_head.weight"].unique().numel() > 1000
    content = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (content["model_type"], content["num_hidden_layers"]) == ("llama", 2)


def test_the_table() -> None:
    """Ratios are of one turn: 4, 2, 6, not 8 / 2, and each of the last row's is its own."""
    head, *lines = bench.table(turns(10 * MIB, 30 * MIB, 20 * MIB), 6 * GIB)
    assert head.split() == "seconds GiB/s times copyfile peak MiB in all".split()
    assert [line[:22].strip() for line in lines] == [COPY, IMPORT, FULL, SIZE]
    assert [line[22:].split() for line in lines] == [
        "2.00 3.00 0 300".split(),
        "4.00 1.50 4.00 (2.00 - 6.00) 30 330".split(),
        "9.00 0.67 4.50 (3.00 - 9.00) 5 305".split(),
        "0.50 12.00 0.25 (0.17 - 0.50) 7 307".split(),
    ]


@pytest.mark.parametrize("more, word, status", [(0, "met", 0), (1, "MISSED", 1)])
def test_the_bound(more: int, word: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """1 GiB of the largest tensor and 2 GiB; the turn that took most counts, and a copy does not."""
    tensors = [bench.PlannedTensor("a", torch.bfloat16, (4, 5)), bench.PlannedTensor("b", torch.bfloat16, (512, MIB))]
    found = turns(MIB, 3 * GIB + more, MIB)
    found[0][COPY] = Took(1.0, 9 * GIB, 9 * GIB)
    assert bench.report(found, tensors, check=True) == status
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        "bench_convert: memory 3.0 GiB beyond the libraries (3.3 GiB in all), bound 3.0 GiB, the largest tensor and "
        f"2.0 GiB: {word}"
    )
    assert bench.report(found, tensors, check=False) == 0


def test_what_a_process_took_is_its_own(tmp_path: Path) -> None:
    """It grows by 64 MiB, after 200 that its libraries had for a while; what is here counts for nothing."""
    here = bytearray(500 * MIB)
    tool = tmp_path / "tool.py"
    tool.write_text(
        "import sys\nbytearray(200 << 20)\n"
        "def main():\n    size = int(sys.argv[1]) << 20\n    bytearray(size)\n    return 0\n"
    )
    took = bench.measured(tmp_path, str(tool), 64)
    assert 60 * MIB < took.peak < 90 * MIB and took.peak < took.total < 800 * MIB
    assert took.seconds > 0 and len(here) == 500 * MIB


def test_a_tool_that_fails(tmp_path: Path) -> None:
    tool = tmp_path / "tool.py"
    tool.write_text("import sys\ndef main():\n    print('no such thing', file=sys.stderr)\n    return 3\n")
    with pytest.raises(Failed, match="^tool.py ended with 3: no such thing$"):
        bench.measured(tmp_path, str(tool))


# --- the whole tool ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiny")
def test_every_row_is_measured_and_nothing_left(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert bench.main(["--shape=tiny", "--gib=0.001", "--repeats=1", "--check", f"--dir={tmp_path}"]) == 0
    *about, shape, _, copied, imported, full, size, last = capsys.readouterr().out.splitlines()
    assert "torch " in about[1] and " cores, load " in about[2]
    assert shape == "tiny, 12 layers, 995 KiB, median of 1 turns"
    assert [line[:22].strip() for line in (copied, imported, full, size)] == [COPY, IMPORT, FULL, SIZE]
    assert last.endswith(", bound 2.0 GiB, the largest tensor and 2.0 GiB: met")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error, status", [(KeyboardInterrupt, 130), (Failed("it is broken"), 2)])
@pytest.mark.usefixtures("tiny")
def test_an_error_leaves_nothing(
    error: Any, status: int, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def measured(folder: Path, *words: object) -> Took:
        seen.append((folder / "model" / "model.safetensors").exists())
        raise error

    monkeypatch.setattr(bench, "measured", measured)
    assert bench.main(["--shape=tiny", "--gib=0.001", f"--dir={tmp_path}"]) == status
    assert seen == [True] and list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ("bench_convert: it is broken\n" if status == 2 else "")


@pytest.mark.usefixtures("tiny")
def test_a_way_back_that_changes_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no measurement."""
    for name, digest in (("there/iter_0000000", "a"), ("back", "b"), ("copied", "c")):
        (tmp_path / name).mkdir(parents=True)
        content = {"format": "sft checkpoint 1", "tensors": {"x": digest}, "files": {}}
        (tmp_path / name / "manifest.json").write_text(json.dumps(content))
    told: list[str] = []

    def measured(folder: Path, tool: str, *words: object) -> Took:
        told.append(Path(tool).name)
        return Took(1.0, 0, 0)

    monkeypatch.setattr(bench, "measured", measured)
    with pytest.raises(Failed, match="the way there and back gave other numbers"):
        bench.turn(tmp_path)
    assert told == [COPY, "import_hf.py", "export_hf.py"]  # the second export is not begun


@pytest.mark.usefixtures("tiny")
def test_a_disk_too_small(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3.1 times 1,019,008 bytes are 3,158,924 and a part."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(GIB, GIB - 3_158_923, 3_158_923))
    assert bench.main(["--shape=tiny", "--gib=0.001", f"--dir={tmp_path}"]) == 2
    told = capsys.readouterr().err
    assert told == f"bench_convert: this takes 3.0 MiB of disk, and {tmp_path} has 3.0 MiB; see --gib, --dir\n"
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wrong = {
        f"--dir={tmp_path}/gone": "is not a folder",
        "--repeats=0": "--repeats 0 --gib 1.0: nothing to measure",
        "--gib=0": "--repeats 3 --gib 0.0: nothing to measure",
        "--gib=nan": "--repeats 3 --gib nan: nothing to measure",
        "--shape=gpt2": "invalid choice",
    }
    for argument, words in wrong.items():
        with pytest.raises(SystemExit) as ended:
            bench.parse([argument])
        assert ended.value.code == 2
        assert words in capsys.readouterr().err
