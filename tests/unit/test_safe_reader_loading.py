"""An honest checkpoint loads, with and without a process group, whoever wrote it; what cannot be read is named."""

import argparse
import fractions
import io
import pathlib
import random
import signal
import types
from collections.abc import Callable, Iterator
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

from sft.errors import CheckpointError
from sft.mcore.checkpoint_io import safe_reader
from tests.ranks import scenarios
from tests.ranks.pool import RankPool
from tests.unit.fixtures.torch_dist import (
    COMMON,
    EXTRA,
    PLAIN,
    RNG,
    call,
    change_index,
    packed,
    put,
    random_states,
    save,
    text,
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
    for load in (
        lambda state: safe_reader.load(state, folder),
        lambda state: dcp.load(
            state, storage_reader=safe_reader.SafeReader(folder), planner=safe_reader.SafeLoadPlanner()
        ),
    ):
        state = wanted()
        load(state)
        check_contents(state)
    assert safe_reader.common_state(folder) == PLAIN
    put(folder, RNG, packed(fractions.Fraction(1, 2)).getvalue())
    with (
        pytest.raises(CheckpointError, match="^The object rng_state/shard_0_1 .* fractions.Fraction"),
        safe_reader.unwrapped(folder),
    ):
        dcp.load(wanted(), storage_reader=safe_reader.SafeReader(folder), planner=safe_reader.SafeLoadPlanner())
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="metadata is missing"), safe_reader.unwrapped(folder):
        dcp.load(wanted(), storage_reader=safe_reader.SafeReader(folder), planner=safe_reader.SafeLoadPlanner())


def test_an_interrupt_stays_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(safe_reader.SafeLoadPlanner, "load_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        safe_reader.load(wanted(), folder)


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
    assert array.tolist() == [[0, 3], [1, 4], [2, 5]] and array.dtype == np.int16
    assert names.tolist() == ["ab", "c"]
    del values["array"], values["names"]
    assert found == values


def test_an_array_saved_again_is_an_array(folder: Path) -> None:
    torch.save({"array": np.arange(3)}, folder / "common.pt")
    torch.save(safe_reader.common_state(folder), folder / "common.pt")
    again = torch.load(folder / "common.pt", weights_only=False)["array"]
    assert type(again) is np.ndarray and again.tolist() == [0, 1, 2]


@pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_arrays_of_either_numpy(folder: Path, module: str) -> None:
    kind = f"c{module}\n_reconstruct\n".encode()
    start = call(
        kind, b"cnumpy\nndarray\n", b"K\x00\x85", b"c_codecs\nencode\n" + b"(" + text("b") + text("latin1") + b"tR"
    )
    dtype = (
        call(b"cnumpy\ndtype\n", text("u2"), b"\x89", b"\x88")
        + b"(K\x03"
        + text("<")
        + b"NNN"
        + b"J\xff\xff\xff\xff" * 2
        + b"K\x00tb"
    )
    data = call(b"c_codecs\nencode\n", text("\x01\x00\x02\x03"), text("latin1"))
    array = start + b"(K\x01K\x02\x85" + dtype + b"\x89" + data + b"tb"
    stream = io.BytesIO()
    torch.save(0, stream)
    rewritten = with_pickle(stream.getvalue(), b"\x80\x02}" + text("array") + array + b"s.")
    (folder / "common.pt").write_bytes(rewritten)
    assert safe_reader.common_state(folder)["array"].tolist() == [1, 770]


def test_plain_values_have_names(folder: Path) -> None:
    torch.save([1], folder / "common.pt")
    with pytest.raises(CheckpointError, match=r"common\.pt is a list, not the plain values"):
        safe_reader.common_state(folder)
    (folder / "common.pt").unlink()
    put(folder, COMMON, packed(5).getvalue())
    with pytest.raises(CheckpointError, match="is a int, not the plain values"):
        safe_reader.common_state(folder)

    def without(index: md.Metadata) -> None:
        del index.state_dict_metadata[COMMON]

    change_index(folder, without)
    with pytest.raises(CheckpointError, match="has no plain values"):
        safe_reader.common_state(folder)


def save_and_compare(folder: str, overrides: list[str]) -> dict[str, Any]:
    """On a rank: a whole checkpoint, read by the stock readers and by ours."""
    with scenarios.running(overrides) as engine:
        scenarios.save(engine, Path(folder), {"iteration": 2, "sft": {"state": {"step": 2}}})
    stock = dcp.FileSystemReader(folder).read_metadata()
    ours = safe_reader.SafeReader(Path(folder)).read_metadata()
    places = {at: (p.relative_path, p.offset, p.length) for at, p in ours.storage_data.items()}
    state = {
        key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in safe_reader.tensors(Path(folder)).items()
    } | {key: io.BytesIO() for key in safe_reader.objects(Path(folder))}
    theirs = {key: value.clone() if isinstance(value, torch.Tensor) else io.BytesIO() for key, value in state.items()}
    safe_reader.load(state, Path(folder))
    dcp.load(
        theirs,
        storage_reader=dcp.FileSystemReader(folder),
        planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    )
    return {
        "entries": ours.state_dict_metadata == stock.state_dict_metadata,
        "places": places == {at: (p.relative_path, p.offset, p.length) for at, p in stock.storage_data.items()},
        "values": all(same(value, theirs[key]) for key, value in state.items()),
        "num": (
            len(safe_reader.tensors(Path(folder))),
            len([v for v in state.values() if not isinstance(v, torch.Tensor)]),
        ),
        "common": safe_reader.common_state(Path(folder)),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor | np.ndarray):
        return bool((torch.as_tensor(np.asarray(one)) == torch.as_tensor(np.asarray(other))).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("overrides", [[], ["parallel.distributed_optimizer=true"]], ids=str)
def test_a_checkpoint_of_this_trainer(ranks: Callable[[int], RankPool], tmp_path: Path, overrides: list[str]) -> None:
    (found,) = ranks(1).run(save_and_compare, str(tmp_path), overrides)
    assert found["entries"] and found["places"] and found["values"]
    assert found["num"][0] > 30 and found["num"][1] >= 16
    assert found["common"]["iteration"] == 2 and found["common"]["sft"] == {"state": {"step": 2}}
    assert {"checkpoint_version", "opt_param_scheduler", "optimizer"} <= found["common"].keys()


@pytest.mark.parametrize("key", ["weight", RNG])
def test_damaged_bytes_name_their_key(folder: Path, key: str) -> None:
    put(folder, key, b"\0" * 500)
    with pytest.raises(CheckpointError, match=key):
        safe_reader.load(wanted(), folder)


def test_what_is_not_stored_is_named(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="iter_0000003 cannot be loaded: Missing key in checkpoint.*: other"):
        safe_reader.load({"other": torch.zeros(1)}, folder)
