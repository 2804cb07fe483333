"""What a step is, what a run of steps is of, and how a step ended."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROWS, OUTPUT = "rows.jsonl", "output.txt"  # in the folder of a step
TINY_PROCESSES = 2  # of a tiny run at most

Command = Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all steps share.  gpus: 1 or 8, as on the command line; packages: name -> installed version."""

    out: Path
    gpus: int
    tiny: bool
    device: Literal["cuda", "cpu"]
    packages: Mapping[str, str]

    @property
    def num_processes(self) -> int:
        """Of a step that uses all GPUs."""
        return min(self.gpus, TINY_PROCESSES) if self.tiny else self.gpus

    def folder(self, step: str) -> Path:
        return self.out / step

    def rows(self, step: str) -> str:
        return str(self.folder(step) / ROWS)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Commands with a common time limit, run one after another, each as a process of its own.

    question  what the step answers, for the report
    commands  of a setting
    limit_s   seconds after which nothing of the step is left
    gpus      how many the machine must be run with
    packages  that must be installed
    cuda      whether the step says nothing on a CPU
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
    """How a step ended.  stopped: by its limit; reason: why it is not done; exit_code: None if no process ended."""

    status: Literal["done", "failed", "stopped", "skipped"]
    reason: str = ""
    exit_code: int | None = None
    seconds: float = 0.0


def module(*words: str) -> list[str]:
    """`python -m` these words, by this Python."""
    return [sys.executable, "-m", *words]


def torchrun(setting: Setting, *words: str) -> list[str]:
    """A module with these arguments, as one process for each GPU."""
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(setting.num_processes), "-m")
    return module(*launcher, *words)
