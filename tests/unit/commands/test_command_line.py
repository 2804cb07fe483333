"""Options, versions and explanations that `sft` prints."""

import pytest

import sft
from sft.cli import main
from sft.commands.probe import overrides_of

pytestmark = pytest.mark.usefixtures("recipe_folder")


@pytest.mark.parametrize(
    "words, advice",
    [
        (["--lr", "1e-4"], "unknown option --lr.  Settings are written without dashes: optim.lr=1e-4."),
        (["--learning-rate=3"], "unknown option --learning-rate=3.  Settings are written without dashes: optim.lr=3."),
        (["--tensor-model-parallel-size"], "unknown option --tensor-model-parallel-size.  Settings are written without "
         "dashes: parallel.tp=VALUE."),  # fmt: skip
        (["--world_size", "4"], "unknown option --world_size.  Did you mean --world-size?"),
        (["--zzz"], "unknown option --zzz."),
    ],
)
def test_an_unknown_option_is_answered_with_the_setting(
    words: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "a.yaml", *words]) == 2
    assert capsys.readouterr().err.split("\n")[0] == f"ConfigError: {advice}"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"sft {sft.__version__}, Python 3.") and "megatron-core 0.1" in printed


def test_every_key_that_explain_names_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--explain", "optim.lr", "--explain", "parallel.dp", "--explain", "num_microbatches"]
    assert main(["check", "a.yaml", "--world-size", "8", "parallel.cp=2", "parallel.tp=2", *words]) == 0
    assert capsys.readouterr().out == """\
optim.lr = 1e-05
    from     a.yaml, line 13
    type     a number above 0.0; required
    meaning  Peak learning rate: often 1e-5 for all weights, and 2e-4 for LoRA.
parallel.dp = 2
    from     derived: world_size / (tp * cp * pp), for 8 processes
    type     not a key
    meaning  Data-parallel size: groups of ranks that train on different packs.
num_microbatches = 2
    from     derived: global_batch_size / dp, for 8 processes
    type     not a key
    meaning  Packs of a step that a data-parallel rank computes in turn.
"""


def test_dynamic_cp_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--explain", "parallel.dynamic_cp", "--explain", "num_microbatches"]
    assert main(["check", "a.yaml", "--world-size", "8", "parallel.cp=2", "parallel.dynamic_cp=true", *words]) == 0
    assert capsys.readouterr().out == """\
parallel.dynamic_cp = true
    from     command line: parallel.dynamic_cp=true
    type     true or false; default false
    meaning  Each pack has its own CP size, a power of two that divides cp, or cp.  Short documents then need no \
CP.
num_microbatches = differs from step to step
    from     derived: the plan, because of parallel.dynamic_cp, for 8 processes
    type     not a key
    meaning  Packs of a step that a data-parallel rank computes in turn.
"""


def test_a_run_that_was_never_started_is_started_and_not_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "a.yaml"]) == 75
    assert capsys.readouterr().out == "runs/a: the run was never started\nstart the run\n"


@pytest.mark.parametrize(
    "against, expected",
    [
        ("parallel.cp=1", ["parallel.cp=1"]),
        ("parallel.cp=1,parallel.tp=2", ["parallel.cp=1", "parallel.tp=2"]),
        ("data.train=[a.jsonl, b.jsonl],parallel.cp=1", ["data.train=[a.jsonl, b.jsonl]", "parallel.cp=1"]),
    ],
)
def test_settings_of_the_second_layout_of_a_probe(against: str, expected: list[str]) -> None:
    assert overrides_of(against) == expected
