"""Random histories of two runs: the best checkpoint, the kept checkpoints, exports and seen.jsonl agree with a simple
model.

Starts are stopped and killed during steps, evaluations and saves.  Runs are shortened, extended and moved, go back to
an earlier step, and begin from the other run, with another metric and another held-out set.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sft.errors import CheckpointError
from tests.unit.fixtures.runs import End, Runs, runs

EVERY, KEEP_LAST = 2, 2  # steps between evaluations, and between saves
METRICS = ("lm loss", "token accuracy")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with runs(tmp_path_factory.mktemp("data")) as started:
        yield started


@dataclass(frozen=True)
class Saved:
    """A checkpoint.  best: the criterion, and the step and value of the best evaluation, if there was one."""

    number: int  # number of this save among all saves of the history
    evaluated: int
    best: tuple[Any, int | None, float] | None
    origin: tuple[str, int, int] | None  # path and number of the origin


@dataclass
class ModelRun:
    saved: dict[int, Saved] = field(default_factory=dict)
    seen: list[int] = field(default_factory=list)
    exported: set[int] = field(default_factory=set)
    compared: set[int] = field(default_factory=set)


class Refused(Exception):
    pass


class Model:
    """The expected results of the starts, written without knowledge of the code."""

    def __init__(self, values: Any) -> None:
        self.values, self.saves = values, 0
        self.runs = {"a": ModelRun(), "b": ModelRun()}

    def start(self, root: Path, name: str, steps: int, criterion: Any, resume: Any, end: End) -> bool:
        """Returns whether the run is done."""
        run = self.runs[name]
        origin: Any = None
        source, first = (name, max(run.saved, default=0)) if resume is None else resume
        if resume is not None:
            known = self.runs[source].saved[first]
            origin = (f"{root}/{source}/{first}", source, known.number)
            began = run.saved[max(run.saved)].origin if run.saved else None
            if began is not None and began[2] == known.number:
                source, first, origin = name, max(run.saved), None
            elif began is not None and began[0] == origin[0]:
                raise Refused
        state = self.runs[source].saved.get(first, Saved(0, -1, None, None))
        origin, evaluated = origin or state.origin, state.evaluated
        is_ours = source == name and first > 0
        best = state.best
        if not is_ours or best is None or best[0] != criterion or (best[1] is not None and best[1] not in run.saved):
            evaluated = -1 if is_ours and criterion and (first >= steps or first % EVERY == 0) else evaluated
            best = (criterion, None, 0.0) if criterion else None
        step, has_saved = first, False
        export(run, best, {kept for kept in run.saved if kept <= first})
        if evaluated == step >= steps:
            return True
        run.seen = [line for line in run.seen if line <= step]
        stopped = False
        while True:
            if step > first:
                if end == End("kill", "train", step):
                    return False
                run.seen.append(step)
            stopped |= end == End("stop", "train", step) and step > first
            is_passed = False
            if (step == 0 or step % EVERY == 0 or step >= steps) and evaluated != step and not stopped:
                if end == End("kill", "pass", step):
                    return False
                stopped |= end == End("stop", "pass", step)
                is_passed = not stopped
                evaluated = step if is_passed else evaluated
            is_saved = step > first and (step % EVERY == 0 or step >= steps or stopped)
            if is_passed and best is not None and (is_saved or (step == first and is_ours)):
                run.compared.add(step)
                value = self.values[criterion[0]][step][METRICS.index(criterion[1])]
                is_better = value < best[2] if criterion[1] == "lm loss" else value > best[2]
                best = (criterion, step, value) if best[1] is None or is_better else best
            if is_saved:
                if end == End("kill", "save", step):
                    return False
                stopped |= end == End("stop", "save", step)
                if not has_saved:
                    run.saved = {kept: one for kept, one in run.saved.items() if kept <= first}
                self.saves, has_saved = self.saves + 1, True
                run.saved[step] = Saved(self.saves, evaluated, best, origin)
                export(run, best, {step})
                for old in sorted(run.saved)[:-KEEP_LAST]:
                    if best is None or old != best[1]:
                        del run.saved[old]
            elif is_passed and step == first and is_ours:
                run.saved[step] = Saved(state.number, evaluated, best, state.origin)
                export(run, best, {step})
            if stopped or step >= steps:
                return evaluated == step >= steps
            step += 1


def export(run: ModelRun, best: Any, published: set[int]) -> None:
    """The best checkpoint is exported as soon as it is published, and replaces the previous export."""
    if best is not None and best[1] in published:
        run.exported = {best[1]}


@st.composite
def histories(draw: st.DrawFn) -> tuple[Any, list[dict[str, Any]]]:
    pair = st.tuples(st.sampled_from([1.0, 2.0, 3.0, 4.0]), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
    values = {name: draw(st.lists(pair, min_size=13, max_size=13)) for name in "ef"}
    start = st.fixed_dictionaries(
        {
            "run": st.sampled_from("aaab"),
            "steps": st.integers(2, 12),
            "criterion": st.sampled_from([("e", "lm loss")] * 4 + [("e", "token accuracy"), ("f", "lm loss"), None]),
            "resume": st.sampled_from([None, None, None, "own", "other"]),
            "index": st.integers(0, 9),
            "end": st.one_of(
                st.just(End()),
                st.builds(
                    End,
                    st.sampled_from(["stop", "kill"]),
                    st.sampled_from(["train", "pass", "save"]),
                    st.integers(0, 12),
                ),
            ),
            "moves": st.booleans(),
        }
    )
    return values, draw(st.lists(start, min_size=2, max_size=6))


def check(engines: Runs, root: Path, history: tuple[Any, list[dict[str, Any]]]) -> None:
    values, starts = history
    model, moves = Model(values), 0
    root.mkdir()
    for one in starts:
        if one["moves"]:
            moves += 1
            root = root.rename(root.with_name(f"{root.name.split('-')[0]}-{moves}"))
        name, criterion = one["run"], one["criterion"]
        source = {None: None, "own": name, "other": "ba"["ab".index(name)]}[one["resume"]]
        steps = sorted(model.runs[source].saved) if source else []
        resume = (source, steps[one["index"] % len(steps)]) if steps else None
        overrides = [f"run.dir={root}/{name}", f"train.num_steps={one['steps']}"]
        if criterion is not None:
            overrides += [f"data.eval={engines.data}/{criterion[0]}.jsonl", "checkpoint.export_hf=best"]
            overrides += [f"checkpoint.keep_best=eval/{criterion[1]}"]
        if resume is not None:
            overrides += [f"checkpoint.resume={root}/{resume[0]}/checkpoints/iter_{resume[1]:07d}"]
        try:
            is_done = model.start(root, name, one["steps"], criterion, resume, one["end"])
        except Refused:
            with pytest.raises(CheckpointError, match="that path now holds another checkpoint"):
                engines.start(root, values, one["end"], *overrides)
            continue
        outcome, said = engines.start(root, values, one["end"], *overrides)
        assert (outcome is not None and outcome.is_done) == is_done, said
        compare(model.runs[name], root / name, said)


def compare(run: ModelRun, folder: Path, said: str) -> None:
    kept = {int(path.name[5:]) for path in folder.glob("checkpoints/iter_*") if "." not in path.name}
    assert kept == set(run.saved), said
    lines = [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()] if run.seen else []
    assert [line["step"] for line in lines if "gap" not in line] == run.seen, said
    exported = {int(path.name[5:]) for path in folder.glob("hf_exports/best_*") if path.is_dir()}
    assert exported == run.exported <= run.compared, said


FEW = settings(
    phases=[Phase.generate],
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@FEW
@given(histories())
def test_a_few_histories(engines: Runs, tmp_path_factory: pytest.TempPathFactory, history: Any) -> None:
    check(engines, tmp_path_factory.mktemp("history") / "runs", history)


@pytest.mark.grid
@settings(FEW, max_examples=500)
@given(histories())
def test_five_hundred_histories(engines: Runs, tmp_path_factory: pytest.TempPathFactory, history: Any) -> None:
    check(engines, tmp_path_factory.mktemp("history") / "runs", history)
