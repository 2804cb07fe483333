"""Draws docs/pictures/layouts.svg: the loss of one recipe on eight layouts, and how far each is from one process.

    python -m tools.plot_layouts                     trains eleven times (a few minutes on two idle cores), and draws
    python -m tools.plot_layouts --runs build/mine   keeps its runs there; runs that are done are not repeated

Trains a model of 0.4M parameters in fp32 on the short chats of the demo's corpus, with real megatron-core on gloo, as
`sft train` does.  Three more runs on cp 4 have a deliberate fault of tests/mutations/faults, in a copy of sft/: they
show what the difference would be.  Needs matplotlib.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from sft.metrics.results.records import TRAIN, read_metrics

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/pictures/layouts.svg"
LONGEST = 1_600  # characters of a JSON line; longer chats are left out, so that every chat fits into a pack
RECIPE = """\
run: {device: cpu, precision: fp32}
model:
  {num_layers: 2, hidden_size: 128, ffn_hidden_size: 384, num_attention_heads: 4, num_query_groups: 2,
   tie_embeddings: true, init_from: random}
data: {tokenizer: byte, seq_length: 2048}
train: {num_steps: 40, global_batch_size: 2}
optim: {lr: 2e-3, schedule: cosine, warmup_fraction: 0.1, weight_decay: 0.1}
checkpoint: {save_last: false}
"""
# Name -> number of processes, settings of the layout.  The first layout is the reference.
LAYOUTS = {
    "1 process": (1, ()),
    "dp 2": (2, ()),
    "tp 2": (2, ("parallel.tp=2",)),
    "pp 2": (2, ("parallel.pp=2",)),
    "cp 4": (4, ("parallel.cp=4",)),
    # At the bandwidth of a real network, the plan would leave all of these small packs on 4 ranks.
    "cp 4, dynamic": (4, ("parallel.cp=4", "parallel.dynamic_cp=true", "parallel.intra_node_gb_s=1e-6")),
    "tp 2 x cp 2": (4, ("parallel.tp=2", "parallel.cp=2")),
    "pp 2 x cp 2": (4, ("parallel.pp=2", "parallel.cp=2")),
}
FAULTY = "cp 4"  # layout of the runs with a fault
# What the picture says -> file of tests/mutations/faults, and the fault's name in it.
FAULTS = {
    "labels shifted after the cut": (
        "context_parallel.yaml",
        "the labels of a rank's last tokens are its own next tokens, shifted after the cut",
    ),
    "wrong positions in late chunks": (
        "context_parallel.yaml",
        "the positions of a rank's late chunk go on from its early one",
    ),
    "each rank divides by its own tokens": ("engine.yaml", "each context-parallel rank divides by its own count"),
}
PROMISED = 1e-6  # relative difference; the tolerance with which tests/ranks compares the curves of layouts
COLORS = ["#1b1b1b", "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a6d00"]
INK, FAINT, FAULT = "#222222", "#888888", "#b3001b"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "build/layouts", help="folder of the runs")
    folder = parser.parse_args(argv).runs.absolute()
    write_inputs(folder)
    settings = [f"data.train={folder}/chats.jsonl", f"data.cache_dir={folder}/cache", f"run.dir={folder}"]
    prepare = [sys.executable, "-m", "sft", "data", "prepare", str(folder / "recipe.yaml"), *settings]
    subprocess.run(prepare, cwd=ROOT, check=True)
    curves = {name: losses(train(folder, name, name)) for name in LAYOUTS}
    faulty = {name: losses(train(folder, name, FAULTY, with_fault(folder, *FAULTS[name]))) for name in FAULTS}
    draw(curves, faulty, PAGE)
    print(PAGE)


def write_inputs(folder: Path) -> None:
    """Writes the recipe, and the short chats of the demo's corpus."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    if not (folder / "chats.jsonl").exists():
        make = [sys.executable, "-m", "tools.make_demo_corpus", "--out", str(folder / "corpus")]
        subprocess.run(make, cwd=ROOT, check=True)
        rows = (folder / "corpus/train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / "chats.jsonl").write_text("".join(row for row in rows if len(row) <= LONGEST))


def with_fault(folder: Path, file: str, name: str) -> Path:
    """A folder with a copy of sft/ that has this fault of tests/mutations/faults."""
    faults = yaml.safe_load((ROOT / "tests/mutations/faults" / file).read_text(encoding="utf-8"))
    fault = next(fault for fault in faults if fault["fault"] == name)
    copy = folder / "faults" / f"{Path(fault['file']).stem}-{faults.index(fault)}"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT / "sft", copy / "sft", ignore=shutil.ignore_patterns("__pycache__"))
    source = (copy / fault["file"]).read_text(encoding="utf-8")
    assert source.count(fault["line"]) == 1, f"{file} must quote one line of {fault['file']}"
    (copy / fault["file"]).write_text(source.replace(fault["line"], fault["becomes"]), encoding="utf-8")
    return copy


def train(folder: Path, name: str, layout: str, code: Path = ROOT) -> Path:
    """Trains on this layout with the package sft/ of `code`, and returns the run folder.  A run that is already done is
    not repeated."""
    world_size, settings = LAYOUTS[layout]
    run = folder / name.replace(", ", "-").replace(" ", "")
    settings = (
        *settings,
        f"run.dir={run}",
        f"data.train={folder}/chats.jsonl",
        f"data.cache_dir={folder}/cache",
    )
    if not (run / "run_state.json").exists() or json.loads((run / "run_state.json").read_text())["status"] != "done":
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        command = [sys.executable, *launcher, "-m", "sft", "train", str(folder / "recipe.yaml"), *settings]
        print(f"{name}: {' '.join(settings)}", flush=True)
        own = os.environ | {"PYTHONPATH": str(code)}
        subprocess.run(command, cwd=code, env=own, check=True, stdout=subprocess.DEVNULL)
    return run


def losses(run: Path) -> np.ndarray:
    """float64 [steps]: the loss of each step, in nats per supervised token."""
    steps = read_metrics(run).records[TRAIN]
    return np.array([steps[step]["lm loss"] for step in sorted(steps)], dtype=float)


def difference(curve: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """float64 [steps]: the relative difference of a loss from the reference; NaN where they are equal."""
    values = np.abs(curve - reference) / reference
    return np.where(values > 0, values, np.nan)


@matplotlib.rc_context({"svg.hashsalt": "sft", "svg.fonttype": "none", "font.family": "sans-serif"})
def draw(curves: dict[str, np.ndarray], faulty: dict[str, np.ndarray], file: Path) -> None:
    """Draws the losses of the layouts, and the differences of right and faulty runs from the first layout, into an SVG
    file."""
    figure = Figure(figsize=(9.0, 4.2), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.25])
    reference = next(iter(curves.values()))
    steps = np.arange(1, len(reference) + 1)
    for number, (name, values) in enumerate(curves.items()):
        # The widest line is drawn first, so that all eight lines are visible where they coincide.
        width = 1.0 + 1.1 * (len(curves) - 1 - number)
        left.plot(steps, values, color=COLORS[number], linewidth=width, label=name, solid_capstyle="round")
        if number > 0:
            right.plot(steps, difference(values, reference), ".", color=COLORS[number], markersize=5)
    left.set_title("one recipe, eight layouts, one curve", loc="left", color=INK, fontsize=12, fontweight="bold")
    left.set_ylabel("loss, nats per supervised token")
    legend = left.legend(frameon=False, ncols=2, fontsize=9, labelcolor=INK, handlelength=1.6)
    for line in legend.get_lines():
        line.set_linewidth(4)
    for marker, (name, values) in zip("x+^", faulty.items()):
        right.plot(steps, difference(values, reference), marker, color=FAULT, markersize=4, label=name)
    kinds = right.legend(title="deliberate faults, cp 4", frameon=False, fontsize=9, labelcolor=INK, loc="upper right")
    kinds.get_title().set_fontsize(9)
    right.axhline(PROMISED, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    right.text(steps[-1], PROMISED * 1.4, "the tests allow 1e-6", ha="right", va="bottom", color=INK, fontsize=9)
    right.set_yscale("log")
    right.set_ylim(3e-10, 30)
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}".replace("e-0", "e-")))
    right.set_title("difference from one process", loc="left", color=INK, fontsize=12, fontweight="bold")
    right.set_ylabel("relative difference of the loss")
    for axes in (left, right):
        _plain(axes)
    figure.savefig(file, metadata={"Date": None})


def _plain(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)


if __name__ == "__main__":
    main()
