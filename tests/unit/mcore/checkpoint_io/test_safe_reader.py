"""Loading a checkpoint runs no code from it.  Each malicious file here is first shown to run in an unsafe reader.

A canary is a folder that the malicious bytes would make.
"""

import argparse
import contextlib
import fractions
import io
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint.metadata as md

from sft.errors import CheckpointError
from sft.mcore.checkpoint_io import metadata_index, safe_reader
from tests.unit.fixtures.torch_dist import (
    COMMON,
    EXTRA,
    PLAIN,
    RNG,
    binary,
    call,
    change_index,
    packed,
    place_of,
    put,
    save,
    stack_global,
    text,
    wanted,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved") / "iter_0000003")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "iter_0000003"))


# --- malicious bytes -------------------------------------------------------------------------------------------------


class Reduces:
    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"mkdir {self.canary}",)


def zipped(canary: str) -> bytes:
    """The pickle in the container of torch.save."""
    stream = io.BytesIO()
    torch.save([Reduces(canary)], stream)
    return stream.getvalue()


TORCH_OS = b"ctorch.serialization\nos\n"  # the module os, reached through an allowed module
# name: (its bytes, the name in the error of the index unpickler)
TRICKS: dict[str, tuple[Callable[[str], bytes], str]] = {
    "global": (lambda c: call(b"cposix\nmkdir\n", text(c)) + b".", "posix.mkdir"),
    "inst": (lambda c: b"(" + text(c) + b"iposix\nmkdir\n.", "posix.mkdir"),
    "module of a known module": (
        lambda c: call(call(b"cbuiltins\ngetattr\n", TORCH_OS, text("mkdir")), text(c)) + b".",
        "builtins.getattr",
    ),
    "dotted name under a permitted class": (
        lambda c: b"\x80\x04"
        + call(
            stack_global("torch.distributed.checkpoint.metadata", "StorageMeta.__init__.__globals__.__getitem__"),
            text("os"),
        )
        + b"0"
        + call(b"cposix\nmkdir\n", text(c))
        + b".",
        "torch.distributed.checkpoint.metadata.StorageMeta.__init__.__globals__.__getitem__",
    ),
    "torch's own unpickling": (
        lambda c: call(
            b"ctorch.serialization\n_legacy_load\n",
            call(b"c_io\nBytesIO\n", binary(call(b"cposix\nmkdir\n", text(c)) + b".")),
            b"Nctorch.serialization\npickle\n",
        )
        + b".",
        "torch.serialization._legacy_load",
    ),
    "in torch.save's container": (zipped, ""),
}


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


PLACES: dict[str, Callable[[Path, bytes], object]] = {
    ".metadata": lambda folder, data: (folder / ".metadata").write_bytes(data),
    "common.pt": lambda folder, data: (folder / "common.pt").write_bytes(data),
    RNG: lambda folder, data: put(folder, RNG, data),
    EXTRA: lambda folder, data: put(folder, EXTRA, data),
    COMMON: lambda folder, data: put(folder, COMMON, data),
    "weight": lambda folder, data: put(folder, "weight", data),
}


def read_all(folder: Path) -> None:
    safe_reader.common_state(folder)
    safe_reader.load(wanted(), folder)


@pytest.mark.parametrize("trick", [name for name in TRICKS if name != "in torch.save's container"])
def test_each_trick_runs_in_a_plain_unpickler(trick: str, canary: Path) -> None:
    with contextlib.suppress(RuntimeError):  # torch raises it afterwards, when the code has run
        pickle.loads(TRICKS[trick][0](str(canary)))
    assert canary.exists()


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("place", PLACES)
def test_nothing_runs(folder: Path, canary: Path, place: str, trick: str) -> None:
    data, named = TRICKS[trick]
    PLACES[place](folder, data(str(canary)))
    with pytest.raises(CheckpointError) as caught:
        read_all(folder)
    assert not canary.exists()
    assert place in str(caught.value)
    if place == ".metadata":
        assert named in str(caught.value)
    elif place != "weight" and trick == "in torch.save's container":
        assert "names posix.system, which is not an allowed class" in str(caught.value)
    assert "weights_only" not in str(caught.value) and "\x1b" not in str(caught.value)


def test_a_class_cannot_be_changed(folder: Path) -> None:
    """BUILD with a class as its instance would set attributes of the class, if the unpickler returned the real
    class."""
    name = "ctorch.distributed.checkpoint.metadata\nStorageMeta\n".encode()
    poison = name + b"(N(d" + text("poison") + b"K\x01stb."
    try:
        pickle.loads(poison)
        assert md.StorageMeta.poison == 1  # type: ignore[attr-defined]
    finally:
        del md.StorageMeta.poison  # type: ignore[attr-defined]
    (folder / ".metadata").write_bytes(poison)
    with pytest.raises(CheckpointError, match="__setstate__"):
        safe_reader.tensors(folder)
    assert not hasattr(md.StorageMeta, "poison")
    ours = metadata_index._INDEX_NAMES["torch.distributed.checkpoint.metadata", "StorageMeta"]
    assert "poison" not in vars(ours)


def test_the_pickle_inside_an_extra_state_is_not_handed_on(folder: Path, canary: Path) -> None:
    """Transformer Engine unpickles a byte tensor or a stream that it finds in an extra state."""
    inside = TRICKS["global"][0](str(canary))
    for state in (torch.frombuffer(bytearray(inside), dtype=torch.uint8), io.BytesIO(inside)):
        put(folder, EXTRA, packed(state).getvalue())
        state = {EXTRA: io.BytesIO()}
        safe_reader.load(state, folder)
        assert state == {EXTRA: [None]}
    assert not canary.exists()


def test_a_numpy_array_of_objects_is_refused(folder: Path) -> None:
    """If its type were declared late, its bytes would be used as pointers."""
    put(folder, RNG, packed(np.array([{"a": 1}], dtype=object)).getvalue())
    with pytest.raises(CheckpointError, match="rng_state.*numpy array"):
        safe_reader.load({RNG: io.BytesIO()}, folder)
    put(folder, RNG, packed(np.zeros(2, dtype=[("a", "i4"), ("b", "f4")])).getvalue())
    with pytest.raises(CheckpointError, match="numpy array of type 'V8'"):
        safe_reader.load({RNG: io.BytesIO()}, folder)


def test_only_listed_classes_are_read_whatever_else_is_registered(folder: Path) -> None:
    """megatron-core registers types of numpy whose bytes could be used as pointers; a program may register any
    class."""
    put(folder, COMMON, packed({"where": fractions.Fraction(1, 2)}).getvalue())
    with (
        torch.serialization.safe_globals([fractions.Fraction]),
        pytest.raises(CheckpointError, match="names fractions.Fraction, which is not an allowed class"),
    ):
        safe_reader.common_state(folder)


def test_the_list_of_classes_holds_while_reading_only(saved: Path) -> None:
    before = set(torch.serialization.get_safe_globals())
    safe_reader.common_state(saved)
    assert set(torch.serialization.get_safe_globals()) == before
    with torch.serialization.safe_globals([argparse.Namespace]):  # registered by another program, such as Megatron-LM
        safe_reader.common_state(saved)
        assert argparse.Namespace in torch.serialization.get_safe_globals()


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../../x", "..", ".", "", "/etc/passwd", "sub/shard.distcp", "a\0b", None, 7])
def test_a_shard_lies_in_the_folder(folder: Path, name: Any) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "shard.distcp").write_bytes(bytes(100_000))
    change_index(folder, lambda index: setattr(place_of(index, "weight"), "relative_path", name))
    with pytest.raises(CheckpointError, match=r"\.metadata is not the index"):
        safe_reader.tensors(folder)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "common.pt"])
def test_a_link_out_of_the_folder_is_not_followed(folder: Path, tmp_path: Path, name: str) -> None:
    torch.save(PLAIN, folder / "common.pt")
    outside = tmp_path / "outside"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match=f"{name} is a link out of the folder"):
        read_all(folder)


def test_a_link_within_the_folder_and_a_linked_folder_are_fine(folder: Path, tmp_path: Path) -> None:
    (folder / "__0_0.distcp").rename(folder / "moved")
    (folder / "__0_0.distcp").symlink_to("moved")
    (tmp_path / "latest").symlink_to(folder)
    assert safe_reader.common_state(tmp_path / "latest")["iteration"] == 3


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    (folder / ".metadata").unlink()
    os.mkfifo(folder / ".metadata")
    # a reader of the pipe would get this
    writer = threading.Thread(target=(folder / ".metadata").write_bytes, args=(b"garbage",))
    writer.start()
    try:
        with pytest.raises(CheckpointError, match="not a regular file"):
            safe_reader.tensors(folder)
    finally:
        pipe = os.open(folder / ".metadata", os.O_RDONLY | os.O_NONBLOCK)
        writer.join()
        os.close(pipe)


@pytest.mark.parametrize(
    "field, value, told",
    [
        ("offset", -1, r"\.metadata is not the index"),
        ("length", -1, r"\.metadata is not the index"),
        ("offset", "0", r"\.metadata is not the index"),
        ("length", 1.5, r"\.metadata is not the index"),
        ("offset", 10**9, r"__0_0\.distcp is cut short"),
        ("length", 10**9, r"__0_0\.distcp is cut short"),
    ],
)
def test_a_place_is_within_its_shard(folder: Path, field: str, value: Any, told: str) -> None:
    change_index(folder, lambda index: setattr(place_of(index, "weight"), field, value))
    with pytest.raises(CheckpointError, match=told):
        safe_reader.objects(folder)


def test_a_shard_one_byte_short(folder: Path) -> None:
    size = (folder / "__0_0.distcp").stat().st_size
    os.truncate(folder / "__0_0.distcp", size - 1)
    with pytest.raises(CheckpointError, match=rf"__0_0\.distcp is cut short: {size - 1} bytes, .* up to byte {size}\."):
        safe_reader.tensors(folder)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_file_that_is_gone(folder: Path, name: str) -> None:
    (folder / name).unlink()
    for read in (safe_reader.tensors, safe_reader.objects, safe_reader.common_state):
        with pytest.raises(CheckpointError, match=rf"{name} is missing"):
            read(folder)


@pytest.mark.parametrize("data", [b"", b"\x80", b"garbage", pickle.dumps({}), pickle.dumps(md.StorageMeta())])
def test_an_index_that_is_none(folder: Path, data: bytes) -> None:
    (folder / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"\.metadata is not the index of a torch_dist checkpoint"):
        safe_reader.tensors(folder)


def test_the_list_of_harmless_classes_is_known() -> None:
    """megatron-core may add classes to its list; each new class must be reviewed before it is accepted here."""
    megatron = {
        "megatron.core.enums.ModelType",
        "megatron.core.optimizer.optimizer_config.OptimizerConfig",
        "megatron.core.rerun_state_machine.RerunDiagnostic",
        "megatron.core.rerun_state_machine.RerunMode",
        "megatron.core.rerun_state_machine.RerunState",
        "megatron.core.transformer.enums.AttnBackend",
        "megatron.core.transformer.enums.CudaGraphModule",
        "megatron.core.transformer.enums.CudaGraphScope",
        "megatron.core.transformer.enums.InferenceCudaGraphScope",
    }
    plain = {
        "_io.BytesIO",
        "argparse.Namespace",
        "numpy._core.multiarray._reconstruct",
        "numpy.core.multiarray._reconstruct",
        "numpy.dtype",
        "numpy.ndarray",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",  # in Python 3.13
        "signal.Signals",
        "torch._C.Generator",
        "types.SimpleNamespace",
    }
    assert {name for _, name in safe_reader._allowed()} <= megatron | plain
