"""tools/gpu_hour: the declared steps and their limits, the runner with steps of a second, and the report."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from sft import cli
from sft.config import Config
from sft.config.mixer_section import LayerKind
from sft.estimate import memory
from sft.layers.kinds import all_layer_groups
from sft.parallel.layout import Layout
from sft.recipe.load import parse_recipe
from sft.run import environment
from tests.unit.gpu_hour_steps import ROW, setting, step
from tools.bench import __main__ as bench
from tools.bench.harness import Bar
from tools.bench.steps.case import StepCase
from tools.gpu_hour import __main__ as gpu_hour
from tools.gpu_hour import bars, curves, report, runner
from tools.gpu_hour.bars import Outcome
from tools.gpu_hour.step import Result, Step
from tools.gpu_hour.steps import MACHINE, STEPS

MINUTES = {1: 70, 8: 86}  # that the whole may take, by --gpus
STEP_MINUTES = 8
BENCH_GRACE_S = 90  # that the last case of a benchmark of steps may take beyond its --minutes
TEST_S = 20  # that the last test of a GPU may take beyond pytest's --session-timeout
FACTS: dict[str, Any] = {
    "date": "2026-11-23 04:00Z",
    "device": "NVIDIA H100",
    "versions": {"torch": "2.13.0"},
    "commit": "5695716",
    "source": "0123456789abcdef",
    "num_gpus": 1,
}


def words_of(gpus: int, tiny: bool) -> list[tuple[Step, list[str]]]:
    """Every command of a run, without the interpreter."""
    run = setting(Path("/out"), gpus, tiny)
    return [(step, list(words)[2:]) for step in STEPS if step.gpus <= gpus for words in step.commands(run)]


# --- the declared steps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [1, 8])
def test_the_limits_add_up_to_what_is_promised(gpus: int) -> None:
    limits = [step.limit_s for step in (MACHINE, *STEPS) if step.gpus <= gpus]
    assert max(limits) <= 60 * STEP_MINUTES and sum(limits) <= 60 * MINUTES[gpus]
    for declared, words in words_of(gpus, tiny=False):
        if "--minutes" in words:
            ends_s = 60 * float(words[words.index("--minutes") + 1]) + BENCH_GRACE_S
            assert ends_s <= declared.limit_s - runner.GRACE_S, declared.name
        if words[0] == "pytest":  # which reports nothing if it is ended
            (session,) = [float(word.partition("=")[2]) for word in words if word.startswith("--session-timeout=")]
            assert session + TEST_S <= declared.limit_s - runner.GRACE_S, declared.name


def test_the_steps_come_in_the_order_of_their_worth() -> None:
    assert [step.name for step in STEPS if step.gpus == 1] == (
        "probe-data probe-leak probe-parity tests layouts kinds recurrences more-kinds backends deterministic memory "
        "loss-head kernels delta-passes adapters attention steps recompute offload longest checkpoint"
    ).split()


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("gpus", [1, 8])
def test_every_benchmark_takes_its_options(gpus: int, tiny: bool) -> None:
    lines = [words for _, words in words_of(gpus, tiny) if words[0] == "tools.bench"]
    assert len(lines) == 10
    for words in lines:
        assert bench.parse([*words[1:], "--list"]).json.parent.parent == Path("/out")
        assert words[words.index("--device") + 1] == ("cpu" if tiny else "cuda")


def config_of(case: str, num_processes: int, device: str) -> Config:
    config = curves.config(curves.overrides(case), device)
    assert Layout.resolve(config, num_processes).world_size == num_processes
    return config


@pytest.mark.parametrize("group", curves.GROUPS)
def test_every_curve_is_a_recipe_that_fits(group: str) -> None:
    for num_processes, cases in curves.GROUPS[group].items():
        configs = [config_of(case, num_processes, "cuda") for case in cases]
        sizes = [dict(word.split("=") for word in case.split()) for case in cases]
        for config, words in zip(configs, sizes, strict=True):
            given = {name: int(words.get(name, 1)) for name in ("tp", "cp", "pp")}
            dp = num_processes // (given["tp"] * given["cp"] * given["pp"])
            assert config.parallel.cp == given["cp"] and int(words.get("dp", 1)) == dp, words
    types = {config_of(case, 8, "cuda").parallel.cp_comm for case in curves.BACKENDS[8]}
    assert types == {"p2p", "all_gather", "a2a", "a2a+p2p"}


def mixers_of(configs: Sequence[Config]) -> set[str]:
    return {group.mixer.kind for config in configs for group in all_layer_groups(config.model)}


def test_the_limits_of_kinds_follow_from_their_number() -> None:
    """Five kinds of attention; three recurrences, also by FLA; experts, adapters and dense models."""
    limits = [curves.limit_s(group) for group in ("kinds", "recurrences", "more-kinds")]
    assert limits == [30 + 5 * 80, 30 + 3 * 80 + 120, 30 + 3 * 80]


def test_every_kind_of_layer_has_a_curve() -> None:
    """On one GPU and on eight: the kinds of LayerKind, also with attention kept, dynamic CP, DeepEP, FP8, adapters."""
    for num_processes in (1, 8):
        groups = (curves.KINDS_OF_ATTENTION, curves.RECURRENCES, curves.MORE_KINDS)
        cases = [case for group in groups for case in group[num_processes]]
        configs = [config_of(case, num_processes, "cuda") for case in cases]
        kept = [config for config in configs if config.train.recompute == "attention_kept"]
        assert mixers_of(configs) == mixers_of(kept) == set(get_args(LayerKind))
        assert {config.run.fp8 for config in configs} == {None, "delayed", "blockwise"}
        assert any(config.lora.is_used and config.model.moe.num_experts for config in configs)
        widths = {config.model.resolved_head_dim for config in configs}
        assert widths >= {64, 128, 192, 256} and any(c.model.full_attention.head_dim == 512 for c in configs)
    linear = {config.parallel.cp for config in configs if config.model.linear_attention.is_used}
    assert linear >= {2, 8}
    assert any(config.parallel.dynamic_cp for config in configs)
    assert any(config.parallel.ep_comm == "deepep" for config in configs)


def test_every_speed_is_a_recipe_that_fits_eight_gpus() -> None:
    lines = [words for _, words in words_of(8, tiny=False) if words[1:2] == ["--standalone"] and "speed" in words]
    assert len(lines) == len(bars.SPEEDS) == 4
    for words in lines:
        name = words[words.index("speed") + 1]
        also = [key for flag, key in zip(words, words[1:]) if flag == "--set"]
        case = StepCase.read(name)
        config = case.config("cuda", also=also)
        layout = Layout.resolve(config, 8)
        assert memory.estimate(config, layout, case.vocab).device < 76 * 2**30, name  # of an H100, with room for NCCL


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("gpus", [1, 8])
def test_every_probe_is_of_a_recipe_that_fits(gpus: int, tiny: bool) -> None:
    num_processes = min(gpus, 2) if tiny else gpus
    lines = [words for _, words in words_of(gpus, tiny) if "probe" in words]
    assert [words[words.index("probe") + 1] for words in lines] == ["data", "leak", "parity"]
    for words in lines:
        assert words[words.index("--nproc-per-node") + 1] == str(num_processes)
        asked = cli._parse(words[words.index("sft") + 1 :])
        for also in ([], getattr(asked, "against", "run.seed=1").split(",")):
            text = (runner.ROOT / asked.recipe).read_text()
            config = parse_recipe(text, "demo", [*asked.overrides, *also]).config
            assert Layout.resolve(config, num_processes).world_size == num_processes


def test_what_a_machine_lacks_is_a_reason_to_skip(tmp_path: Path) -> None:
    reasons = {step.name: step.why_skipped(setting(tmp_path, packages=())) for step in STEPS if step.gpus == 1}
    assert {name: why for name, why in reasons.items() if why} == {
        "backends": "transformer-engine is not installed here (docs/start/install.md)"
    }
    assert STEPS[3].why_skipped(setting(tmp_path, tiny=True)) == "needs a GPU"
    assert STEPS[-1].why_skipped(setting(tmp_path)) == "needs --gpus 8"


# --- bars and the report -------------------------------------------------------------------------------------------


def outcome(*rows: dict[str, Any], exit_code: int = 0) -> Outcome:
    return Outcome(result=Result(status="done", exit_code=exit_code), rows=rows)


def bars_of(group: str, **outcomes: Outcome) -> list[str]:
    named = {name.replace("_", "-"): value for name, value in outcomes.items()}
    return [str(bar) for title, found in bars.judged(named) for bar in found if title == group]


def curve(case: str, losses: list[float], norms: list[float]) -> dict[str, Any]:
    return {"case": case, "losses": losses, "norms": norms}


def test_curves_are_judged_by_their_largest_difference() -> None:
    reference = curve("dp=8", [6.0, 4.0], [1.0, 2.0])
    rows = [
        reference,
        curve("cp=8", [6.0, 4.0001], [1.0, 2.0003]),
        curve("cp=8 precision=bf16", [6.03, 4.0], [1.0, 2.08]),
        curve("tp=2 cp=4", [6.0, float("nan")], [1.0, 2.0]),
    ]
    assert bars_of("One curve on every layout", layouts=outcome(*rows)) == [
        "met           cp=8 beside dp=8, losses: 2.5e-05, at most 0.0001",
        "MISSED        cp=8 beside dp=8, gradient norms: 0.00015, at most 0.0001",
        "met           cp=8 precision=bf16 beside dp=8, losses: 0.005, at most 0.01",
        "MISSED        cp=8 precision=bf16 beside dp=8, gradient norms: 0.04, at most 0.03",
        "MISSED        tp=2 cp=4 beside dp=8, losses: inf, at most 0.0001",
        "met           tp=2 cp=4 beside dp=8, gradient norms: 0, at most 0.0001",
    ]


def test_kinds_are_judged_beside_the_first_curve_of_their_own() -> None:
    rows = [
        curve("kind=windows dp=1", [6.0], [1.0]),
        curve("kind=windows dp=1 precision=bf16", [6.03], [1.06]),
        curve("kind=experts dp=1", [3.0], [2.0]),
        curve("kind=experts dp=1 precision=bf16", [3.0], [2.12]),
        {"case": "kind=experts dp=1 backend=te fp8=delayed", "status": "not measured: te is not installed"},
    ]
    assert bars_of("Every kind of layer beside full precision", kinds=outcome(*rows)) == [
        "met           kind=windows dp=1 precision=bf16 beside kind=windows dp=1, losses: 0.005, at most 0.01",
        "MISSED        kind=windows dp=1 precision=bf16 beside kind=windows dp=1, gradient norms: 0.06, at most 0.05",
        "met           kind=experts dp=1 precision=bf16 beside kind=experts dp=1, losses: 0, at most 0.01",
        "met           kind=experts dp=1 precision=bf16 beside kind=experts dp=1, gradient norms: 0.06, at most 0.15",
        "not measured  kind=experts dp=1 backend=te fp8=delayed beside kind=experts dp=1, losses",
        "not measured  kind=experts dp=1 backend=te fp8=delayed beside kind=experts dp=1, gradient norms",
    ]


def test_a_curve_that_cannot_run_here_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, because core's groups and torch's settings stay in a process."""
    code = (
        "import os; from tools.gpu_hour import curves, measured\n"
        "os.environ |= dict(RANK='0', WORLD_SIZE='1', LOCAL_RANK='0', MASTER_ADDR='127.0.0.1', MASTER_PORT='0')\n"
        "names = ['dp=1', 'dp=1 precision=bf16 backend=te', 'kind=adapters dp=1 precision=bf16']\n"
        "curves.GROUPS['kinds'] = {1: names}\n"
        "for row in measured.curve_rows('kinds', 'cpu', curves.TINY_SIZES):\n"
        "    print(row['status'], all(abs(x) < 100 for x in row.get('losses', []) + row.get('norms', [])))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=runner.ROOT, capture_output=True, text=True)
    first, te, adapters = done.stdout.splitlines()
    assert first == adapters == "done True", done.stdout + done.stderr
    assert te.startswith("not measured: attention.backend = ") and "needs CUDA" in te


@pytest.mark.parametrize(
    "name, tflops", [("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA B200", 2250.0), ("NVIDIA GeForce RTX 5090", None)]
)
def test_mfu_is_of_the_peak_of_this_gpu(monkeypatch: pytest.MonkeyPatch, name: str, tflops: float | None) -> None:
    from tools.gpu_hour import measured

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert measured.peak_of("cuda") == tflops and measured.peak_of("cpu") is None


@pytest.mark.parametrize("last, verdict", [(2.0, "met"), (2.0000000000000004, "MISSED")])
def test_deterministic_runs_are_equal_to_the_last_bit(last: float, verdict: str) -> None:
    rows = [curve("dp=1", [6.0], [2.0]), curve("dp=1", [6.0], [last])]
    (line,) = bars_of("Deterministic runs", deterministic=outcome(*rows))
    assert line == f"{verdict:<14}dp=1 twice, bitwise equal: {int(verdict == 'met')}, exactly 1"


def test_memory_is_judged_from_both_sides() -> None:
    rows = [{"case": name, "peak_bytes": 100 * peak, "by_equations": 10_000} for name, peak in (("a", 103), ("b", 93))]
    rows[1]["reserved_bytes"] = 9858
    skipped = {"case": "c", "status": "skipped: 80 GiB", "by_equations": 1, "peak_bytes": 9}
    assert bars_of("Memory", memory=outcome(rows[0], skipped), speed_cp8=outcome(rows[1])) == [
        "MISSED        a, allocated over estimated memory: 1.03, at most 1.02",
        "met           a, allocated over estimated memory: 1.03, at least 0.94",
        "met           b, allocated over estimated memory: 0.93, at most 1.02",
        "MISSED        b, allocated over estimated memory: 0.93, at least 0.94",
        "MISSED        b, reserved over allocated memory: 1.06, at most 1.05",
    ]


def test_a_kernel_that_is_not_installed_has_a_bar_without_value() -> None:
    rows = [
        {"case": "512:one", "way": "ffpa-attn", "error": 0.02},
        {"case": "64:one", "way": "FlashAttention-4", "status": "not measured: flash-attn-4 is not installed"},
        {"case": "64:one", "way": "ffpa-attn", "status": "not measured: it is for heads of 512"},
    ]
    assert bars_of("Kernels of attention beside float64", kernels=outcome(*rows)) == [
        "MISSED        512:one by ffpa-attn, error: 0.02, at most 0.01",
        "not measured  64:one by FlashAttention-4, error: not measured: flash-attn-4 is not installed",
    ]


JUNIT = '<testsuites><testsuite tests="{}" skipped="{}" failures="1" errors="2"/></testsuites>'


@pytest.mark.parametrize("total, skipped, value", [(9, 4, 3), (4, 4, None)])
def test_tests_are_judged_by_their_failures_and_skips_are_no_success(
    total: int, skipped: int, value: int | None
) -> None:
    (bar,) = bars.tests({"tests": Outcome(tests=JUNIT.format(total, skipped))})
    assert bar == Bar(name=f"tests of GPUs that failed, of {total - skipped}", value=value, bound=0, relation="exactly")


def test_probes_are_judged_by_their_exit_code() -> None:
    lines = bars_of("Documents do not leak, layouts agree", probe_data=outcome(), probe_leak=outcome(exit_code=1))
    assert lines == [
        "met           probe-data, exit code: 0, exactly 0",
        "MISSED        probe-leak, exit code: 1, exactly 0",
        "not measured  probe-parity, exit code",
    ]


TABLE = "| case | ms |\n|------|---:|\n| a, x | 1.0 |\n"


def written(out: Path, results: dict[str, Result], running: str = "") -> tuple[dict[str, Any], str]:
    """The JSON and the Markdown of the steps memory and layouts."""
    steps = [step for step in STEPS if step.name in ("layouts", "memory")]
    report.Report(steps=steps, setting=setting(out), machine=FACTS, results=results).write(running)
    return json.loads((out / "report.json").read_text()), (out / "report.md").read_text()


def test_the_report_has_every_bar_and_every_step(tmp_path: Path) -> None:
    for name in ("layouts", "memory"):
        (tmp_path / name).mkdir()
    row = {"case": "1.7b:64k:one", "peak_bytes": 103, "by_equations": 100}
    (tmp_path / "memory/rows.jsonl").write_text(f'{{"header": {{}}}}\n{json.dumps(row)}\n{{"case": "1.7b:6')  # cut
    (tmp_path / "memory/output.txt").write_text(f"$ command\n{TABLE}\n{TABLE}")
    (tmp_path / "layouts/output.txt").write_text("$ command\n[rank0]: NcclError: no network | lost\n")
    results = {"layouts": Result(status="failed", reason="exit code 1: NcclError: no | lost", exit_code=1, seconds=9.6)}
    facts, text = written(tmp_path, results, running="memory")
    verdicts = {bar["name"]: bar["verdict"] for bar in facts["bars"]}
    assert verdicts["1.7b:64k:one, allocated over estimated memory"] == "met"  # the second of the two
    assert facts["machine"]["device"] == "NVIDIA H100" and facts["steps"][1]["rows"][1] == row
    lines = text.splitlines()
    assert "2026-11-23 04:00Z, commit 5695716 (code 0123456789abcdef), 1 x NVIDIA H100" in lines
    assert "- Steps: 1 failed, 1 to come." in lines
    assert "| MISSED | 1.7b:64k:one, allocated over estimated memory | 1.03 | at most 1.02 |" in lines
    question = "do layouts, recompute and bf16 give one curve"
    assert f"| layouts | {question} | failed: exit code 1: NcclError: no / lost | 10 | 150 |" in lines
    assert "| memory | is the allocator's peak that of the estimate | running |  | 150 |" in lines
    assert (
        text.endswith(f"## memory\n\n{TABLE}\n{TABLE}")
        and "```text\n[rank0]: NcclError: no network | lost\n```" in text
    )
    assert report.TINY not in text


def test_a_group_that_cannot_be_judged_does_not_stop_the_report() -> None:
    broken = [curve("dp=8", [6.0], [1.0]), {"case": "cp=8"}]
    assert bars_of("One curve on every layout", layouts=outcome(*broken)) == [
        "not measured  cannot be judged: KeyError: 'losses'"
    ]


def test_times_of_toy_sizes_are_not_judged() -> None:
    titles = {tiny: [title for title, _ in bars.judged({}, tiny=tiny)] for tiny in (False, True)}
    assert set(titles[False]) - set(titles[True]) == {"Training steps", "Checkpoints"} and len(titles[True]) == 9


# --- the command ---------------------------------------------------------------------------------------------------


def test_the_command_needs_the_gpus_that_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = f"(OUT / 'rows.jsonl').write_text({json.dumps(json.dumps(FACTS))})"
    monkeypatch.setattr(gpu_hour, "MACHINE", step("machine", row))
    monkeypatch.setattr(gpu_hour, "STEPS", [step("works", ROW), step("large", ROW, gpus=8)])
    assert gpu_hour.main(["--gpus", "8", "--out", str(tmp_path)]) == 2
    assert "--gpus 8, but torch sees 1 here" in capsys.readouterr().err
    assert gpu_hour.main(["--out", str(tmp_path)]) == 0
    assert "== works: what of works (at most 60 s)" in capsys.readouterr().out
    assert gpu_hour.main(["--out", str(tmp_path)]) == 0
    assert "== works: taken from the record (done)" in capsys.readouterr().out
    monkeypatch.setattr(gpu_hour, "STEPS", [step("works", "sys.exit(1)")])
    assert gpu_hour.main(["--redo", "works", "--out", str(tmp_path)]) == 1
    (tmp_path / "mine.txt").touch()
    assert gpu_hour.main(["--fresh", "--report", "--out", str(tmp_path)]) == 1  # not a step has ended
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "lock", "machine", "mine.txt", "record.json", "report.json", "report.md",
    ]  # fmt: skip
    monkeypatch.setattr(gpu_hour, "STEPS", [step("works", ROW), step("fails", "sys.exit(1)")])
    assert gpu_hour.main(["--only", "works", "--out", str(tmp_path)]) == 0
    assert gpu_hour.main(["--out", str(tmp_path)]) == 1 == gpu_hour.main(["--out", str(tmp_path)])
    assert "== fails: taken from the record (failed)" in capsys.readouterr().out
    for option in ("--redo", "--only"):
        with pytest.raises(SystemExit, match="2"):
            gpu_hour.main([option, "nothing", "--out", str(tmp_path)])


def test_ranks_measure_in_the_environment_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout with tp or cp has one queue for kernels on Hopper; it is set before an import that may start CUDA."""
    code = (
        "import argparse, os, sys; from tools.gpu_hour import ranks; from sft.run import environment\n"
        "environment._compute_capability = lambda: 9\n"
        "ranks.prepare(argparse.Namespace(subject=sys.argv[1], case=sys.argv[2], device='cuda', set=sys.argv[3:]))\n"
        "assert not {'megatron', 'transformer_engine'} & {*sys.modules}\n"
        "print(os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS'), os.environ['PYTORCH_CUDA_ALLOC_CONF'])"
    )
    for name in environment.NAMES:
        monkeypatch.delenv(name, raising=False)
    for words, connections in (
        (["curves", "layouts"], "1"),
        (["speed", "1.7b:32k:chat:selective", "train.global_batch_size=16"], "None"),
        (["speed", "8b:64k:one:selective", "parallel.tp=2", "parallel.cp=4"], "1"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            env={**os.environ, "WORLD_SIZE": "8"}, cwd=runner.ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert done.stdout == f"{connections} expandable_segments:True\n", done.stderr


def test_two_starts_do_not_share_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import fcntl

    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert gpu_hour.main(["--out", str(tmp_path)]) == 2
    assert "another start is running in this folder" in capsys.readouterr().err
