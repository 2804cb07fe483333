"""`sft compare`: which of two runs is better, and by how much against noise."""

import math
from pathlib import Path

import pytest

from sft.cli import main
from sft.metrics.results.experiments import scatter
from tests.unit.commands.test_compare_runs import write

COUNTS = {"documents": 9, "tokens/real": 100, "tokens/supervised": 40}
RECIPE = "# a comment\nrun:\n  dir: runs/a  # default\noptim:\n  lr: 1e-05  # a.yaml, line 3\n  schedule: cosine\n"
# Evaluations of A: 0.02 above and below a line.  Their scatter is sqrt((4 * 0.02)^2 / 6) = 0.0327.
ZIGZAG = [2.02, 1.98, 2.02, 1.98]


def start(world_size: int = 2) -> dict:
    layout = {"world_size": world_size}
    return {"schema": 9, "kind": "start", "step": 0, "time": 0.0, "num-steps": 40, "layout": layout}


def steps(losses: list[float], **more: object) -> list[dict]:
    own = {"kind": "train", "step-time-s": 90.0, **COUNTS, **more}
    return [{**own, "step": i, "lm loss": loss} for i, loss in enumerate(losses, 1)]


def held_out(losses: list[float], **more: object) -> list[dict]:
    own = {"kind": "eval", "set": "eval", "eval-time-s": 0.0, **COUNTS, **more}
    return [{**own, "step": 10 * i, "lm loss": loss} for i, loss in enumerate(losses, 1)]


@pytest.fixture
def compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def run(a: list[dict], b: list[dict], recipe_b: str | None = RECIPE) -> list[str]:
        for name, records, recipe in (("a", a, RECIPE), ("b", b, recipe_b)):
            folder = write(tmp_path / name, start(), *records)
            if recipe is not None:
                (folder / "recipe.yaml").write_text(recipe)
        assert main(["compare", f"{tmp_path}/a", f"{tmp_path}/b"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 120
        return [" ".join(line.split()) for line in lines]

    return run


def test_a_better_run(compared, tmp_path: Path) -> None:
    a = [*steps([2.0] * 40), *held_out(ZIGZAG)]
    b = [*steps([1.5, 1.7] * 20, **{"step-time-s": 45.0}), *held_out([1.7, 1.66, 1.7, 1.66, 1.8])]
    changed = RECIPE.replace("1e-05", "2e-05").replace("runs/a", "runs/b") + "train:\n  num_epochs: 2\n"
    noise = math.hypot(0.08 / math.sqrt(6), math.sqrt((0.08**2 + 0.18**2) / 2 / 6))  # B: bends of 0.08 and 0.18
    assert compared(a, b, changed) == [
        f"A {tmp_path}/a",
        f"B {tmp_path}/b",
        "",
        "recipe A B",
        "optim.lr 1e-05 2e-05",
        "train.num_epochs absent 2",
        "",
        "A B B against A",
        "steps 40 of 40 40 of 40",
        "tokens 4,000 4,000 x 1.00",
        "supervised tokens 1,600 1,600 x 1.00",
        "hours 1:00:00 0:30:00 x 0.50",
        "hours x ranks 2:00:00 1:00:00 x 0.50",
        "held out, final loss 1.9800 (step 40) 1.8000 (step 50) -0.1800",
        "held out, best loss 1.9800 (step 20) 1.6600 (step 20) -0.3200",
        "train loss, steps 33-40 2.0000 1.6000 -0.4000",
        "",
        f"held out: B is better by 0.3200 nats per token, {0.32 / noise:.1f} times the noise of {noise:.4f} "
        "between evaluations",
        # The last 8 differences are -0.5 and -0.3 by turns: a standard deviation of 0.1069 over sqrt(8).
        "training: B - A is -0.4000 with a standard error of 0.0378, paired by step",
    ]


def test_a_difference_within_the_noise(compared) -> None:
    lines = compared(held_out(ZIGZAG), held_out([value - 0.01 for value in ZIGZAG]))
    assert "the recipes are equal, but for folders" in lines
    assert lines[-1] == (
        "held out: no clear difference: B is lower by 0.0100 nats per token, 0.2 times the noise of 0.0462"
    )


@pytest.mark.parametrize(
    "b, last",
    [
        (held_out([1.9, 1.8, 1.7]), "B is lower by 0.2800 nats per token; with fewer than 4 evaluations of a run, the"),
        (held_out(ZIGZAG), "the best losses of A and B are equal"),
        (
            held_out(ZIGZAG, **{"tokens/supervised": 41}),
            "the runs score other data or tokens (tokens/supervised 40 and",
        ),
        (steps([1.0]), "only A has this set"),
        (held_out([9.0] * 4, nll=1.0), "B is better by 0.9800"),  # the objective is not -log p
    ],
)
def test_verdicts(compared, b: list[dict], last: str) -> None:
    assert compared(held_out(ZIGZAG), b)[-1].startswith(f"held out: {last}")


def test_without_held_out_sets_or_recipe(compared) -> None:
    lines = compared(steps([2.0] * 9), steps([1.0] * 9, documents=8), None)
    assert "recipes not compared: B has no recipe.yaml beside its metrics" in lines
    assert lines[-2:] == [
        "training: the steps of A and B hold different data, so their losses cannot be paired",
        "no run has a held-out set (data.eval), so nothing shows which one is better on other data",
    ]


def test_the_scatter_of_evaluations() -> None:
    assert scatter([3.0, 2.0, 1.0]) is None
    assert scatter([9.0, 4.0, 3.0, 2.0, 1.0, 0.0]) == pytest.approx(0.0, abs=1e-12)  # the last half lies on a line
    assert scatter(ZIGZAG) == pytest.approx(0.08 / math.sqrt(6))


def test_options_of_exact(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "a", "b", "--atol", "1"]) == 2
    assert "--atol has an effect only with --exact" in capsys.readouterr().err
