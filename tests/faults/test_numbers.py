"""Rows N and T of the fault matrix: after non-finite steps, and on other layouts, the curve stays the same."""

import json

import pytest

from tests.faults.runs import STEP, Hit, MakeCase

NAN = {"at": "sft.mcore.engine:lm_loss", "do": "nan-loss"}
INF = {"at": "sft.mcore.engine:finalize_model_grads", "do": "inf-gradient"}


@pytest.mark.row("N1", "N2")
def test_a_step_without_numbers_is_left_out_by_all(case: MakeCase, hit: Hit) -> None:
    """Whichever rank has the non-finite value, and whether or not the run is killed afterwards: the weights are the
    same."""
    ends = []
    for row, fault, rank in (("N1", NAN, 0), ("N1", NAN, 1), ("N2", INF, 0), ("N2", INF, 1)):
        one = case()
        kill = [{"at": STEP, "step": 4, "rank": 0, "do": "kill-all"}] * rank
        start = one.start({**fault, "step": 3, "rank": rank}, *kill).ends(-9 if kill else 0)
        start.says("WARNING: step 3: lm loss ", "the step is skipped and updates no weight")
        if kill:
            one.finish()
        one.assert_left_nothing()
        ends.append(one.end())
        train = [record for record in one.records() if record["kind"] == "train"]
        assert [record["step"] for record in train if record["bad"] and record["skipped"]] == [3]
        assert sum(record["bad"] for record in train) == 1
        hit(row)
    first, second, third, fourth = ends
    assert first.differences(second) == [] and third.differences(fourth) == []
    assert first.tensors == third.tensors and first.seen == third.seen


@pytest.mark.row("N1")
def test_too_many_such_steps_end_the_run(case: MakeCase, hit: Hit) -> None:
    """Three non-finite steps in a row end the run; it leaves a file that names samples and rank, and the checkpoint
    before is good."""
    one = case("checkpoint.save_every=4")
    start = one.start(*({**NAN, "rank": 1, "step": step} for step in (5, 6, 7))).ends(2)
    assert start.out().count("the step is skipped and updates no weight") == 2
    start.says("TrainingError: step 7: lm loss nan")
    kept = one.run / "bad_steps" / "step_0000007"
    ranks = json.loads((kept / "ranks.json").read_text())
    assert [any(loss == "nan" for loss in rank["summed loss of each microbatch"]) for rank in ranks] == [False, True]
    assert [sample["row"] for sample in json.loads((kept / "samples.json").read_text())]
    assert one.steps() == [4] and one.status()["status"] == "failed-fatal"
    hit("N1", 3)
    one.finish()
    assert not any(record["bad"] for record in one.records() if record["kind"] == "train")


@pytest.mark.quick
@pytest.mark.row("T6")
def test_one_curve_over_four_layouts(case: MakeCase, hit: Hit) -> None:
    """Layouts cp 2, then tp 2, then pp 2, then dp 2, then one process: each run is asked to stop, and the next one
    continues."""
    one = case("checkpoint.save_every=100")
    layouts = [
        (3, ["parallel.cp=2"]),
        (5, ["parallel.cp=1", "parallel.tp=2"]),
        (8, ["parallel.cp=1", "parallel.pp=2"]),
        (10, ["parallel.cp=1"]),
    ]
    for step, layout in layouts:
        one.start({"at": STEP, "step": step, "rank": 0, "do": "term"}, more=layout).ends(75)
        hit("T6")
    one.finish(more=["parallel.cp=1"], world_size=1)
    one.assert_left_nothing()
    assert one.end().seen == one.reference.seen
    for here, there in zip(one.records(), one.reference.records, strict=True):
        assert here["lm loss"] == pytest.approx(there["lm loss"], rel=1e-5)  # fp32, with another order of sums
        assert all(here[name] == there[name] for name in ("step", "documents", "tokens/supervised"))


@pytest.mark.row("T8")
def test_stopped_around_the_end_of_an_epoch(case: MakeCase, hit: Hit) -> None:
    """The first epoch ends with step 7, a step with half a batch.  The run is stopped one step before, there, and one
    after."""
    one = case("checkpoint.save_every=100")
    for step in (6, 7, 8):
        one.start({"at": STEP, "step": step, "rank": 1, "do": "term"}).ends(75)
        hit("T8")
    one.finish_the_same()
    seen = [json.loads(line) for line in one.end().seen.splitlines()]
    assert [row["epoch"] for row in seen] == [0] * 7 + [1] * 5
    assert sorted(sum((row["samples"] for row in seen[:7]), [])) == list(range(55))  # each sample once
