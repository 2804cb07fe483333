"""Runs probes, tests and benchmarks for the first hour on a GPU machine, and reports every bar.

    python -m tools.gpu_hour --gpus 8               at most 86 minutes; one GPU: at most 70
    python -m tools.gpu_hour --tiny                 toy sizes, on a CPU too
    python -m tools.gpu_hour --list                 the steps and their limits

The same command continues where an earlier one ended or was killed: finished steps are taken from the record.  The
report, OUT/report.md and OUT/report.json, is written before and after every step.

Exit status: 0; 1 where a step is not done or a bar is missed; 2 where nothing could be run; 130 after Ctrl-C.
"""

import argparse
import fcntl
import json
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from tools.gpu_hour import report, runner
from tools.gpu_hour.report import Report
from tools.gpu_hour.step import OUTPUT, ROWS, Setting
from tools.gpu_hour.steps import MACHINE, STEPS


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_hour", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gpus", type=int, choices=(1, 8), default=1, help="how many GPUs of this machine (1)")
    add("--tiny", action="store_true", help="toy sizes of about a minute, on a CPU where there is no GPU")
    add("--out", type=Path, metavar="DIR", help="folder of the results (runs/gpu-hour, with --tiny runs/gpu-hour-tiny)")
    add("--fresh", action="store_true", help="remove the results in the folder first")
    add("--only", default="", metavar="A,B", help="run these steps only")
    add("--redo", default="", metavar="A,B", help="repeat these steps, although they have ended")
    add("--report", action="store_true", help="run nothing; write the report of what the folder holds")
    add("--list", action="store_true", help="print the steps and their limits")
    options = parser.parse_args(argv)
    for option in ("only", "redo"):
        names = [name for name in getattr(options, option).split(",") if name]
        setattr(options, option, names)
        if unknown := [name for name in names if name not in [step.name for step in STEPS]]:
            parser.error(f"--{option} {unknown[0]}: not one of {', '.join(step.name for step in STEPS)}")
    options.out = (options.out or Path(f"runs/gpu-hour{'-tiny' if options.tiny else ''}")).resolve()
    return options


def measure_machine(setting: Setting) -> dict[str, Any]:
    """The facts of this machine, measured in a new process.  Raises runner.Unusable."""
    result = runner.execute(MACHINE, setting)
    if result.status != "done":
        output = setting.folder(MACHINE.name) / OUTPUT
        raise runner.Unusable(f"the machine cannot be described: {result.reason} ({output})")
    facts: dict[str, Any] = json.loads((setting.folder(MACHINE.name) / ROWS).read_text(encoding="utf-8"))
    if not setting.tiny and facts["num_gpus"] < setting.gpus:
        raise runner.Unusable(
            f"--gpus {setting.gpus}, but torch sees {facts['num_gpus']} here.  --tiny tries the commands without a GPU."
        )
    return facts


def start(options: argparse.Namespace) -> int:
    """Runs the steps, or only writes the report of the results that exist.  Returns the exit status."""
    unknown = Setting(out=options.out, gpus=options.gpus, tiny=options.tiny, device="cpu", packages={})
    facts = measure_machine(unknown)
    setting = replace(unknown, device="cuda" if facts["num_gpus"] else "cpu", packages=facts["versions"])
    steps = [step for step in STEPS if step.gpus <= options.gpus]
    identity = {**runner.identity(facts), "gpus": options.gpus, "tiny": options.tiny}
    record = runner.Record.of(options.out, identity)
    for name in options.redo:
        record.results.pop(name, None)
    record.write()
    written = Report(steps=steps, setting=setting, machine=facts, results=record.results)
    chosen = [step for step in steps if step.name in options.only or not options.only]
    if not options.report:
        try:
            runner.run(chosen, setting, record, written.write)
        except KeyboardInterrupt:
            written.write()
            raise
    bars = written.write()
    print(f"\n{options.out / report.MARKDOWN}", flush=True)
    is_done = all(step.name in record.results for step in chosen)
    failed = any(result.status in ("failed", "stopped") for result in record.results.values())
    return int(failed or not is_done or any(bar.is_missed for bar in bars))


def clear(out: Path) -> None:
    """Removes the results, and nothing else that the folder may hold."""
    for name in (runner.RECORD, report.JSON, report.MARKDOWN):
        (out / name).unlink(missing_ok=True)
    for step in (MACHINE, *STEPS):
        shutil.rmtree(out / step.name, ignore_errors=True)


def end_by_signals() -> None:
    """Makes stop signals act like Ctrl-C: the running step is ended, and the report is written.

    SIGHUP stays ignored under nohup.
    """

    def stop(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.list:
        for step in STEPS:
            gpus = "8 GPUs" if step.gpus > 1 else ""
            print(f"{step.name:<20}{step.limit_s:>5} s  {gpus:<8}{step.question}")
        return 0
    end_by_signals()
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print(f"{options.out}: another start is running in this folder", file=sys.stderr)
            return 2
        runner.end_processes(options.out)
        if options.fresh:
            clear(options.out)
        try:
            return start(options)
        except runner.Unusable as error:
            print(f"gpu_hour: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main())
