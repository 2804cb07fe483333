"""N, T: numbers that are none, and runs that go on elsewhere: the curve is the same."""

import json
from collections.abc import Callable

import pytest

from tests.faults.ends import End, assert_left_nothing, assert_same_end, end_of, records
from tests.faults.runs import Case

STEP = "sft.mcore.engine:Engine.train_step"
NAN = {"at": "sft.mcore.engine:lm_loss", "do": "nan-loss"}
INF = {"at": "sft.mcore.engine:finalize_model_grads", "do": "inf-gradient"}


@pytest.mark.row("N1", "N2")
def test_a_step_without_numbers_is_left_out_by_all(case: Callable[..., Case], hit: Callable[..., None]) -> None:
    """Whichever rank it met, and whether the run was then killed: the weights are the same."""
    ends = []
    for name, fault in (
        ("loss0", {**NAN, "step": 3, "rank": 0}),
        ("loss1", {**NAN, "step": 3, "rank": 1}),
        ("gradient0", {**INF, "step": 3, "rank": 0}),
        ("gradient1", {**INF, "step": 3, "rank": 1}),
    ):
        one = case(name)
        kill = {"at": STEP, "step": 4, "rank": 0, "do": "kill-all"}
        start = one.start(fault, *([kill] if name.endswith("1") else []))
        start.wait()
        assert "WARNING: step 3: lm loss " in start.out() and "nothing was updated, the step is skipped" in start.out()
        if name.endswith("1"):
            one.finish()
        hit("N1" if "loss" in name else "N2")
        assert_left_nothing(one)
        ends.append(end_of(one))
        bad = next(record for record in ends[-1].records if record["step"] == 3)
        assert bad["bad"] and bad["skipped"] and all(not r.get("bad") for r in ends[-1].records if r is not bad)
    first, second, third, fourth = ends
    assert first.differences(second) == [] and third.differences(fourth) == []
    assert first.tensors == third.tensors and first.seen == third.seen


@pytest.mark.row("N1")
def test_too_many_such_steps_end_the_run(case: Callable[..., Case], hit: Callable[..., None]) -> None:
    """Three in a row; what is left tells which samples and which rank, and the checkpoint before is good."""
    one = case("run", "checkpoint.save_every=4")
    start = one.start(*({**NAN, "rank": 1, "step": step} for step in (5, 6, 7)))
    assert start.wait() == [2, 2], start.told()
    assert start.out().count("nothing was updated, the step is skipped") == 2
    assert "TrainingError: step 7: lm loss nan" in start.err(), start.told()
    kept = one.run / "bad_steps" / "step_0000007"
    ranks = json.loads((kept / "ranks.json").read_text())
    assert [any(loss == "nan" for loss in rank["summed loss of each microbatch"]) for rank in ranks] == [False, True]
    assert [one["row"] for one in json.loads((kept / "samples.json").read_text())]
    assert one.steps() == [4] and one.status()["status"] == "failed-fatal"
    hit("N1", 3)
    one.finish()
    assert not any(record["bad"] for record in records(one.run) if record["kind"] == "train")


@pytest.mark.quick
@pytest.mark.row("T6")
def test_one_curve_over_four_layouts(case: Callable[..., Case], reference: End, hit: Callable[..., None]) -> None:
    """cp 2, then tp 2, then pp 2, then dp 2, then one process: each is asked to stop, the next goes on."""
    one = case("run", "checkpoint.save_every=100")
    layouts = [
        (2, ["parallel.cp=2"], 3),
        (2, ["parallel.cp=1", "parallel.tp=2"], 5),
        (2, ["parallel.cp=1", "parallel.pp=2"], 8),
        (2, ["parallel.cp=1"], 10),
        (1, ["parallel.cp=1"], None),
    ]
    for world_size, layout, step in layouts:
        faults = [{"at": STEP, "step": step, "rank": 0, "do": "term"}] if step else []
        start = one.start(*faults, more=layout, world_size=world_size)
        assert start.wait() == [75 if step else 0] * world_size, start.told()
        hit("T6", int(step is not None))
    assert_left_nothing(one)
    end = end_of(one)
    assert end.seen == reference.seen
    for here, there in zip(end.records, reference.records, strict=True):
        assert here["lm loss"] == pytest.approx(there["lm loss"], rel=1e-5)  # fp32, in another order of sums
        assert [here[name] for name in ("step", "documents", "tokens/supervised")] == [
            there[name] for name in ("step", "documents", "tokens/supervised")
        ]


@pytest.mark.row("T8")
def test_stopped_around_the_end_of_an_epoch(
    case: Callable[..., Case], reference: End, hit: Callable[..., None]
) -> None:
    """The first epoch ends with step 7, with half a batch: stopped one before, there, and one after."""
    assert [json.loads(line)["epoch"] for line in reference.seen.splitlines()] == [0] * 7 + [1] * 5
    one = case("run", "checkpoint.save_every=100")
    for step in (6, 7, 8):
        start = one.start({"at": STEP, "step": step, "rank": 1, "do": "term"})
        assert start.wait() == [75, 75], start.told()
        hit("T8")
    one.finish()
    assert_same_end(one, reference)
    samples = [json.loads(line)["samples"] for line in reference.seen.splitlines()]
    assert sorted(sum(samples[:7], [])) == list(range(55))  # each once


@pytest.mark.row("T10")
def test_generators_go_on_where_they_were(case: Callable[..., Case], reference: End, hit: Callable[..., None]) -> None:
    """A number of each is drawn in every step, as dropout would: killed after steps that were not saved, each rank
    draws the same again.  Python's own has no seed at the start of a run, so another run draws others."""
    whole = case("whole")
    whole.finish(faults=[DRAW])
    one = case("run", "checkpoint.save_every=3")
    for step in (5, 8, 11):
        kill = {"at": "sft.mcore.engine:build.update", "step": step, "rank": 0, "do": "kill-all"}
        assert one.start(DRAW, kill).wait() == [-9, -9]
        hit("T10")
    one.finish(faults=[DRAW])
    here, there = _drawn(one), _drawn(whole)
    assert len(here) == 24 and {len(told) for told in there.values()} == {1}
    assert sum(len(told) > 1 for told in here.values()) == 6  # the steps 4, 7 and 10 on both ranks
    for where, told in here.items():
        assert all(again == told[0] for again in told), where
        assert told[0][1:] == there[where][0][1:], where
    assert_same_end(one, reference)


DRAW = {"at": STEP, "do": "draw", "every": True}


def _drawn(one: Case) -> dict[tuple[int, int], list[list[float]]]:
    """By rank and step: what was drawn there, start after start."""
    found: dict[tuple[int, int], list[list[float]]] = {}
    for line in (line for start in one.starts for line in start.fired() if "drawn" in line):
        found.setdefault((line["rank"], line["step"]), []).append(line["drawn"])
    return found
