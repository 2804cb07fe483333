"""Trains the demo with moments in fp32, bf16 and int8, and draws the losses: docs/pictures/moments.png.

    python -m tools.plot_moments RUNS

Nine runs of 200 steps with packs of 1,024 tokens: each type of moments with three seeds.  A run that RUNS holds already
is not repeated.
"""

import json
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np

import sft

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs/pictures/moments.png"
KINDS, SEEDS, STEPS = ("fp32", "bf16", "int8"), (1, 2, 3), 200
COLOURS = {"fp32": "black", "bf16": "tab:blue", "int8": "tab:orange"}
LAST = 20  # steps whose mean loss is compared


def run(folder: Path, kind: str, seed: int) -> None:
    """One run of the demo, on this process, with half the width."""
    name = folder / f"{kind}-{seed}"
    if (name / "run_state.json").exists() and '"done"' in (name / "run_state.json").read_text():
        return
    overrides = {
        "run.dir": str(name),
        "run.seed": seed,
        "model.hidden_size": 64,
        "model.ffn_hidden_size": 192,
        "data.train": [str(folder / "data/train.jsonl")],
        "data.eval": None,
        "data.cache_dir": str(folder / "cache"),
        "data.seq_length": 1024,
        "parallel.cp": 1,
        "train.num_epochs": None,
        "train.num_steps": STEPS,
        "train.eval_every": None,
        "checkpoint.save_every": STEPS,
        "optim.moments": kind,
    }
    recipe = sft.load(ROOT / "recipes/demo.yaml", overrides)
    sft.prepare(recipe)
    sft.train(recipe)


def make_data(folder: Path) -> None:
    """The chats of the demo that have fewer than 1,000 characters."""
    subprocess.run([sys.executable, "-m", "tools.make_demo_corpus", "--out", str(folder / "data")], check=True)
    path = folder / "data/train.jsonl"
    rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(row for row in rows if len(row) < 1000), encoding="utf-8")


def losses(folder: Path, kind: str) -> np.ndarray:
    """The training losses of all seeds: [seeds, steps]."""
    rows_of_seeds = []
    for seed in SEEDS:
        rows = [json.loads(line) for line in (folder / f"{kind}-{seed}/metrics.jsonl").read_text().splitlines()]
        by_step = {row["step"]: row["lm loss"] for row in rows if "lm loss" in row}
        rows_of_seeds.append([by_step[step] for step in range(1, STEPS + 1)])
    return np.array(rows_of_seeds)


def draw(folder: Path) -> None:
    """Both panels: losses, and their means over the last steps; grey: the range of the seeds of fp32."""
    of_kind = {kind: losses(folder, kind) for kind in KINDS}
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    steps = np.arange(1, STEPS + 1)
    for kind, values in of_kind.items():
        for number, row in enumerate(values):
            left.plot(steps, row, color=COLOURS[kind], linewidth=0.7, label=kind if number == 0 else None)
    last = {kind: values[:, -LAST:].mean(axis=1) for kind, values in of_kind.items()}
    right.axhspan(last["fp32"].min(), last["fp32"].max(), color="0.9")
    for position, kind in enumerate(KINDS):
        for seed, value, marker in zip(SEEDS, last[kind], "os^", strict=True):
            label = f"seed {seed}" if position == 0 else None
            right.plot(position, value, marker, color=COLOURS[kind], alpha=0.7, markersize=8, label=label)
    left.set(xlabel="step", ylabel="lm loss", title=f"{len(SEEDS)} seeds each")
    right.set(xticks=range(len(KINDS)), xlim=(-0.3, 2.6), ylabel="lm loss", title=f"mean of the last {LAST} steps")
    right.set_xticklabels([f"optim.moments: {kind}" for kind in KINDS], fontsize=8)
    left.legend()
    right.legend(loc="upper left")
    figure.savefig(PICTURE, dpi=110)
    for kind in KINDS:
        print(kind, *(f"{value:.4f}" for value in last[kind]), f"mean {last[kind].mean():.4f}")


def main(folder: Path) -> None:
    if not (folder / "data").exists():
        make_data(folder)
    for seed in SEEDS:
        for kind in KINDS:
            run(folder, kind, seed)
    draw(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
