"""Draws docs/pictures/distil.png: held-out accuracy of students on labels and on a teacher, for several seeds.

    python -m tools.plot_students RUNS

RUNS holds the runs that docs/how-to/distil.md trains: `labels-SEED` and `teacher-SEED`.  Also prints the rows of the
page's table: the first evaluated steps that reach the accuracies of LEVELS, and the best accuracy.  Needs matplotlib.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from sft.metrics.results.curves import Curves, accuracies, read_run

PICTURE = Path(__file__).resolve().parents[1] / "docs/pictures/distil.png"
COLOURS = {"labels": "tab:blue", "teacher": "tab:red"}
LINES = ("-", "--", ":", "-.")  # of the seeds
LEVELS = (0.5, 0.9)
CHANCE = 1 / 8

Students = dict[tuple[str, int], Curves]  # kind and seed -> accuracies of the held-out sets


def read_students(folder: Path) -> Students:
    """The curves of all runs of the folder, in the order of their seeds."""
    parts = [path.name.split("-") for path in folder.iterdir() if path.name.split("-")[0] in COLOURS]
    names = sorted(((kind, int(seed)) for kind, seed in parts), key=lambda name: name[::-1])
    return {(kind, seed): accuracies(read_run(folder / f"{kind}-{seed}")) for kind, seed in names}


def row(steps: np.ndarray, values: np.ndarray) -> str:
    """The first steps that reach LEVELS, and the best accuracy: "360, 400 (0.98)".  "-": no step reaches it."""
    reached = [steps[values >= level] for level in LEVELS]
    first = [f"{at[0]:.0f}" if len(at) else "-" for at in reached]
    return f"{', '.join(first)} ({values.max():.2f})"


def draw(students: Students, out: Path) -> None:
    """Write the picture: a panel for each held-out set, a line for each run."""
    sets = list(next(iter(students.values())))
    seeds = sorted({seed for _, seed in students})
    figure = Figure(figsize=(11, 3.8), layout=ConstrainedLayoutEngine())
    panels = figure.subplots(1, len(sets), sharey=True)
    for axes, name in zip(panels, sets, strict=True):
        for (kind, seed), curves in students.items():
            style = {"color": COLOURS[kind], "linestyle": LINES[seeds.index(seed) % len(LINES)]}
            axes.plot(*curves[name], label=f"on {kind}, seed {seed}", **style)
        axes.axhline(CHANCE, color="grey", linewidth=0.8, label="chance")
        axes.set(xlabel="step", title=f"held-out set {name}", ylim=(0, 1.03))
    panels[0].set_ylabel("right answers")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(out, dpi=110)


def main(folder: Path) -> None:
    students = read_students(folder)
    draw(students, PICTURE)
    for (kind, seed), curves in students.items():
        print(kind, seed, *(f"{name}: {row(*values)}" for name, values in curves.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
