"""tools/bench: every subject runs its tiny sizes, and what the harness and the subjects make of numbers.

No speed is judged here.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.bench import __main__ as bench
from tools.bench import harness
from tools.bench.harness import Bar, Column, Option, Row, Subject, one_of

# Rows of a tiny run: of each case, its ways.
LOSS = ["F.linear + F.cross_entropy", "fused 5", "fused 9", "chunked", "token_statistics", "full"]
LOSS += ["chunk list + concatenate", "recompute in backward"]
ROWS = {
    "loss_head": [f"{fraction}, {way}" for fraction in ("1", "0.5", "0") for way in LOSS],
    "logprobs": [
        f"{case}, {way}"
        for case in ("40:9", "40:20", "70:9")
        for way in ("log_softmax, gather", "chunked 4", "chunk list + concatenate")
    ],
    "attention": [
        "every, te",
        "every, cudnn",
        *(f"{case}, {way}" for case in ("256:one", "512:chat") for way in ("flash", "flash, cp 2", "sdpa", "plain")),
    ],
    "step": ["tiny:512:chat:full"],
    "trades": ["tiny:256, selective"],
    "longest": ["tiny, full"],
    "peer": ["tiny, 256 tokens"],
    "packing": [
        f"{mix}, {way}"
        for mix in ("chat", "longmix", "agent")
        for way in ("ours", "next-fit in order", "best-fit decreasing")
    ],
    "balance": ["chat:llama-8b:2x4"],
    "collate": ["chat"],
    "tokenize": ["chatml, encode_chat", "chatml, datasets.map"],
    "cp_index": ["1000:8", "1:8", "8192:8"],
    "metrics": ["3"],
    "checkpoint": [
        f"bf16, {way}"
        for way in (
            "torch.save", "sync save", "async save: first stall", "async save: stall", "async save: published",
            "work alone", "work beside an async save", "torch.load", "load, verify full", "load, verify size",
            "load, verify off",
        )
    ],
    "convert": [f"tiny, {way}" for way in ("copyfile", "import", "export, verify full", "export, verify size")],
}  # fmt: skip


def run(*arguments: str, json_file: Path | None = None) -> tuple[int, list[Row]]:
    """The exit status, and the rows that were written."""
    extra = ["--json", str(json_file)] if json_file else []
    code = bench.main([*arguments, *extra])
    lines = json_file.read_text().splitlines() if json_file and json_file.exists() else []
    return code, [row for line in lines if "header" not in (row := json.loads(line))]


SLOW = ("trades", "longest", "peer", "checkpoint", "convert", "loss_head")  # beside `step`, or with tests of their own


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.grid] * (name in SLOW)) for name in bench.SUBJECTS]
)
def test_every_subject_has_a_tiny_run(name: str, tmp_path: Path) -> None:
    """In a process of its own, as a user starts it: the trainer on a CPU replaces functions of torch for good."""
    file = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "tools.bench", name, "--tiny", "--json", str(file)]
    printed = subprocess.run(command, capture_output=True, text=True)
    assert printed.returncode == 0, printed.stdout + printed.stderr
    rows = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    assert [", ".join(row[key] for key in ("case", "way") if key in row) for row in rows] == ROWS[name]
    absent = ["does not run here: it needs CUDA"] * 2 if name == "attention" else []
    assert [row["status"] for row in rows if row.get("status", "done") != "done"] == absent
    for title in ROWS[name]:
        assert f"\n| {title} " in printed.stdout
    header = json.loads(file.read_text().splitlines()[0])["header"]
    assert torch.__version__.startswith(header["versions"]["torch"]) and header["cores"] > 0


@pytest.mark.parametrize("name", bench.SUBJECTS)
def test_every_subject_says_what_it_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main([name, "--help"])
    assert ended.value.code == 0 and "--tiny" in capsys.readouterr().out
    assert bench.main([name, "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= len(sys.modules[f"tools.bench.{name}"].SUBJECT.cases)


def test_the_list_of_subjects(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(ROWS)
    assert bench.main(["loss"]) == 2
    assert bench.main(["--help"]) == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("loss_head --cases 1.5", "1.5 is not a fraction"),
        ("loss_head --ways fus,f", "--ways f: the start of ['fused', 'full', 'F.linear + F.cross_entropy']"),
        ("loss_head --ways nothing", "the start of none"),
        ("loss_head --tokens 0", "must be at least 1"),
        ("loss_head --tp 2 --vocab 31", "not a multiple"),
        ("logprobs --device auto", "torch sees no CUDA device"),
        ("attention --tiny --cases 64k:poems", "poems is not one of"),
        ("attention --tiny --cp 3", "a divisor of 32"),
        ("step --device cpu --cases 2b:64k:one", "2b:64k:one is not one of"),
        ("step --device cpu --cases 4b:64k:poems", "4b:64k:poems is not one of"),
        ("step --device cpu --cases 4b:64k:one:often", "often is not one of none, selective, full"),
        ("step --device cpu --cases 4b:64k:one:full+magic", "magic is not offload or optim with a share, or tile"),
        ("step --device cpu --steps 0", "nothing to measure"),
        ("step --device cpu --kernels magic", "--kernels magic"),
        ("trades --device cpu --cases 9b:64k", "9b:64k:one is not one of"),
        ("longest --device cpu --cases tiny", "--memory must give a limit"),
        ("peer --device cpu --cases 9b", "9b is not one of"),
        ("checkpoint --folder /does/not/exist", "is not a folder"),
        ("checkpoint --ranks 0", "must be at least 1"),
        ("checkpoint --cases fp16", "fp16 is not one of"),
        ("convert --folder /does/not/exist", "is not a folder"),
        ("convert --repeats 0", "--repeats 0 --gib 1.0: nothing to measure"),
        ("convert --gib nan", "--repeats 3 --gib nan: nothing to measure"),
        ("convert --cases gpt2", "gpt2 is not one of"),
        ("tokenize --cases poems", "neither a folder nor one of"),
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
    """`cp_index` is another subject, with cases a, b and c; the list is what was measured."""
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
    code, rows = run("cp_index", "--check", json_file=tmp_path / "rows.jsonl")
    assert code == 1 and [row["case"] for row in rows] == ["a", "a", "b", "b"]
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
    assert bench.main(["cp_index"]) == 0  # bars are judged where that is asked for
    assert bench.main(["cp_index", "--cases", "a", "--check"]) == 0
    assert bench.main(["cp_index", "--judge", str(tmp_path / "rows.jsonl")]) == 1
    assert subject == ["a", "b", "a", "b", "a"]


def test_a_failure_and_a_refusal_are_exit_codes(subject: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["cp_index", "--fail", "--cases", "a"]) == 1
    assert bench.main(["cp_index", "--cases", "c,a"]) == 2
    assert capsys.readouterr().err == "cp_index: c is wrong\n" and subject == ["a", "c"]


@pytest.mark.usefixtures("subject")
def test_tiny_sizes_are_defaults_that_can_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert (bench.parse(["cp_index"]).size, bench.parse(["cp_index", "--tiny"]).size) == (100, 7)
    options = bench.parse(["cp_index", "--tiny", "--size", "8"])
    assert (options.size, options.names) == (8, ["a"])
    with pytest.raises(SystemExit):
        bench.parse(["cp_index", "--help"])
    assert "in % (100)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "relation, value, is_missed",
    [("at most", 2, False), ("at most", 3, True), ("at least", 2, False), ("at least", 1, True), ("above", 2, True)]
    + [("above", 3, False), ("exactly", 2, False), ("exactly", 1, True), ("at most", None, False)],
)
def test_bars(relation: Any, value: float | None, is_missed: bool) -> None:
    assert Bar(name="x", value=value, bound=2, relation=relation).is_missed == is_missed
