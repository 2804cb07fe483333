"""Saves checkpoints on ranks, without a complete run."""

import io
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from sft.checkpoint import folders
from sft.checkpoint.saver import Saver
from sft.checkpoint.train_state import Conditions, TrainState
from sft.console import Console
from sft.errors import CheckpointError, StorageError
from sft.mcore.checkpoint_io import engine_state, optimizer_shards, safe_reader
from sft.mcore.engine import Engine
from tests.ranks import scenarios
from tests.ranks.hf_models import load

SMALL = ["model.num_layers=2", "model.hidden_size=16", "model.ffn_hidden_size=32", "data.seq_length=128"]
SMALL += ["checkpoint.async_save=false"]
CORPUS = scenarios.SkewedCorpus([100, 37, 64, 5, 111, 90, 2, 128] * 4)
ASYNC = "checkpoint.async_save=true"


class Run:
    """An engine, its saver, and the lines that rank 0 printed."""

    def __init__(
        self,
        engine: Engine,
        folder: str,
        conditions: Conditions | None = None,
        in_use: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self.engine, self.folder, self.said = engine, Path(folder), io.StringIO()
        now = conditions or Conditions(
            plan={"data": "9f2c"}, recipe={}, layout={"tp": engine.layout.tp}, versions={"sft": "0"}
        )
        console = Console(engine.groups.rank, self.said)
        self.published: dict[int, float] = {}  # on rank 0: seconds of each save, by step
        note = self.published.__setitem__
        config, groups = engine.config.checkpoint, engine.groups
        self.saver = Saver(config, self.folder, now, groups, console, lambda: True, note, in_use)
        self._loader = scenarios.loader_of(engine, CORPUS)

    def train(self, *steps: int) -> None:
        for step in steps:
            assert not self.engine.train_step(self._loader.microbatches(step - 1)).skipped

    def save(self, step: int, *, wait: bool = False, **state: Any) -> None:
        self.saver.save(self.engine, TrainState(step=step, **state), wait=wait)

    def says_published(self, *steps: int) -> bool:
        """Whether rank 0 reported exactly these saves, and no other rank reported any."""
        return list(self.published) == (list(steps) if self.engine.groups.rank == 0 else [])

    def lines(self) -> list[str]:
        return self.said.getvalue().splitlines()

    def hash(self) -> tuple[str, str]:
        return scenarios.parameter_hash(self.engine), scenarios.optimizer_hash(self.engine)

    def loaded(self, step: int) -> tuple[str, str]:
        """Two hashes of the content of the checkpoint of `step`; loading overwrites everything else in the engine."""
        plain = engine_state.load(self.engine, self.folder / folders.name_of(step))
        assert plain["iteration"] == plain["sft"]["state"]["step"] == step
        assert optimizer_shards.step_of(self.engine.optimizer) == step
        return self.hash()


@contextmanager
def run_of(overrides: Sequence[str], folder: str, **given: Any) -> Iterator[Run]:
    with scenarios.running([*SMALL, *overrides]) as engine:
        yield Run(engine, folder, **given)


def train_and_save(overrides: list[str], source: str, folder: str, packs: list[Any]) -> dict[str, Any]:
    """Trains two steps from the Hugging Face folder `source`.  Returns this rank's token losses before and after these
    steps."""
    with scenarios.running(overrides, has_weights=False) as engine:
        load(engine, source)
        before = scenarios.losses_of(engine, packs)
        run = Run(engine, folder)
        run.train(1, 2)
        run.save(2, wait=True)
        return {"before": before, "after": scenarios.losses_of(engine, packs)}


def stored(folder: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, whole."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    safe_reader.load(tensors, folder)
    return tensors


def refusal(action: Callable[[], None]) -> str:
    with pytest.raises((CheckpointError, StorageError)) as error:
        action()
    return str(error.value)


def listing(folder: str | Path) -> list[str]:
    return sorted(os.listdir(folder)) if Path(folder).exists() else []
