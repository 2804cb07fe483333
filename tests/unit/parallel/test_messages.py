"""Messages between ranks: every kind of value arrives unchanged, and no code from a message runs."""

import io
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from sft.checkpoint.manifest import Manifest
from sft.config import Config
from sft.data.read.named_dataset import LoadedDataset
from sft.data.read.tables import TableSlice
from sft.data.template.limits import TooMuch
from sft.errors import CheckpointError, SftError
from sft.files.file_digest import Entry
from sft.mcore.checkpoint_io import save_plans  # noqa: F401 - registers torch's plans
from sft.mcore.checkpoint_io.shard_owners import _Held
from sft.parallel import messages, tensor_messages  # noqa: F401 - registers tensors
from sft.probe.inputs import _Part
from sft.probe.leak import Leak
from sft.run.status import Status

ENTRY = Entry(num_bytes=7, sha256="ab")
LEAK = Leak(dp_rank=0, direction="forward", replaced="end", document=1, layer=2, stage=0, tokens=3, size=0.5)
PART = _Part(location=(0, 1, 2), cp_size=2, digest="x", runs=[(0, 1, 2)], sizes=[8], problems=["p"])
DATASET = LoadedDataset(name="a b", commit=None, slices=(TableSlice(Path("a"), 0, 3),), columns=(("messages", "c"),))
STATUS = Status("running", 1, None, 1, 1, "id", 1, None, None, 0.5, None, "now", "host", None)
INDEX = md.MetadataIndex("a.weight", torch.Size([0, 4]), 1)
CHUNK = md.ChunkStorageMetadata(offsets=torch.Size([0, 4]), sizes=torch.Size([2, 4]))
WRITTEN = TensorWriteData(CHUNK, md.TensorProperties(dtype=torch.bfloat16), torch.Size([2, 8]))
PLAN = SavePlan([WriteItem(INDEX, WriteItemType.SHARD, tensor_data=WRITTEN)], storage_data=_StoragePrefix("__0_"))
HELD = _Held(("a", (0, 1), None), (2, 3), torch.float32, True)
VALUES = [
    *(None, True, 3, -1.5, float("inf"), "", "caf\u00e9 \udc80", b"\x00\xff", [], [1, [2]], (), ((1,), "a"), {1, 2}),
    *({}, {"a": {"b": [None]}}, {3: (1, 2), "x": Path("/a b/c")}, {(1, 2): 3}, frozenset({"a"}), Path("rel"), 2**70),
    *(torch.float8_e4m3fn, torch.strided, torch.contiguous_format, torch.Size([3, 4])),
    *(ENTRY, Manifest(files={"a": ENTRY}, facts={"step": 1}), LEAK, PART, DATASET, [(DATASET, Path("store"))], STATUS),
    *(PLAN, HELD, WriteResult(INDEX, 16, _StorageInfo("__0_0.distcp", 0, 16))),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{value!r:.40}")
def test_a_value_arrives_as_it_was(value: Any) -> None:
    arrived = messages.decode(messages.encode(value))
    assert type(arrived) is type(value) and arrived == value
    assert repr(arrived) == repr(value)  # repr shows the types of all parts


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.bool])
def test_a_tensor_arrives_with_its_bytes(dtype: torch.dtype) -> None:
    for tensor in (
        torch.arange(6).reshape(2, 3).t().to(dtype),
        torch.empty(0, 4, dtype=dtype),
        torch.tensor(1).to(dtype),
    ):
        arrived = messages.decode(messages.encode(tensor))
        assert arrived.dtype == dtype and arrived.shape == tensor.shape and torch.equal(arrived, tensor)


def test_states_of_generators_arrive() -> None:
    state = np.random.RandomState(3).get_state()
    arrived = messages.decode(messages.encode(state))
    assert isinstance(state, tuple) and (arrived[1] == state[1]).all() and arrived[1].dtype == np.uint32
    assert arrived[:1] + arrived[2:] == ("MT19937", 624, 0, 0.0)


def test_a_recipe_arrives_as_its_json() -> None:
    data = {"train": ["a.jsonl"], "seq_length": 256}
    config = Config.model_validate(
        {
            "run": {"dir": "runs/a"},
            "model": {
                "num_layers": 2,
                "hidden_size": 32,
                "ffn_hidden_size": 64,
                "num_attention_heads": 4,
                "init_from": "random",
            },
            "data": data,
            "train": {"num_steps": 2, "global_batch_size": 1},
            "optim": {"lr": 1e-3},
        }
    )
    assert Config.model_validate_json(config.model_dump_json()) == config


@dataclass
class Unregistered:
    a: int = 1


@pytest.mark.parametrize(
    "value", [Unregistered(), np.int64(3), [io.BytesIO()], {"a": ValueError()}, print, np.array([None])]
)
def test_a_value_of_another_class_is_not_sent(value: Any) -> None:
    with pytest.raises(TypeError):
        messages.encode(value)


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["HOSTILE"],)


REFUSED = [
    *(b"", b"\x80\x04.", b"null null", b'["tuple"', b"[]", b"[3]", b'["Unregistered",1]', b'["system","ls"]', b"[[1]]"),
    *(b'["PosixPath",3]', b'["PosixPath"]', b'["bytes","!"]', b'["Tensor","torch.float32",["list",9],["bytes",""]]'),
    *(
        b'["Tensor","torch.load",["list"],["bytes",""]]',
        b'["dtype","load"]',
        b'["ndarray","O",["list",0],["bytes",""]]',
    ),
    *(b'["ndarray","<f8",["list",9],["bytes",""]]', b'["Entry",1]', b'["Entry",1,"a","b"]', b'["set",["list"]]'),
    *(b'["WriteItemType","mro"]', b"[" * 100_000, b'["list",' * 50_000, b"9" * 10_000, b"\xff\xfe"),
]


@pytest.mark.parametrize("sent", REFUSED, ids=lambda sent: repr(sent[:40]))
def test_bytes_that_are_no_message_are_refused(sent: bytes) -> None:
    with pytest.raises(messages.InvalidMessage) as refused:
        messages.decode(sent)
    assert len(str(refused.value)) <= 200


def test_a_pickle_is_refused_and_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTILE", str(tmp_path / "ran"))
    for protocol in range(6):
        with pytest.raises(messages.InvalidMessage):
            messages.decode(pickle.dumps(Hostile(), protocol))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "error, kind, text",
    [
        (CheckpointError("a\nb"), CheckpointError, "a\nb"),
        (TooMuch("too much"), TooMuch, "too much"),
        (FileNotFoundError(2, "No such file", "/a b"), FileNotFoundError, "[Errno 2] No such file: '/a b'"),
        (OSError(28, "No space left"), OSError, "[Errno 28] No space left"),
        (ConnectionError("reset"), OSError, "ConnectionError: reset"),
        (ZeroDivisionError("x"), RuntimeError, "rank 3: ZeroDivisionError: x"),
    ],
)
def test_an_error_is_of_the_same_class_on_every_rank(error: Exception, kind: type, text: str) -> None:
    arrived = messages.to_error(messages.decode(messages.encode(messages.error_message(error, 3))))
    assert type(arrived) is kind and str(arrived) == text


def test_an_error_of_a_class_that_is_not_imported_is_of_its_base_class() -> None:
    arrived = messages.to_error(["SftError", ["Elsewhere", "CheckpointError", "SftError"], "x"])
    assert type(arrived) is CheckpointError
    assert type(messages.to_error(["SftError", ["BaseException"], "x"])) is SftError


@pytest.mark.parametrize("sent", [[], ["SftError", "x"], ["OSError", "1", "x", None, None], ["exec", "x"], "bug", {}])
def test_an_error_that_is_none_is_refused(sent: Any) -> None:
    with pytest.raises(messages.InvalidMessage):
        messages.to_error(sent)
