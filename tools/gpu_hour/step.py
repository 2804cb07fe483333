"""Defines a step, the setting that all steps share, and the result of a step, and makes commands that run a module."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROWS, OUTPUT = "rows.jsonl", "output.txt"  # files in the folder of a step
TINY_PROCESSES = 2  # largest number of processes in a tiny run

Command = Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The setting that all steps share.

    gpus      1 or 8, as on the command line
    packages  name -> installed version
    """

    out: Path
    gpus: int
    tiny: bool
    device: Literal["cuda", "cpu"]
    packages: Mapping[str, str]

    @property
    def num_processes(self) -> int:
        """The number of processes of a step that uses all GPUs."""
        return min(self.gpus, TINY_PROCESSES) if self.tiny else self.gpus

    def folder(self, step: str) -> Path:
        return self.out / step

    def rows(self, step: str) -> str:
        return str(self.folder(step) / ROWS)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Commands with a common time limit.  They run one after another, each in a new process.

    question  the question that the step answers, for the report
    commands  returns the commands for a setting
    limit_s   seconds after which no process of the step is left
    gpus      the value of --gpus that the step needs at least
    packages  packages that must be installed
    cuda      whether the step needs a GPU
    """

    name: str
    question: str
    commands: Callable[[Setting], Sequence[Command]]
    limit_s: int
    gpus: int = 1
    packages: tuple[str, ...] = ()
    cuda: bool = False

    def why_skipped(self, setting: Setting) -> str | None:
        if self.gpus > setting.gpus:
            return f"needs --gpus {self.gpus}"
        if self.cuda and setting.device != "cuda":
            return "needs a GPU"
        if absent := [name for name in self.packages if name not in setting.packages]:
            return f"{', '.join(absent)} is not installed here (docs/start/install.md)"
        return None


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a step ended.

    status     stopped: its limit was reached
    reason     why the step is not done; empty if it is
    exit_code  None if the step was skipped or stopped
    """

    status: Literal["done", "failed", "stopped", "skipped"]
    reason: str = ""
    exit_code: int | None = None
    seconds: float = 0.0


def module(*words: str) -> list[str]:
    """The command `python -m` with these words, with this Python."""
    return [sys.executable, "-m", *words]


def torchrun(setting: Setting, *words: str, num_processes: int = 0) -> list[str]:
    """The command that runs a module under torchrun.

    words: the module and its arguments; num_processes: 0 means one for each GPU
    """
    count = str(num_processes or setting.num_processes)
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", count, "-m")
    return module(*launcher, *words)
