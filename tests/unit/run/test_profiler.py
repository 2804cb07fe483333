"""Memory snapshots and traces: their files, steps and ranks, and that they change nothing else in a run.

No CUDA here: torch's recorder is replaced by one that records its calls.  The Chrome trace is real.
"""

import gzip
import inspect
import io
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from sft.config import MemoryProfile, ProfileConfig, TorchProfile
from sft.console import Console
from sft.errors import TrainingError
from sft.mcore.process_groups import ProcessGroups
from sft.run.profiler import Profiler, name
from tests.builders import RECIPE, refusal_lines

Fails = tuple[int, BaseException] | None  # step and error


class Recorder:
    """Replaces the recorder of torch.cuda.memory: lists its calls in order, and writes files with its state."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.on = False
        self.broken = False
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", self.dump)

    def record(self, enabled: str | None = "all", *, max_entries: int = sys.maxsize) -> None:
        self.calls.append(max_entries if enabled else "off")
        self.on = enabled is not None

    def dump(self, filename: str) -> None:
        self.calls.append("dump")
        assert self.on
        Path(filename).write_bytes(b"half")
        if self.broken:
            raise RuntimeError("the device\nis gone")
        Path(filename).write_bytes(b"whole")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(socket, "gethostname", lambda: "node/7.cluster")
    return Recorder(monkeypatch)


def place(rank: int = 0, device: str = "cuda", **at: int) -> ProcessGroups:
    ranks = {f"{axis}_rank": at.get(axis, 0) for axis in ("dp", "cp", "tp", "pp")}
    none = cast(Any, None)
    return ProcessGroups(collection=none, device=torch.device(device), rank=rank, control=none, saving=none, **ranks)


def grid() -> Iterator[ProcessGroups]:
    """pp 2, cp 2, tp 2: eight ranks."""
    for rank in range(8):
        yield place(rank, pp=rank // 4, cp=rank // 2 % 2, tp=rank % 2)


def memory(*steps: int, **more: Any) -> ProfileConfig:
    return ProfileConfig(memory=MemoryProfile(steps=list(steps), **more))


def run(config: ProfileConfig, folder: Path, where: ProcessGroups, *, first: int = 1, fails: Fails = None) -> str:
    """Runs the steps `first` to 6, of which one may fail (0: before the first).  Returns the printed text."""
    said = io.StringIO()
    number, error = fails or (None, None)
    with Profiler(config, folder, where, Console(where.rank, said)) as profile:
        if error and number == 0:
            raise error
        for step in range(first, 7):
            with profile.step(step):
                if error and number == step:
                    raise error
    return said.getvalue()


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# Memory history


def test_snapshots_of_the_steps_asked_for(recorder: Recorder, tmp_path: Path) -> None:
    where = place(5, pp=1, dp=2, cp=3, tp=4)
    assert run(memory(2, 4, max_entries=77), tmp_path, where) == ""  # only rank 0 prints
    file = "node_7.cluster-rank5-pp1-dp2-cp3-tp4-ep0.pickle"
    assert files(tmp_path) == [f"memory_snapshots/step_2/{file}", f"memory_snapshots/step_4/{file}"]
    assert (tmp_path / "memory_snapshots/step_2" / file).read_bytes() == b"whole"
    assert recorder.calls == [77, "dump", "dump", "off"]


def test_recording_begins_before_the_first_step_and_ends_with_the_last_wanted(
    recorder: Recorder, tmp_path: Path
) -> None:
    said = io.StringIO()
    with Profiler(memory(2), tmp_path, place(), Console(0, said)) as profile:
        with profile.step(1):
            assert recorder.on
        with profile.step(2):
            assert recorder.on
        assert not recorder.on
        with profile.step(3):
            pass
    assert recorder.calls == [100000, "dump", "off"]
    assert said.getvalue() == f"profile.memory: history until step 2 is written to {tmp_path}/memory_snapshots/\n"


def test_steps_that_are_not_reached(recorder: Recorder, tmp_path: Path) -> None:
    run(memory(2, 50), tmp_path, place(), first=4)
    assert recorder.calls == [100000, "off"]  # the recording lasts to the end of the run
    recorder.calls.clear()
    with Profiler(memory(2, 3), tmp_path, place(), Console(1)) as profile:
        with profile.step(4):  # the run resumed after these steps
            assert not recorder.on
    with pytest.raises(ValueError):
        run(memory(2, 3), tmp_path, place(), first=4, fails=(5, ValueError()))
    assert files(tmp_path) == []


@pytest.mark.parametrize("ranks, recorded", [("all", list(range(8))), ("stage", [0, 4]), ([3, 6], [3, 6])])
def test_who_records(recorder: Recorder, tmp_path: Path, ranks: Any, recorded: list[int]) -> None:
    for where in grid():
        recorder.calls.clear()
        run(memory(1, ranks=ranks), tmp_path, where)
        assert recorder.calls == ([100000, "dump", "off"] if where.rank in recorded else [])
    assert [int(file.split("rank")[1][0]) for file in files(tmp_path)] == recorded


def test_out_of_memory(recorder: Recorder, tmp_path: Path) -> None:
    for where in grid():
        recorder.calls.clear()
        error = torch.OutOfMemoryError("CUDA out of memory.")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            run(memory(2, 5), tmp_path, where, fails=(3, error))
        assert caught.value is error
        assert recorder.calls == [100000, "dump", "dump", "off"] and not recorder.on
    names = sorted(f"{name(where)}.pickle" for where in grid())
    assert len(set(names)) == 8
    assert files(tmp_path) == [f"memory_snapshots/{step}/{n}" for step in ("step_2", "step_3_oom") for n in names]


@pytest.mark.parametrize("number, error", [(2, TrainingError("NaN")), (0, ValueError()), (4, StopIteration())])
def test_another_error(recorder: Recorder, tmp_path: Path, number: int, error: Exception) -> None:
    with pytest.raises((type(error), RuntimeError)) as caught:
        run(memory(4), tmp_path, place(), fails=(number, error))
    assert caught.value is error
    assert recorder.calls == [100000, "dump", "off"]
    assert files(tmp_path) == [f"memory_snapshots/step_{number}_error/node_7.cluster-rank0-pp0-dp0-cp0-tp0-ep0.pickle"]


def test_a_run_that_is_interrupted_leaves_at_once(recorder: Recorder, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(memory(2), tmp_path, place(), fails=(1, KeyboardInterrupt()))
    assert recorder.calls == [100000, "off"]


def test_what_fails_in_here_is_one_line(
    recorder: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.broken = True
    run(memory(2), tmp_path, place(3))
    path = f"{tmp_path}/memory_snapshots/step_2/{name(place(3))}.pickle"
    assert capsys.readouterr().err == f"rank 3: {path} was not written: RuntimeError: the device is gone\n"

    def stop(enabled: str | None = "all", max_entries: int = 0) -> None:
        if enabled is None:
            raise RuntimeError("also gone")

    recorder.on = True
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", stop)
    error = torch.OutOfMemoryError("the first")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run(memory(2), tmp_path, place(3), fails=(1, error))
    assert caught.value is error and error.__cause__ is None
    lines = capsys.readouterr().err.splitlines()
    assert "step_1_oom" in lines[0] and lines[0].endswith("was not written: RuntimeError: the device is gone")
    assert lines[1:] == ["rank 3: recording of memory history did not stop: RuntimeError: also gone"]
    assert files(tmp_path) == []  # there is no partial file either


def test_a_folder_that_cannot_be_made(recorder: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "memory_snapshots").write_text("in the way")
    run(memory(2), tmp_path, place())
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_on_the_cpu_it_is_one_line_and_nothing_else(recorder: Recorder, tmp_path: Path) -> None:
    said = run(memory(2, 3), tmp_path, place(device="cpu"))
    assert said == "profile.memory: nothing is recorded, because a run on the CPU uses no CUDA memory\n"
    assert run(memory(2, 3), tmp_path, place(1, device="cpu")) == ""
    assert recorder.calls == [] and files(tmp_path) == []


def test_torch_takes_what_is_asked_of_it() -> None:
    """These functions of torch are private: without CUDA, only their parameters can be checked."""
    assert {"enabled", "max_entries"} <= set(inspect.signature(torch.cuda.memory._record_memory_history).parameters)
    assert next(iter(inspect.signature(torch.cuda.memory._dump_snapshot).parameters)) == "filename"


# Chrome traces


def test_a_real_trace(tmp_path: Path) -> None:
    config = ProfileConfig(torch=TorchProfile(steps=[2]))
    where, said = place(device="cpu", cp=1), io.StringIO()
    with Profiler(config, tmp_path, where, Console(0, said)) as profile:
        for number, work in ((1, torch.sin), (2, torch.cos), (3, torch.tan)):
            with profile.step(number):
                work(torch.ones(8))
    assert said.getvalue() == f"profile.torch: traces are written to {tmp_path}/traces/\n"
    assert files(tmp_path) == [f"traces/step_2/{name(where)}.json.gz"]
    with gzip.open(tmp_path / files(tmp_path)[0], "rt") as file:
        seen = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::cos" in seen and not {"aten::sin", "aten::tan"} & seen


class Tracer:
    """Replaces torch.profiler.profile."""

    made: list["Tracer"] = []

    def __init__(self, activities: list[Any]) -> None:
        self.activities, self.is_on = activities, False
        Tracer.made.append(self)

    def __enter__(self) -> "Tracer":
        self.is_on = True
        return self

    def __exit__(self, *error: object) -> None:
        self.is_on = False

    def export_chrome_trace(self, path: str) -> None:
        """Fails as torch does on a full disk."""
        assert path.endswith(".json")
        Path(f"{path}.tmp").write_text('{"traceEvents": [')


@pytest.fixture
def tracers(monkeypatch: pytest.MonkeyPatch) -> list[Tracer]:
    monkeypatch.setattr(torch.profiler, "profile", Tracer)
    monkeypatch.setattr(Tracer, "made", [])
    return Tracer.made


def test_kernels_are_traced_where_there_is_cuda(
    recorder: Recorder, tracers: list[Tracer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for where in grid():
        run(ProfileConfig(torch=TorchProfile(steps=[1, 3], ranks="stage")), tmp_path, where)
    cpu, cuda = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA
    assert [tracer.activities for tracer in tracers] == [[cpu, cuda]] * 4  # two ranks, two steps
    assert recorder.calls == []
    lines = capsys.readouterr().err.splitlines()
    why = ".json.gz was not written: OSError: [Errno 28] torch could not write the trace, as on a full disk"
    assert len(lines) == 4 and all(line.endswith(why) for line in lines)
    assert files(tmp_path) == []


def test_a_trace_without_its_end_is_none(
    recorder: Recorder, tracers: list[Tracer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch ignores errors of its last write, and renames the file."""
    for text, names in (('{"traceEvents": [{"na', 0), ('{"traceEvents": []}\n', 1)):
        monkeypatch.setattr(Tracer, "export_chrome_trace", lambda self, path, text=text: Path(path).write_text(text))
        run(ProfileConfig(torch=TorchProfile(steps=[1])), tmp_path, place())
        assert len(files(tmp_path)) == names


def test_the_next_start_removes_what_a_killed_process_left(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files belong to the same rank, also of another host or layout, and are also removed without a profile; no
    other file is removed."""
    step = tmp_path / "traces/step_2"
    written: list[str] = []

    class Killed(Tracer):
        def export_chrome_trace(self, path: str) -> None:
            """Writes a trace as torch does.  A killed process runs no finally clause."""
            for file in (path, f"{path}.tmp", path.removesuffix(".json")):
                Path(file).write_text("half")
            written.extend(files(tmp_path))
            monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler, "profile", Killed)
        with pytest.raises(KeyboardInterrupt):
            run(ProfileConfig(torch=TorchProfile(steps=[2])), tmp_path, place(1, cp=1))
    monkeypatch.undo()
    assert len(written) == 3 and files(tmp_path) == written
    (tmp_path / "memory_snapshots/step_2").mkdir(parents=True)
    (tmp_path / "memory_snapshots/step_2/.a-rank1-pp0.pickle.tmp-1a2b3c4d.pickle").write_text("half")
    kept = [step / "a-rank1-pp0.json.gz", step / ".a-rank11-pp0.json.gz.tmp-1a2b3c4d.gz", tmp_path / "traces/my.tmp-1"]
    for file in kept:
        file.write_text("")
    run(ProfileConfig(), tmp_path, place(2))
    assert len(files(tmp_path)) == 7
    run(ProfileConfig(), tmp_path, place(1, tp=1))
    assert files(tmp_path) == sorted(str(file.relative_to(tmp_path)) for file in kept)


def test_a_step_that_fails_leaves_no_trace_and_no_tracer(
    recorder: Recorder, tracers: list[Tracer], tmp_path: Path
) -> None:
    config = ProfileConfig(memory=MemoryProfile(steps=[5]), torch=TorchProfile(steps=[2]))
    error = torch.OutOfMemoryError()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run(config, tmp_path, place(), fails=(2, error))
    assert caught.value is error
    assert [tracer.is_on for tracer in tracers] == [False]
    assert [file.split("/")[:2] for file in files(tmp_path)] == [["memory_snapshots", "step_2_oom"]]


def test_a_trace_while_memory_is_recorded_is_told(recorder: Recorder, tracers: list[Tracer], tmp_path: Path) -> None:
    config = ProfileConfig(memory=MemoryProfile(steps=[4]), torch=TorchProfile(steps=[2, 3, 5]))
    said = run(config, tmp_path, place())
    assert "profile.torch: recording memory slows down these traced steps: 2, 3\n" in said


# Recipe keys


@pytest.mark.parametrize(
    "override",
    ["memory.steps=[]", "memory.steps=[2.0]", "memory.steps=3", "torch.steps=[2, 0]", "torch.steps=[2, 2]",
     "memory.ranks=[]", "memory.ranks=[-1]", "torch.ranks=some", "torch.ranks=[1, 1]", "memory.max_entries=0"],
)  # fmt: skip
def test_values_that_are_none(override: str) -> None:
    [line] = refusal_lines(RECIPE, "profile.memory.steps=[1]", "profile.torch.steps=[4]", f"profile.{override}")
    assert line.startswith(f"profile.{override.partition('=')[0]} = ") and f"line: profile.{override})" in line


@pytest.mark.parametrize("override", ["memory.ranks=stage", "memory.max_entries=5", "torch.ranks=stage"])
def test_values_without_steps_are_refused(override: str) -> None:
    [line] = refusal_lines(RECIPE, f"profile.{override}")
    assert f"(command line: profile.{override}) has no effect" in line


def test_both_on_one_step_is_refused_and_says_why() -> None:
    [line] = refusal_lines(RECIPE, "profile.memory.steps=[3, 1, 4]", "profile.torch.steps=[4, 2, 3]")
    at = "profile.torch.steps = [4, 2, 3] (command line: profile.torch.steps=[4, 2, 3])"
    assert line.startswith(f"{at} shares step 3, 4 with profile.memory.steps.  Memory recording slows")
