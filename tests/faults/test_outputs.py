"""Rows O of the fault matrix: outputs of a run that cannot be written, and wrong clocks."""

import json
import os
import threading

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.faults.runs import STEP, Hit, MakeCase, mounted


@pytest.mark.row("O1")
def test_tensorboard_tells_no_step_twice(case: MakeCase, hit: Hit) -> None:
    """The run is killed after steps that are in TensorBoard's file but not in a checkpoint."""
    one = case("log.tensorboard=true", "checkpoint.save_every=3")
    for step in (6, 9):
        one.start({"at": STEP, "step": step, "rank": 0, "do": "kill-all"}).ends(-9)
        hit("O1")
    one.finish_the_same()
    events = EventAccumulator(str(one.run / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("lm loss validation")] == [0, 4, 8, 12]
    told = [(record["step"], pytest.approx(record["lm loss"])) for record in one.records() if record["kind"] == "train"]
    assert [(event.step, event.value) for event in events.Scalars("lm loss")] == told


@pytest.mark.row("O2")
@pytest.mark.parametrize("at", ["sft.metrics.writers:JsonLines.write", "sft.run.sample_log:SampleLog._put"])
def test_numbers_that_cannot_be_written_end_the_run(case: MakeCase, at: str) -> None:
    """The run ends with one paragraph, and the checkpoint before is whole: a record of metrics must not have gaps."""
    one = case()
    start = one.start({"at": at, "rank": 0, "call": 6, "do": "full"})
    codes = start.wait()
    assert codes[0] == 1 and codes[1] != 0 and "Traceback" not in start.err(), start.told()
    start.says("cannot be written", "No space left")
    one.assert_whole()
    one.finish_the_same()


@pytest.mark.row("O2")
def test_a_full_disk_under_tensorboard(case: MakeCase) -> None:
    """The points for TensorBoard are lost, with one warning; metrics.jsonl is complete."""
    one = case("log.tensorboard=true")
    with mounted(one.run / "tensorboard", "-t", "tmpfs", "-o", "size=8k", "tmpfs"):
        one.finish().says("TensorBoard gets no more records of this run")
    one.finish_the_same()


@pytest.mark.row("O2")
def test_a_full_disk_under_traces(case: MakeCase) -> None:
    """Each trace is lost with one warning line, and the run goes on."""
    one = case("profile.torch.steps=[1,3]", "profile.torch.ranks=[0]")
    with mounted(one.run / "traces", "-t", "tmpfs", "-o", "size=8k", "tmpfs"):
        start = one.finish()
        assert start.err().count(".json.gz was not written: OSError: [Errno 28] ") == 2, start.told()
    one.finish_the_same()


@pytest.mark.row("O3")
def test_a_clock_that_goes_back(case: MakeCase, hit: Hit) -> None:
    """The clock goes back by an hour each time that a rank reads it; the next start has another time zone."""
    one = case("checkpoint.save_every_minutes=0.01")
    back = {"at": "time:time", "every": True, "do": "an-hour-back"}
    start = one.start(back, {"at": STEP, "step": 8, "rank": 0, "do": "kill-all"}).ends(-9)
    assert any(fault["do"] == "an-hour-back" for fault in start.fired()), start.told()
    one.finish_the_same(env={"TZ": "Pacific/Kiritimati"})
    hit("O3", 2)
    for line in (one.run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert all(record[name] > 0 for name in ("step-time-s", "tokens-per-second") if record["kind"] == "train")


@pytest.mark.row("O5")
def test_stdout_is_closed_while_it_trains(case: MakeCase) -> None:
    """The reader of stdout has ended, as with `sft train ... | head`: the run goes on, or reports that it is not
    done."""
    one = case()
    pipe = one.folder / "faults.0.out.0"
    os.mkfifo(pipe)
    reader = threading.Thread(target=_read_some, args=(pipe,))
    reader.start()
    start = one.start({"at": STEP, "do": "sleep", "s": 0.1, "every": True})
    reader.join(240)
    codes = start.wait()
    assert codes == [0, 0], (codes, one.status(), start.err(0), start.err(1))
    one.assert_same_end()


def _read_some(pipe: os.PathLike) -> None:
    with open(pipe, "rb", buffering=0) as stream:
        text = b""
        while b"\nstep  2/" not in text:
            text += stream.read(4096)
