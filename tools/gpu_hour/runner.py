"""Runs steps one after another, each with its time limit, and records how each ended.

    OUT/record.json       the identity of machine and code, and the result of every finished step
    OUT/STEP/output.txt   what the step printed
    OUT/STEP/rows.jsonl   what the step measured, one line of JSON each, written while the step runs

A step is repeated if the runner ended while the step ran.  Every process of a step has MARK in its environment, so the
next start finds and ends processes that outlived a killed runner.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sft.files.atomic_files import replace_text
from tools.gpu_hour.step import OUTPUT, Command, Result, Setting, Step

ROOT = Path(__file__).resolve().parents[2]
MARK = "SFT_GPU_HOUR"
GRACE_S = 10  # seconds at the end of a limit: from the first signal to the end of the last process
RECORD = "record.json"
VARIES = ("date", "command", "load", "topology", "commit")  # facts that may differ between two starts of one run
_ERROR = re.compile(r"\b\w*(Error|Exception|Refused|FAIL|FAILED)\b[^:]*: \S")


class Unusable(Exception):
    """Nothing can be run: the machine lacks what was asked for, or the folder holds results of another machine."""


def identity(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that must be equal if the results of two starts are to be in one report."""
    return {name: value for name, value in facts.items() if name not in VARIES}


@dataclass
class Record:
    """The results in a folder.  identity: the facts of the machine and the code that gave these results"""

    path: Path
    identity: Mapping[str, Any]
    results: dict[str, Result] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, identity: Mapping[str, Any]) -> "Record":
        """The record of the folder, or a new one.  Raises Unusable, with the differences, if the identities differ."""
        path = folder / RECORD
        if not path.exists():
            return cls(path, identity)
        stored = json.loads(path.read_text(encoding="utf-8"))
        before, now = stored["identity"], json.loads(json.dumps(identity))
        if names := sorted(name for name in {*before, *now} if before.get(name) != now.get(name)):
            changes = "; ".join(f"{name}: {before.get(name)}, now {now.get(name)}" for name in names)
            raise Unusable(
                f"{folder} holds results of another machine, setting or state of the code ({changes}).  Results of "
                "both must not stand in one report.  --fresh removes the old results; --out DIR keeps them."
            )
        return cls(path, identity, {name: Result(**result) for name, result in stored["results"].items()})

    def keep(self, name: str, result: Result) -> None:
        self.results[name] = result
        self.write()

    def write(self) -> None:
        results = {name: asdict(result) for name, result in self.results.items()}
        text = json.dumps({"identity": self.identity, "results": results}, indent=1)
        replace_text(self.path, text + "\n", sync=True)


def run(steps: Sequence[Step], setting: Setting, record: Record, report: Callable[[str], object]) -> None:
    """Runs all steps that the record does not have.

    report  called with the name of a step before the step, and with an empty name after it
    """
    for step in steps:
        if step.name in record.results:
            print(f"== {step.name}: taken from the record ({record.results[step.name].status})", flush=True)
            continue
        print(f"== {step.name}: {step.question} (at most {step.limit_s} s)", flush=True)
        report(step.name)
        result = execute(step, setting)
        record.keep(step.name, result)
        report("")
        print(f"   {result.status}, {result.seconds:.0f} s{result.reason and ': '}{result.reason}", flush=True)


def execute(step: Step, setting: Setting) -> Result:
    """Runs the commands of a step until one fails.  However the step ends, none of its processes is left."""
    if reason := step.why_skipped(setting):
        return Result(status="skipped", reason=reason)
    folder = setting.folder(step.name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start = time.monotonic()
    for command in step.commands(setting):
        code = _run_command(command, setting.out, folder / OUTPUT, start + step.limit_s - GRACE_S)
        seconds = round(time.monotonic() - start, 1)
        if code is None:
            return Result(status="stopped", reason=f"its limit of {step.limit_s} s", seconds=seconds)
        if code:
            reason = failure((folder / OUTPUT).read_text(encoding="utf-8", errors="replace"))
            return Result(status="failed", reason=f"exit code {code}: {reason}", exit_code=code, seconds=seconds)
    return Result(status="done", exit_code=0, seconds=round(time.monotonic() - start, 1))


def _run_command(command: Command, out: Path, output: Path, ends_at: float) -> int | None:
    """Runs a command and returns its exit code; None if it was stopped at `ends_at`, a time of time.monotonic."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", MARK: str(out)}
    with output.open("a", encoding="utf-8") as file:
        file.write(f"$ {shlex.join(command)}\n")
        file.flush()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(timeout=max(0.0, ends_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_processes(out, started=process.pid if process.returncode is None else None)
            with suppress(ChildProcessError):  # Popen.wait would hang if a signal interrupted it while it held its lock
                os.waitpid(process.pid, 0)


def end_processes(out: Path, started: int | None = None) -> int:
    """Ends every process of a step of this folder, also those that left their session; returns their number.

    started  the id of a process that may not have its environment yet, because Popen may return before Linux sets it
    """
    processes = [process for process in psutil.process_iter() if process.pid == started or _is_of(process, out)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        psutil.wait_procs(processes, timeout=GRACE_S / 2)
    return len(processes)


def _is_of(process: psutil.Process, out: Path) -> bool:
    with suppress(psutil.Error, OSError):
        return process.environ().get(MARK) == str(out) and process.status() != psutil.STATUS_ZOMBIE
    return False


def failure(output: str) -> str:
    """The line of the output that gives the reason: the last line that names an error, else the last line with text."""
    lines = [re.sub(r"^(\[rank\d+\]: *|E  +)", "", line).strip() for line in before_torchrun(output)]
    lines = [line for line in lines if re.search(r"\w", line) and not line.startswith("$ ")]
    named = [line for line in lines if _ERROR.search(line)]
    return ([*lines[-1:], *named[-1:]] or ["no output"])[-1][:300]


def before_torchrun(output: str) -> list[str]:
    """The lines before torchrun's report of a failed rank.  This report names no reason."""
    lines = output.splitlines()
    ends = (number for number, line in enumerate(lines) if "torch/distributed/elastic/multiprocessing/api.py" in line)
    return lines[: next(ends, len(lines))]
