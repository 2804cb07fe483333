"""The commands: their output, their exit codes, and modules that they must not import."""

import os
import re
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from sft.cli import main
from sft.errors import PeerError, StorageError, TrainingError
from sft.parallel.layout import Layout
from sft.planner import fit
from sft.planner.task import Task
from sft.recipe.resolved import Recipe
from sft.run import environment
from sft.run.outcome import Outcome

ROOT = Path(__file__).resolve().parents[3]
CHAT = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]}\n'
OUTCOME = Outcome(folder=Path("runs/a"), step=1, num_steps=1, stopped=None, last=None)


@pytest.fixture(autouse=True)
def folder(recipe_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe and its data."""
    (recipe_folder / "a.jsonl").write_text(CHAT * 300)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(environment, "prepare", lambda config, layout: frozenset())
    return recipe_folder


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """The recipes that reach `sft.api.rank.main`, which this fixture replaces."""
    recipes: list[Recipe] = []

    def stand_in(recipe: Recipe, *arguments: object, is_quiet: bool) -> Outcome:
        recipes.append(recipe)
        return OUTCOME

    monkeypatch.setitem(sys.modules, "sft.api.rank", types.SimpleNamespace(main=stand_in))
    return recipes


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, *arguments], {"PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)


# Whether a recipe fits a GPU


def test_check_asks_whether_the_recipe_fits_with_the_lengths_of_the_corpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """First with documents as long as packs, before the data is read; then with those of the data."""
    asked: list[list[float]] = []

    def problem(task: Task, layout: Layout) -> str | None:
        asked.append(task.lengths.tokens.tolist())
        return "short documents need more memory." if len(asked) == 2 else None

    monkeypatch.setattr(fit, "problem", problem)
    assert main(["check", "a.yaml", "--gpu", "h100", "run.device=cuda"]) == 2
    assert asked == [[1024.0], [34.0]]
    assert "short documents need more memory." in capsys.readouterr().err


# The modules that a command imports


@pytest.mark.parametrize(
    "arguments, code, absent",
    [
        (["--help"], 0, {"numpy", "pydantic", "yaml"}),
        (["train", "a.yaml", "parallel.cq=4"], 2, {"numpy"}),
        (["train", "a.yaml", "parallel.cp=3"], 2, {"numpy"}),
        (["train", "a.yaml", "data.train=b.jsonl"], 2, set()),
        (["check", "a.yaml", "--no-data", "--world-size", "64", "train.global_batch_size=64"], 0, set()),
    ],
)
def test_what_needs_no_torch_imports_none(arguments: list[str], code: int, absent: set[str]) -> None:
    """Runs the command in a new process."""
    program = (
        "import sys\nfrom sft.cli import main\n"
        "try: code = main(sys.argv[1:])\nexcept SystemExit as end: code = end.code\n"
        "print('\\n', code, *{name.partition('.')[0] for name in sys.modules})"
    )
    exit_code, *names = run("-c", program, *arguments).stdout.split("\n")[-2].split()
    assert int(exit_code) == code
    assert not set(names) & {"torch", "megatron", "transformers", *absent}


# check


def test_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "a.yaml", "--world-size", "8", "parallel.cp=2", "parallel.tp=2"]) == 0
    printed = capsys.readouterr().out
    assert re.sub(r"(a.jsonl: 300 samples).*", r"\1", printed) == """\
layout  world_size 8 = tp 2 x cp 2 x pp 1 x dp 2
        global_batch_size 4 packs = dp 2 x num_microbatches 2
        tokens per step <= 4 packs x 1,024 = 4,096
        tokens per rank and microbatch <= 1,024 / cp 2 = 512
        between layers, sequence parallel: 512 / tp 2 = 256
        documents padded to a multiple of 32, packs to a multiple of 32
model   parameters 115,392 with a vocabulary of 259
memory  per rank, estimated and not measured: 1.9 MiB, of which
        weights 129 KiB, gradients 257 KiB, optimizer 193 KiB, saved by layers 940 KiB, rotary 32 KiB, \
loss head 352 KiB
        longest context in 75 GiB (an 80-GB card), by the same estimate: 62,744,608 tokens
weights random (seed 1234)
data    a.jsonl: 300 samples
        19 packs of at most 1,024 tokens, 98.7% full, of which 46.9% is padding inside documents
        steps per epoch 5 = 19 packs / global_batch_size 4, rounded up
        num_steps 10 = 2.00 epochs
resume  a new run starts
time    predicted and not measured: a step 0.0017 s, 295,153 tokens/s per GPU, MFU 0%, of which tp 56%, overhead 23%, \
cp 19%, dp 2%
        if packs of 1,024 tokens hold documents of 34: a step 0.0017 s, a microbatch 0.00085 s
        all constants of h100 are assumed; `sft plan --calibrate` measures them
        assumed kernels of attention: full attention by Transformer Engine (413 / 395 to 440 TFLOP/s, published: \
FlashAttention-3, figures 5 and 6; backward at 2K tokens)
questions not in this run: with 256 tokens they would take 969.8% of the run, more than 2%; data.long.in_run=true asks \
all lengths
WARNING data.doc_multiple = 32 makes 46.9% of the tokens padding inside documents; data.doc_multiple=4 would make 5.6%
"""
    assert Path("runs/a/cache").is_dir()


def test_check_names_the_kinds_of_layers(capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe has a model of two layers."""
    command = ["check", "a.yaml", "--no-data"]
    windows = ["model.sliding_window=128", "model.sliding_window_layers=[1]", "model.attention_sinks=true"]
    assert main([*command, *windows, "model.rope.skip_layers=[2]"]) == 0
    line = (
        "        layers 1 with windows of 128 tokens, 1 with full attention without rotary positions; attention sinks\n"
    )
    assert line in capsys.readouterr().out
    caps = ["model.attention_softcap=50", "model.logits_softcap=30"]
    assert main([*command, "model.sliding_window=8", "model.rope.window_base=1e5", *caps]) == 0
    line = (
        "layers 2 with windows of 8 tokens and rope.base 100000; attention scores capped at 50.0; logits capped at 30.0"
    )
    assert f"        {line}\n" in capsys.readouterr().out


def test_check_of_held_out_data_and_of_a_cache_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    Path("b.jsonl").write_text(CHAT)
    assert main(["check", "a.yaml", "data.eval=b.jsonl", "data.cache_dir=c"]) == 0
    assert "\neval    b.jsonl: 1 sample" in capsys.readouterr().out
    assert Path("c").is_dir() and not Path("runs").exists()


def test_check_without_data(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.jsonl").unlink()
    assert main(["check", "a.yaml", "--no-data"]) == 0
    printed = capsys.readouterr().out.split("\n")
    assert printed[0] == "layout  world_size 1 = tp 1 x cp 1 x pp 1 x dp 1"
    assert printed[-13] == "model   parameters 115,392 with a vocabulary of 259"
    assert printed[-12].startswith("memory  per rank, estimated and not measured: ")
    assert printed[-9].startswith("time    predicted and not measured: a step 0.00086 s, "), printed[-9]
    assert printed[-5].startswith("questions not in this run: with 256 tokens they would take "), printed[-5]
    assert printed[-4:] == [
        "weights not read (--no-data)",
        "data    not read (--no-data)",
        "resume  not compared: this machine has no checkpoint of the run (--no-data)",
        "",
    ]
    assert main(["check", "a.yaml", "--no-data", "data.tokenizer=t"]) == 0
    printed_without = capsys.readouterr().out
    assert "parameters unknown: model.vocab_size comes from the tokenizer, which was not read" in printed_without
    assert "memory" not in printed_without


def test_check_lays_out_the_smallest_world_or_the_launched_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["check", "a.yaml", "--no-data", "parallel.cp=4"]) == 0
    assert "world_size 4 = tp 1 x cp 4 x pp 1 x dp 1" in capsys.readouterr().out
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert main(["check", "a.yaml", "--no-data", "parallel.cp=4"]) == 0
    assert "world_size 8 = tp 1 x cp 4 x pp 1 x dp 2" in capsys.readouterr().out


def test_explain_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "a.yaml", "--explain", "attention", "parallel.cp=2"]) == 0
    assert capsys.readouterr().out == """\
attention.backend = "auto"
    from     default
    type     one of auto, te, portable; default "auto"
    meaning  te: Transformer Engine (CUDA).  portable: the kernels below, on any device, also with cp.
attention.kernels = null
    from     default
    type     one of fa4, fa3, fa2, ffpa, torch or a list of such, not empty, or null; default null
    meaning  Kernels of portable that may compute softmax attention; null: all (docs/reference/kernels.md).
attention.delta_rule = "auto"
    from     default
    type     one of auto, torch, fla; default "auto"
    meaning  Kernel of recurrences.  fla: flash-linear-attention (CUDA, bf16).  torch: plain torch, on any device.
"""


# train


def test_train_hands_the_recipe_on(trained: list[Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["train", "a.yaml", "parallel.cp=2", "optim.lr=5e-6"]) == 0
    (recipe,) = trained
    assert (recipe.config.parallel.cp, recipe.config.optim.lr, recipe.path) == (2, 5e-6, "a.yaml")


def broken(error: BaseException) -> types.SimpleNamespace:
    """A trainer that raises `error`."""

    def stop(*arguments: object, **options: object) -> None:
        raise error

    return types.SimpleNamespace(main=stop)


@pytest.mark.parametrize(
    "error, code, said",
    [
        (KeyboardInterrupt(), 130, ""),
        (TrainingError("step 3: loss nan."), 2, "TrainingError: step 3: loss nan.\n"),
        (StorageError("the disk is full."), 1, "StorageError: the disk is full.\n"),  # another start may succeed
        (PeerError("rank 1 waits."), 1, "PeerError: rank 1 waits.\n"),
    ],
)
def test_how_a_run_ends(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sft.api.rank", broken(error))
    assert main(["train", "a.yaml"]) == code
    assert capsys.readouterr().err == said


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sft.api.rank", broken(ValueError("ours")))
    with pytest.raises(ValueError, match="ours"):
        main(["train", "a.yaml"])


# Mistakes

MISTAKES = {
    "no verb": (
        [],
        "ConfigError: the following arguments are required: COMMAND.\nusage: sft [-h] [--version] COMMAND ...\n",
    ),
    "misspelt command": (["chek", "a.yaml"], "ConfigError: unknown command sft chek.  Did you mean sft check?\n"),
    "misspelt command of data": (
        ["data", "prepair", "a.yaml"],
        "command sft data prepair.  Did you mean sft data prepare?",
    ),
    "unknown option": (
        ["train", "a.yaml", "--cp", "4"],
        "ConfigError: unknown option --cp.  Settings are written without dashes: parallel.cp=4.\n"
        "usage: sft train [-h] [--processes N] [--log-dir DIR] [--quiet]\n                 RECIPE [KEY=VALUE ...]\n",
    ),
    "missing recipe": (["train", "b.yaml"], "ConfigError: recipe b.yaml does not exist.  Did you mean a.yaml?\n"),
    "layout": (
        ["train", "a.yaml", "parallel.cp=2"],
        "ConfigError: parallel.cp = 2 does not fit 1 GPU with tp = 1, pp = 1.  "
        "Context-parallel sizes that fit: 1.\n  Set in: parallel.cp (command line: parallel.cp=2).\n"
        "  This is one process, and the recipe needs 2, or a multiple.  On one machine: sft train a.yaml "
        "parallel.cp=2 --processes 2; on several, start torchrun on each (docs/how-to/launch.md).\n",
    ),
    "layout of a command without --processes": (
        ["score", "a.yaml", "parallel.cp=2", "--out", "b"],
        "On one machine: torchrun --nproc-per-node 2 -m sft score a.yaml parallel.cp=2, with the same options; on ",
    ),
    "no processes": (
        ["check", "a.yaml", "--world-size", "0"],
        "ConfigError: 0 processes cannot hold a model.  The world size must be at least 1.\n",
    ),
    "missing files": (
        ["train", "a.yaml", "data.train=[a.jsonl, b.jsonl]", "data.tokenizer=t"],
        "ConfigError: 1 of 2: data.train = b.jsonl (command line: data.train=[a.jsonl, b.jsonl]) does not exist in "
        "FOLDER; give data.train=PATH.\n"
        "  2 of 2: data.tokenizer = t (command line: data.tokenizer=t) does not exist in FOLDER; give "
        "data.tokenizer=PATH.\n",
    ),
    "unknown key to explain": (
        ["check", "a.yaml", "--explain", "optim.learning_rate"],
        "ConfigError: unknown key optim.learning_rate (command line: --explain optim.learning_rate).  "
        "It is called optim.lr here, which takes a number above 0.0.\n",
    ),
}


@pytest.mark.parametrize("arguments, message", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes(
    arguments: list[str], message: str, folder: Path, trained: list[Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    told, message = capsys.readouterr().err, message.replace("FOLDER", str(folder))
    assert told == message if message.endswith("\n") else message in told
    assert trained == []


def test_rank_0_tells_and_the_others_are_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in ("0", "1", "7"):
        monkeypatch.setenv("RANK", rank)
        assert main(["train", "b.yaml"]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err == ("" if rank != "0" else MISTAKES["missing recipe"][1])
    assert main(["check", "b.yaml"]) == 2  # the command is one process, whatever RANK is
    assert capsys.readouterr().err == MISTAKES["missing recipe"][1]


def test_torchrun_is_told_the_reason_for_its_last_lines(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the process that reports the mistake writes the reason: torchrun shows the reason of the process that fails
    first."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
    assert main(["train", "b.yaml"]) == 2
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(folder / "error.json"))
    shown = ChildFailedError("sft", {0: failure}).format_msg().splitlines()
    assert f"{shown[-2]}\n" == f"  traceback : {capsys.readouterr().err}" and set(shown[-1]) == {"="}
    ended = replace(OUTCOME, stopped="SIGTERM")
    stopped = types.SimpleNamespace(main=lambda *arguments, **options: ended)
    monkeypatch.setitem(sys.modules, "sft.api.rank", stopped)
    assert main(["train", "a.yaml"]) == 75
    assert "The same command resumes the run." in (folder / "error.json").read_text()


def test_a_reader_that_has_seen_enough() -> None:
    """The reader closes the pipe, as `| head -1` may do, before anything is written."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "sft", "check", "a.yaml", "--explain", "optim"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=env, timeout=240)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_that_lacks_a_character() -> None:
    arguments = ["check", "a.yaml", "data.train=café.jsonl", "--explain", "data.train"]
    done = run("-m", "sft", *arguments, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith('data.train = ["caf\\xe9.jsonl"]\n')


def test_a_world_size_that_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert main(["train", "a.yaml"]) == 2
    said = 'ConfigError: environment variable WORLD_SIZE = "many" is not a number of processes.  Unset it.\n'
    assert capsys.readouterr().err == said


def test_as_a_module_it_ends_with_the_code_and_without_a_traceback() -> None:
    done = run("-m", "sft", "train", "a.yaml", "parallel.cp=0")
    message = "ConfigError: parallel.cp = 0 (command line: parallel.cp=0); expected a whole number of at least 1.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_under_torchrun_other_ranks_wait_for_the_launcher_to_end_them() -> None:
    """torchrun ends all ranks when the first one exits, so rank 0 must have printed its message before."""
    program = (
        "import sys, time, sft.cli as cli\nsleep = time.sleep\n"
        "cli.time.sleep = lambda seconds: (print('waits', seconds, flush=True), sleep(60))\n"
        "sys.exit(cli.main(['train', 'b.yaml']))"
    )
    environment = {"PYTHONPATH": str(ROOT), "RANK": "1", "TORCHELASTIC_RUN_ID": "x"}
    command = [sys.executable, "-c", program]
    waiting = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert waiting.stdout is not None and waiting.stdout.readline() == "waits 10.0\n"
        waiting.terminate()
        assert waiting.communicate(timeout=240) == ("", "")
        assert waiting.returncode == 2
    finally:
        waiting.kill()
        waiting.wait()
