"""A good checkpoint of any writer loads, with and without a process group; the error names a part that cannot be
read."""

import argparse
import errno
import fractions
import io
import os
import pathlib
import random
import signal
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.metadata as md
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend

from sft.errors import CheckpointError, SftError, StorageError
from sft.mcore.checkpoint_io import metadata_index, safe_reader
from tests.unit.fixtures.torch_dist import (
    COMMON,
    EXTRA,
    PLAIN,
    RNG,
    change_index,
    packed,
    put,
    random_states,
    save,
    wanted,
    with_pickle,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "iter_0000003")


def check_contents(state: dict[str, Any]) -> None:
    assert state["weight"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    (states,) = state[RNG]
    kind, keys, *rest = random_states()["np_rng_state"]
    assert states["np_rng_state"][0] == kind and states["np_rng_state"][2:] == tuple(rest)
    assert states["np_rng_state"][1].tolist() == keys.tolist() and states["np_rng_state"][1].dtype == np.uint32
    drawn = np.random.RandomState()
    drawn.set_state(states["np_rng_state"])
    assert drawn.randint(1000, size=3).tolist() == [867, 206, 701]
    python = random.Random()
    python.setstate(states["random_rng_state"])
    assert python.random() == random.Random(5).random()
    assert torch.equal(states["torch_rng_state"], random_states()["torch_rng_state"])
    assert state[EXTRA] == [None]


def test_a_process_alone(folder: Path) -> None:
    assert not dist.is_initialized()
    assert safe_reader.tensors(folder) == {"weight": ((3, 4), torch.float32), "scale": ((5,), torch.bfloat16)}
    assert safe_reader.objects(folder) == {RNG, EXTRA, COMMON}
    assert safe_reader.common_state(folder) == PLAIN
    state = wanted()
    safe_reader.load(state, folder)
    check_contents(state)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_process_in_a_group(group: None, folder: Path) -> None:
    def load(state: dict[str, Any]) -> None:
        reader, planner = safe_reader.SafeReader(folder), safe_reader.SafeLoadPlanner()
        dcp.load(state, storage_reader=reader, planner=planner)

    for read in (lambda state: safe_reader.load(state, folder), load):
        state = wanted()
        read(state)
        check_contents(state)
    assert safe_reader.common_state(folder) == PLAIN
    put(folder, RNG, packed(fractions.Fraction(1, 2)).getvalue())
    with pytest.raises(CheckpointError, match="^The object rng_state/shard_0_1 .* fractions.Fraction"):
        with safe_reader.unwrapped(folder):
            load(wanted())
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="metadata is missing"), safe_reader.unwrapped(folder):
        load(wanted())


def test_an_interrupt_stays_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(safe_reader.SafeLoadPlanner, "load_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        safe_reader.load(wanted(), folder)


@pytest.mark.parametrize("number, kind", [(errno.EIO, StorageError), (errno.EACCES, CheckpointError)])
@pytest.mark.parametrize("read", ["index", "common.pt", "tensor", "chunk"])
def test_a_disk_that_fails_is_not_a_damaged_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, read: str, number: int, kind: type[SftError]
) -> None:
    """After a disk failure, another start may succeed; a damaged checkpoint is refused at each start."""
    torch.save(PLAIN, folder / "common.pt")
    reader = safe_reader.SafeReader(folder)

    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    if read == "index":
        monkeypatch.setattr(metadata_index.folder_files, "read", fail)
    elif read == "common.pt":
        monkeypatch.setattr(safe_reader, "read_file", fail)
    else:
        reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
        monkeypatch.setattr(safe_reader.SafeReader, "_slice_file", fail)
    with pytest.raises(kind, match=f"cannot be read: .*{os.strerror(number)}") as caught:
        if read == "chunk":
            reader.mapped_chunk(next(index for index in reader.storage_data if index.fqn == "weight"))
        elif read == "tensor":
            safe_reader.load(wanted(), reader)
        else:
            safe_reader.common_state(folder) if read == "common.pt" else safe_reader.tensors(folder)
    assert type(caught.value) is kind


def test_common_values_of_a_file_come_before_those_of_an_object(folder: Path) -> None:
    values = {
        "iteration": 4,
        "args": argparse.Namespace(dtype=torch.bfloat16, backend=AttnBackend.auto, exit_signal=signal.SIGTERM),
        "path": pathlib.PosixPath("a/b"),
        "spaces": types.SimpleNamespace(a=1),
        "optimizer": OptimizerConfig(lr=0.25),
        "array": np.arange(6, dtype=">i2").reshape(2, 3).T,
        "names": np.array(["ab", "c"]),
    }
    torch.save(values, folder / "common.pt")
    found = safe_reader.common_state(folder)
    array, names = found.pop("array"), found.pop("names")
    assert array.dtype == np.int16 and array.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert names.tolist() == ["ab", "c"]
    del values["array"], values["names"]
    assert found == values
    torch.save({"array": array}, folder / "common.pt")  # a loaded array stays an array if it is saved again
    assert type(torch.load(folder / "common.pt", weights_only=False)["array"]) is np.ndarray


def test_arrays_of_an_older_numpy(folder: Path) -> None:
    stream = io.BytesIO()
    torch.save({"array": np.array([1, 770])}, stream)
    older = with_pickle(stream.getvalue(), lambda data: data.replace(b"numpy._core.", b"numpy.core."))
    (folder / "common.pt").write_bytes(older)
    assert safe_reader.common_state(folder)["array"].tolist() == [1, 770]


def test_plain_values_have_names(folder: Path) -> None:
    torch.save([1], folder / "common.pt")
    with pytest.raises(CheckpointError, match=r"common\.pt is a list, not a dict of plain values"):
        safe_reader.common_state(folder)
    (folder / "common.pt").unlink()
    put(folder, COMMON, packed(5).getvalue())
    with pytest.raises(CheckpointError, match="is a int, not a dict of plain values"):
        safe_reader.common_state(folder)

    def without(index: md.Metadata) -> None:
        del index.state_dict_metadata[COMMON]

    change_index(folder, without)
    with pytest.raises(CheckpointError, match="has neither the file"):
        safe_reader.common_state(folder)


@pytest.mark.parametrize("key", ["weight", RNG])
def test_damaged_and_missing_keys_are_named(folder: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match="iter_0000003 cannot be loaded: Missing key in checkpoint.*: other"):
        safe_reader.load({"other": torch.zeros(1)}, folder)
    put(folder, key, b"\0" * 500)
    with pytest.raises(CheckpointError, match=key):
        safe_reader.load(wanted(), folder)
