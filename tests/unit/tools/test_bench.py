"""tools/bench: every subject runs its tiny sizes, and the harness processes rows; no speed is checked."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.warm_commands import commands
from tools.bench import __main__ as bench
from tools.bench import harness
from tools.bench.harness import Bar, Column, Option, Row, Subject, one_of

NUM_ROWS = {  # number of rows of a tiny run
    "loss_head": 21,
    "attention": 10,
    "kernels": 18,
    "delta_passes": 3,
    "step": 2,
    "longest": 1,
    "dynamic_cp": 1,
    "checkpoint": 11,
    "long_questions": 2,
    "optimizer": 5,
    "recompute": 3,
}
NUM_ABSENT = {"attention": 2, "kernels": 15, "delta_passes": 1}  # rows of kernels that need CUDA
# Beside `step`, or with tests of their own; `make test-gpu-hour`, a part of CI, runs them all.
SLOW = ["longest", "checkpoint", "loss_head", "attention", "kernels", "delta_passes"]


@pytest.mark.parametrize(
    "names",
    [[name for name in NUM_ROWS if name not in SLOW], *(pytest.param([name], marks=pytest.mark.grid) for name in SLOW)],
    ids=",".join,
)
def test_every_subject_has_a_tiny_run(names: list[str], tmp_path: Path) -> None:
    """Runs in other processes, because the trainer on a CPU replaces functions of torch permanently."""
    commands(tmp_path / "bin")
    for name in names:
        command = [tmp_path / "bin/python", "-m", "tools.bench", name, "--tiny", "--json", tmp_path / f"{name}.jsonl"]
        printed = subprocess.run(command, capture_output=True, text=True)
        assert printed.returncode == 0, printed.stdout + printed.stderr
        header, *rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert torch.__version__.startswith(header["header"]["versions"]["torch"])
        assert len(rows) == NUM_ROWS[name]
        absent = [row["status"] for row in rows if row.get("status", "done") != "done"]
        assert [text.partition(": ")[2] for text in absent] == ["it needs CUDA"] * NUM_ABSENT.get(name, 0)
        for row in rows:
            assert f"| {', '.join(row[key] for key in ('case', 'way') if key in row)} " in printed.stdout
        if name == "step":
            check_lora(rows[1])


@pytest.mark.grid
def test_plain_transformers_are_a_case_of_step(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.bench", "step", "--tiny", "--cases", "tiny:256:one:peer"]
    printed = subprocess.run([*command, "--json", str(tmp_path / "rows.jsonl")], capture_output=True, text=True)
    assert printed.returncode == 0, printed.stdout + printed.stderr
    _, row = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert row["status"] == "done" and row["backend"].startswith("transformers, ") and row["tokens"] == 256


def check_lora(row: Row) -> None:
    """Width 64, 4 heads and 2 key heads of 16, MLP 128, 2 layers, 512 tied words; adapters of rank 8; all in fp32.

    megatron-core pads the four norms of queries and keys from 16 to 64 elements, and their sum to a multiple of 128.
    """
    factors = 2 * 8 * ((64 + 64) + 2 * (64 + 32) + (64 + 64) + 3 * (64 + 128))
    weights = 512 * 64 + 2 * (64 * (2 * 64 + 2 * 32 + 3 * 128) + 2 * 64 + 2 * 16) + 64
    assert row["lora"] == {"trained": factors, "gradient_bytes": 4 * factors, "optimizer_bytes": 8 * factors}
    padded = weights + 4 * (64 - 16) + 64
    assert row["full"] == {"trained": weights, "gradient_bytes": 4 * padded, "optimizer_bytes": 8 * weights}
    assert row["time_ratio"] > 0


def test_every_subject_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(NUM_ROWS)
    assert bench.main(["loss"]) == 2
    assert bench.main(["--help"]) == 0
    for name in bench.SUBJECTS:
        with pytest.raises(SystemExit, match="0"):
            bench.main([name, "--help"])
        assert "--tiny" in capsys.readouterr().out
        assert bench.main([name, "--list"]) == 0
        assert len(capsys.readouterr().out.splitlines()) >= len(sys.modules[f"tools.bench.{name}"].SUBJECT.cases)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("loss_head --cases 1.5", "1.5 is not a fraction"),
        ("loss_head --ways fus,f", "--ways f must begin one of fused, distilled, frozen, chunked, full, "),
        ("loss_head --tokens 0", "must be at least 1"),
        ("loss_head --tp 2 --vocab 31", "not a multiple"),
        ("step --device auto", "torch sees no CUDA device"),
        ("attention --tiny --cases 64k:poems", "poems is not one of"),
        ("step --device cpu --cases 4b:64k:poems", "4b:64k:poems is not one of"),
        (
            "step --device cpu --cases 4b:64k:one:often",
            "must begin with one of none, selective, attention_kept, full, peer; got often",
        ),
        (
            "step --device cpu --cases 4b:64k:one:full+magic",
            "magic is not offload or optim with a share, tile with a length, or lora with a rank",
        ),
        ("step --device cpu --steps 0", "--steps must be at least 1, and --seconds above 0"),
        ("step --device cpu --kernels magic", "--kernels magic"),
        ("longest --device cpu --cases tiny", "--memory must set the limit of the search"),
        ("checkpoint --folder /does/not/exist", "is not a folder"),
        ("checkpoint --ranks 0", "must be at least 1"),
        ("dynamic_cp --cases poems:llama-8b:8x2:4", "is not one of chat, longmix, agent, "),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="some of these run on a GPU")
def test_what_cannot_be_measured(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.parse(arguments.split())
    assert ended.value.code == 2 and message in capsys.readouterr().err


# --- the harness -------------------------------------------------------------------------------------------------


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`recompute` becomes another subject, with cases a, b and c.  Returns the list of measured cases."""
    measured: list[str] = []

    def measure(case: str, options: argparse.Namespace) -> Iterator[Row]:
        measured.append(case)
        if case == "c":
            raise harness.Refused("c is wrong")
        yield {"way": "x", "seconds": 0.25, "bytes": 3 << 20}
        yield {"way": "y", "status": "failed: it fell" if options.fail else "out of memory", "notes": ["too much"]}

    def bars(rows: Any) -> Iterator[Bar]:
        for row in rows:
            yield Bar(name=row["case"], value=row.get("seconds"), bound=0.2 if row["case"] == "b" else 0.3)

    made = Subject(
        measure=measure,
        columns=[Column("seconds", "ms", ",.1f", 1e-3), Column("bytes", "MiB", ".2f", 2**20)],
        cases=["a", "b"],
        tiny_cases=["a"],
        read=one_of("a", "b", "c"),
        options={"fail": Option(False), "size": Option(100, 7, "in %")},
        bars=bars,
    )
    monkeypatch.setattr(bench.importlib, "import_module", lambda name: argparse.Namespace(SUBJECT=made, __doc__="x"))
    return measured


def test_a_table_its_notes_and_its_bars(subject: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert bench.main(["recompute", "--check", "--json", str(tmp_path / "rows.jsonl")]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[4] == "| case | ms | MiB |"
    assert lines[6:10] == [
        "| a, x | 250.0 | 3.00 |",
        "| a, y | out of memory |",
        "| b, x | 250.0 | 3.00 |",
        "| b, y | out of memory |",
    ]
    assert lines[11:13] == ["a, y: too much", "b, y: too much"]
    assert lines[14:] == [
        "met a: 0.25, at most 0.3",
        "not measured a",
        "MISSED b: 0.25, at most 0.2",
        "not measured b",
        "1 of 4 bars met, 1 missed",
    ]
    assert bench.main(["recompute"]) == 0  # bars are judged only with --judge
    assert bench.main(["recompute", "--cases", "a", "--check"]) == 0
    assert bench.main(["recompute", "--judge", str(tmp_path / "rows.jsonl")]) == 1
    assert subject == ["a", "b", "a", "b", "a"]


def test_a_failure_and_a_refusal_are_exit_codes(subject: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["recompute", "--fail", "--cases", "a"]) == 1
    assert bench.main(["recompute", "--cases", "c,a"]) == 2
    assert capsys.readouterr().err == "recompute: c is wrong\n" and subject == ["a", "c"]


@pytest.mark.usefixtures("subject")
def test_tiny_sizes_are_defaults_that_can_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert (bench.parse(["recompute"]).size, bench.parse(["recompute", "--tiny"]).size) == (100, 7)
    options = bench.parse(["recompute", "--tiny", "--size", "8"])
    assert (options.size, options.names) == (8, ["a"])
    with pytest.raises(SystemExit):
        bench.parse(["recompute", "--help"])
    assert "in % (100)" in capsys.readouterr().out
