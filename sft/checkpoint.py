"""Which checkpoints a run has, which is the newest, and what state besides the weights they carry.

    run.dir/checkpoints/
        latest_checkpointed_iteration.txt      the newest, Megatron-LM's name and content
        iter_0000100/                          torch_dist shards (mcore/shards.py)

A checkpoint is written under a temporary name beside its own and renamed when every rank is done, so that a folder
with a final name is always whole.
"""

import os
import re
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sft.config import CheckpointConfig
from sft.console import Console, size
from sft.errors import CheckpointError
from sft.mcore import shards
from sft.mcore.engine import Engine, StepResult
from sft.mcore.groups import agree

POINTER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run stands.  The position in the data is the step: which samples a step sees is arithmetic."""

    step: int = 0  # optimizer steps done
    num_tokens: int = 0  # supervised tokens trained on
    num_real_tokens: int = 0  # tokens of samples trained on
    num_skipped: int = 0  # steps without a supervised token

    def after(self, result: StepResult) -> "RunState":
        return replace(
            self,
            step=self.step + 1,
            num_tokens=self.num_tokens + result.totals.num_tokens,
            num_real_tokens=self.num_real_tokens + result.totals.num_real_tokens,
            num_skipped=self.num_skipped + result.skipped,
        )


class Checkpoints:
    """The checkpoints of one run.  All methods are collective.

    plan: what the order of the data follows from; a run may not continue with another one.
    """

    def __init__(self, config: CheckpointConfig, folder: Path, plan: dict[str, Any], console: Console) -> None:
        self._config, self._folder, self._plan, self._console = config, folder, plan, console
        self._num_bytes: int | None = None  # of the newest one saved by this process

    def resume(self, engine: Engine) -> RunState | None:
        """Load what `checkpoint.resume` asks for into `engine`; None when a new run is to start."""
        found = agree(self._find)
        if found is None:
            return None
        plain = shards.load(engine, found)
        try:
            state, plan = RunState(**plain["sft"]["state"]), plain["sft"]["plan"]
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{found} was not written by this trainer: it has no position in the data to continue from.  "
                f"Start a new run from its weights with model.init_from={found}."
            ) from error
        self._check_plan(plan, found)
        self._console.say(f"resumed step {state.step} from {found}")
        return state

    def save(self, engine: Engine, state: RunState) -> None:
        """Write the checkpoint of `state.step`, in the place of one that an abandoned continuation may have left."""
        final = self._folder / _name(state.step)
        temporary = agree(lambda: _fresh(self._folder / f"{final.name}.tmp"))
        plain = {"iteration": state.step, "sft": {"state": asdict(state), "plan": self._plan}}
        started = time.monotonic()
        with self._console.watch(f"saving {final}", self._num_bytes, "bytes", lambda: _bytes_in(temporary)):
            shards.save(engine, temporary, plain)
            num_bytes = agree(lambda: self._publish(temporary, final, state.step))
        self._num_bytes = num_bytes
        self._console.say(f"saved {final} ({size(num_bytes)} in {time.monotonic() - started:.1f} s)")

    def _find(self) -> Path | None:
        wanted = self._config.resume
        if wanted not in ("auto", "must", "never"):
            return newest(Path(wanted)) or _missing(f"checkpoint.resume = {wanted}: no checkpoint there")
        if wanted == "never":
            if newest(self._folder):
                raise CheckpointError(
                    f"checkpoint.resume = never, but {self._folder} holds checkpoints of an earlier run, which "
                    f"this one would mix with its own.  Choose another run.dir, or resume with checkpoint.resume=auto."
                )
            return None
        found = newest(self._folder)
        return found or (
            _missing(f"checkpoint.resume = must: {self._folder} has no checkpoint") if wanted == "must" else None
        )

    def _check_plan(self, plan: dict[str, Any], found: Path) -> None:
        changed = [
            f"{key} was {plan.get(key)}, is {value}" for key, value in self._plan.items() if plan.get(key) != value
        ]
        if changed:
            raise CheckpointError(
                f"{found} cannot be continued with this recipe: the order of the data would be another one "
                f"({'; '.join(changed)}).  Undo the change, or start a new run from its weights: "
                f"model.init_from={found} with another run.dir."
            )

    def _publish(self, temporary: Path, final: Path, step: int) -> int:
        """Give a whole checkpoint its name and let older ones go; its size in bytes."""
        _sync(temporary)
        num_bytes = _bytes_in(temporary)
        replaced = _fresh(self._folder / f"{final.name}.replaced")
        if final.exists():
            os.rename(final, replaced)
        os.rename(temporary, final)
        pointer = self._folder / f"{POINTER}.tmp"
        pointer.write_text(str(step), encoding="ascii")
        _sync(pointer)
        os.replace(pointer, self._folder / POINTER)
        _sync(self._folder)
        shutil.rmtree(replaced)
        if self._config.keep_last:
            others = [path for path in _complete(self._folder) if path != final]
            for old in others[: 1 - self._config.keep_last]:
                shutil.rmtree(old)
        return num_bytes


def newest(folder: Path) -> Path | None:
    """The newest checkpoint in a folder of checkpoints, or the folder itself if it is one."""
    if (folder / "metadata.json").is_file():
        return folder
    complete = _complete(folder)
    try:
        pointed = folder / _name(int((folder / POINTER).read_text(encoding="ascii")))
    except (OSError, ValueError):
        return complete[-1] if complete else None
    return pointed if pointed in complete else (complete[-1] if complete else None)


def weights_of(folder: str) -> Path:
    """The checkpoint that model.init_from names.  Collective; raises CheckpointError where there is none."""
    found: Path = agree(lambda: newest(Path(folder)) or _missing(f"model.init_from = {folder}: no checkpoint there"))
    return found


def _complete(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(
        p for p in folder.iterdir() if re.fullmatch(r"iter_\d{7,}", p.name) and (p / "metadata.json").is_file()
    )


def _name(step: int) -> str:
    return f"iter_{step:07d}"


def _missing(what: str) -> Path:
    raise CheckpointError(f"{what} (a folder iter_XXXXXXX with metadata.json, or one that holds such folders).")


def _fresh(folder: Path) -> Path:
    """An empty folder; what a killed save left under this name goes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _bytes_in(folder: Path) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(folder))


def _sync(path: Path) -> None:
    """Have the disk hold a file, or a folder and the files in it."""
    for entry in [*(path.iterdir() if path.is_dir() else ()), path]:
        handle = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
