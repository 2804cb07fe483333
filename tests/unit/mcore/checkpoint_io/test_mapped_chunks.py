"""A stored chunk in mapped memory equals the saved tensor, in every form of storage; only its entry of the file is
read."""

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sft.errors import CheckpointError
from sft.mcore.checkpoint_io.safe_reader import SafeReader
from tests.unit.fixtures.torch_dist import change_index, place_of, put, save, with_pickle

KEY = "weight"
NUMBERS = torch.arange(12.0).reshape(3, 4)


def container(tensor: Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def mapped(folder: Path, key: str = KEY) -> Tensor:
    reader = SafeReader(folder)
    reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
    return reader.mapped_chunk(next(index for index in reader.storage_data if index.fqn == key))


@pytest.mark.parametrize(
    "stored",
    [
        NUMBERS,
        NUMBERS.T,
        NUMBERS[1:, 2:],  # a part of a larger storage, which is stored whole
        NUMBERS.bfloat16(),
        NUMBERS.to(torch.float8_e4m3fn),
        torch.tensor(7),
        torch.empty(0, 4),
        torch.arange(100_000),  # of many pages
    ],
    ids=["plain", "transposed", "part", "bf16", "fp8", "scalar", "empty", "large"],
)
def test_it_is_what_was_saved(tmp_path: Path, stored: Tensor) -> None:
    folder = save(tmp_path / "iter_0000003")
    put(folder, KEY, container(stored))
    found = mapped(folder)
    for shard in folder.glob("*.distcp"):
        shard.unlink()  # mapped memory stays valid
    assert (found.dtype, found.shape, found.stride()) == (stored.dtype, stored.shape, stored.stride())
    assert found.tolist() == stored.tolist()


def test_writing_to_it_does_not_reach_the_file(tmp_path: Path) -> None:
    folder = save(tmp_path / "iter_0000003")
    mapped(folder).zero_()
    assert mapped(folder).tolist() == NUMBERS.tolist()
    assert mapped(folder, "scale").tolist() == [1.0] * 5


class Hostile:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.made),)


def test_nothing_runs(tmp_path: Path) -> None:
    folder, stream = save(tmp_path / "iter_0000003"), io.BytesIO()
    torch.save([NUMBERS, Hostile(tmp_path / "made")], stream)
    put(folder, KEY, stream.getvalue())
    with pytest.raises(CheckpointError, match=r"^weight in .*\.distcp cannot be read: it names posix.mkdir"):
        mapped(folder)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("damage", ["more numbers than the entry", "cut", "no tensor"])
def test_a_damaged_entry_is_named(tmp_path: Path, damage: str) -> None:
    folder = save(tmp_path / "iter_0000003")
    if damage == "more numbers than the entry":
        twelve, many = b"K\x0c", b"J\xff\xff\x00\x00"  # the storage has 65,535 elements
        put(folder, KEY, with_pickle(container(NUMBERS), lambda data: data.replace(twelve, many)))
        put(folder, "scale", bytes(1 << 20))  # so that the file is large enough
    elif damage == "cut":
        change_index(folder, lambda index: setattr(place_of(index, KEY), "length", 200))
    else:
        put(folder, KEY, b"\0" * 500)
    said = "it ends before its last number" if "more" in damage else ""
    with pytest.raises(CheckpointError, match=rf"^weight in .*\.distcp cannot be read: {said}"):
        mapped(folder)
