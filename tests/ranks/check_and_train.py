"""Runs `sft check` and `sft train` on the same mistakes, one after the other in one process, and prints both answers.

python -m tests.ranks.check_and_train FOLDER < CASES > ANSWERS

CASES is JSON: {name: [overrides]}.  ANSWERS is JSON: {name: [[exit code of check, its error], [those of train]]}.
"""

import contextlib
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path

from sft.cli import main
from tools.make_tiny_model import make

RECIPE = """\
run: {dir: new, device: cpu, precision: fp32}
model: {hf: m}
data: {train: d.jsonl, seq_length: 64, cache_dir: cache, num_workers: 1}
train: {num_steps: 4, global_batch_size: 2}
optim: {lr: 1e-2, schedule: constant}
log: {tensorboard: false}
checkpoint: {async_save: false}
"""
# The runs whose checkpoints the cases use, and their overrides.
RUNS = {
    "full": [],
    "lora": ["lora.rank=4"],
    "deep": ["model.hf=deep"],
    "frozen": ["train.freeze=[embed_tokens]"],
    "cosine": ["optim.schedule=cosine", "optim.min_lr=1e-5"],
    "damaged": ["checkpoint.save_every=2", "checkpoint.verify=size"],
    "ruined": [],
    "stateless": [],
}


def answer(command: str, overrides: list[str]) -> tuple[int, str, str]:
    """The exit code, the error and the output of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([command, "r.yaml", *overrides])
        except Exception as error:  # a traceback of the command
            code, _ = 1, print(f"{type(error).__name__}: {error}", file=err)
    found = re.search(r"^\w+(Error|Exception): .*", err.getvalue(), re.DOTALL | re.MULTILINE)
    return code, found[0].strip() if found else "", out.getvalue()


def rows(name: str, lengths: list[int]) -> None:
    texts = (
        {"input_ids": [3 + i % 200 for i in range(n)], "loss_mask": [0] * (n // 2) + [1] * (n - n // 2)}
        for n in lengths
    )
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in texts))


def set_up() -> None:
    make(Path("m"))
    make(Path("again"), seed=1)
    make(Path("deep"), layers=3)
    widen(shutil.copytree("m", "wide"))
    Path("r.yaml").write_text(RECIPE)
    rows("d.jsonl", [40, 17, 50, 33, 9, 60, 50, 21, 30, 12])
    rows("other.jsonl", [60, 60])
    Path("file").touch()
    Path("notes").mkdir()
    for name, overrides in RUNS.items():
        code, error, _ = answer("check", [f"run.dir={name}", *overrides])
        code, error, _ = answer("train", [f"run.dir={name}", *overrides]) if code == 0 else (code, error, "")
        assert code == 0, (name, error)
    cut("damaged/checkpoints/iter_0000004/__0_0.distcp")
    cut("ruined/checkpoints/iter_0000004/__0_0.distcp")
    Path("stateless/run_state.json").write_text("[]")


def widen(model: str) -> None:
    """Changes config.json so that its shapes differ from those of the weights.  A run that continues does not read this
    file."""
    file = Path(model) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 256}))


def cut(path: str) -> None:
    os.truncate(path, Path(path).stat().st_size - 1)


if __name__ == "__main__":
    stdout = sys.stdout
    os.chdir(sys.argv[1])
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.stdout = sys.stderr
    cases = json.load(sys.stdin)
    set_up()
    answers = {name: [answer("check", overrides), answer("train", overrides)] for name, overrides in cases.items()}
    json.dump(answers, stdout)
    stdout.flush()
    os._exit(0)  # as `sft.cli.run` ends
