"""Steps of one second for tools/gpu_hour, and a start that runs them."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.gpu_hour import runner
from tools.gpu_hour.step import Setting, Step

ROW = "(OUT / 'rows.jsonl').write_text('{\"case\": \"a\"}\\n')"
ESCAPING = (  # a child process in a session of its own that ignores signals
    "import signal; child = 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)'; "
    "print(subprocess.Popen([sys.executable, '-c', child], start_new_session=True).pid, flush=True); "
)


def setting(out: Path, gpus: int = 1, tiny: bool = False, packages: Sequence[str] = ("transformer-engine",)) -> Setting:
    versions = {name: "2.20.2" for name in packages}
    return Setting(out=out, gpus=gpus, tiny=tiny, device="cpu" if tiny else "cuda", packages=versions)


def step(name: str, code: str, limit_s: int = 60, **more: Any) -> Step:
    """A step of one process that runs the Python program `code`, in which OUT is the folder of the step."""
    text = f"from pathlib import Path; import os, subprocess, sys, time; OUT = Path(sys.argv[1]); {code}"
    commands = lambda run: [[sys.executable, "-c", text, str(run.folder(name))]]  # noqa: E731
    return Step(name=name, question=f"what of {name}", commands=commands, limit_s=limit_s, **more)


def started(out: Path, steps: Sequence[Step]) -> tuple[runner.Record, list[str]]:
    """Runs a start in this process.  Returns its record, and the names for which the report was written."""
    out.mkdir(exist_ok=True)
    record, written = runner.Record.of(out, {"device": "H100"}), list[str]()
    record.write()
    runner.run(steps, setting(out), record, written.append)
    return record, written
