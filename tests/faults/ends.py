"""What a finished run has to look like: as if nothing had happened to it.

Reads the files by itself, without the code that wrote them.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.faults.runs import Case
from tests.launching import TIMED

# What a run that is over may leave in its folder.
KEPT = {"checkpoints", "data.json", "metrics.jsonl", "recipe.yaml", "run_state.json", "seen.jsonl", "tensorboard"}
KEPT |= {"bad_steps", "stacks"}
POINTER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class End:
    """Of a run: everything that must not depend on what happened on the way."""

    records: list[dict[str, Any]]
    seen: bytes
    tensors: dict[str, str]

    def differences(self, other: "End") -> list[str]:
        """Nothing where they are bitwise the same."""
        found = [f"record {a} | {b}" for a, b in zip(self.records, other.records) if a != b][:3]
        if len(self.records) != len(other.records):
            found.append(f"{len(self.records)} records | {len(other.records)}")
        if self.seen != other.seen:
            found.append(f"seen.jsonl: {self.seen[-400:]!r} | {other.seen[-400:]!r}")
        keys = sorted(set(self.tensors) | set(other.tensors))
        return found + [f"tensor {k}" for k in keys if self.tensors.get(k) != other.tensors.get(k)][:5]


def end_of(case: Case) -> End:
    """Of the last checkpoint and what lies beside it."""
    return End(records=records(case.run), seen=(case.run / "seen.jsonl").read_bytes(), tensors=tensors(newest(case)))


def newest(case: Case) -> Path:
    return case.checkpoints / f"iter_{case.pointed():07d}"


def records(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl in its order, without what the clock says and without the starts."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMED} for line in lines if line["kind"] != "start"]


def tensors(folder: Path) -> dict[str, str]:
    """SHA-256 of every tensor of a checkpoint, weights and moments, by key."""
    reader = FileSystemReader(folder)
    there = reader.read_metadata().state_dict_metadata
    found: dict[str, Any] = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in there.items()
        if isinstance(value, TensorStorageMetadata)
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert any("exp_avg_sq" in key for key in found) and len(found) > 20, sorted(found)
    return {key: hashlib.sha256(value.numpy().tobytes()).hexdigest() for key, value in found.items()}


def assert_whole(case: Case, step: int | None = None) -> None:
    """The pointer names a checkpoint of which every byte is what its manifest says; of that step, if given."""
    pointed = case.pointed()
    folder = case.checkpoints / f"iter_{pointed:07d}"
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert {path.name for path in folder.iterdir()} == {*files, "manifest.json"}
    for name, told in files.items():
        content = (folder / name).read_bytes()
        assert len(content) == told["bytes"] and hashlib.sha256(content).hexdigest() == told["sha256"], name
    assert step is None or pointed == step, (pointed, step)


def assert_left_nothing(case: Case, *, beside: str = "$^") -> None:
    """No process, no file of a save or a write under way; names in checkpoints/ that match `beside` are expected."""
    for start in case.starts:
        assert start.alive() == [], start.told()
    strange = {path.name for path in case.run.iterdir()} - KEPT
    assert not strange, strange
    there = [path.name for path in case.checkpoints.iterdir() if path.name != POINTER]
    strange = {name for name in there if not re.fullmatch(r"iter_\d{7}", name) and not re.fullmatch(beside, name)}
    assert not strange, strange
    for path in case.checkpoints.glob("iter_???????"):
        assert (path / "manifest.json").exists() and (path / "metadata.json").exists(), f"half of {path} is left"


def assert_same_end(case: Case, reference: End, *, beside: str = "$^") -> None:
    """Done, bitwise as the run that nobody disturbed, and nothing left."""
    assert_left_nothing(case, beside=beside)
    state = case.status()
    assert (state["status"], state["reason"]) == ("done", None), state
    assert state["step"] == state["num_steps"] == state["saved_step"] == case.pointed(), state
    assert_whole(case)
    differences = end_of(case).differences(reference)
    assert not differences, differences
