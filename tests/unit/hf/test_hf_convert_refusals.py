"""Conversions that are refused leave nothing behind."""

import json
import shutil
import struct
from argparse import Namespace
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sft.console import QUIET
from sft.errors import CheckpointError, SftError, StorageError
from sft.hf.architecture import architecture, read
from sft.hf.tensor_check import fold_by_layer
from sft.weights.export.export_hf import _model, export_hf
from sft.weights.import_hf import import_hf
from tests.unit.fixtures import hf
from tests.unit.fixtures.hf import Make, same, tensors


def refused(work: Callable[[], object], target: Path, expected: type[SftError] = CheckpointError) -> str:
    before = sorted(target.parent.rglob("*"))
    with pytest.raises(expected) as error:
        work()
    assert sorted(target.parent.rglob("*")) == before
    return str(error.value)


def import_refused(source: Path, expected: type[SftError] = CheckpointError) -> str:
    target = source.parent / "there"
    return refused(lambda: import_hf(source, target, QUIET), target, expected)


def test_missing_surplus_and_misshapen_tensors_are_told_at_once(made: Make) -> None:
    source = hf.rewrite(
        made(),
        **{
            "model/layers/0/mlp/up_proj/weight": None,
            "model/layers/1/mlp/up_proj/weight": None,
            "model/layers/1/self_attn/k_proj/bias": None,
            "model/layers/0/mlp/experts/weight": torch.zeros(2),
            "model/norm/weight": torch.zeros(33),
            "lm_head/weight": torch.zeros(301, 32, dtype=torch.float64),
        },
    )
    assert import_refused(source) == (
        f"{source} does not hold the expected tensors:\n  missing: model.layers.*.mlp.up_proj.weight (layers 0-1)\n"
        "  missing: model.layers.*.self_attn.k_proj.bias (layer 1)\n  surplus: model.layers.*.mlp.experts.weight "
        "(layer 0)\n  different shape: model.norm.weight is 33, expected 32\n"
        "  type F64 is not supported, only F32, F16, BF16: lm_head.weight"
    )


def test_one_tensor_of_ours_cannot_have_two_types(made: Make) -> None:
    narrow = torch.zeros((64, 32), dtype=torch.bfloat16)
    told = import_refused(hf.rewrite(made(), **{"model/layers/1/mlp/up_proj/weight": narrow}))
    first = "model.layers.0.mlp.gate_proj.weight"
    assert f"tensors that become one tensor have different types: F32 ({first}), BF16 (" in told


@pytest.mark.parametrize("what", ["another type", "another shape"])
def test_an_output_that_is_tied_and_another_is_refused(made: Make, what: str) -> None:
    source = made(tied=True)
    head = tensors(source)["model.embed_tokens.weight"].clone()
    head = head.half() if what == "another type" else head[:-1]
    told = import_refused(hf.rewrite(source, **{"lm_head/weight": head}))
    assert "surplus: lm_head.weight" in told
    assert "lm_head.weight and model.embed_tokens.weight differ" in told


def header(content: Any, data: bytes = b"") -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + data


def place(*offsets: int, dtype: str = "F32", shape: tuple[int, ...] = (1,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "content,why",
    [
        (header({"a": place(0, 4)}, b"12345"), "file not fully covered (the file has "),
        # the name of either tensor may follow
        (header({"a": place(0, 4), "b": place(0, 4)}, b"1234"), "invalid offset for tensor `"),
        (header({"a": place(0, 4, shape=(2,))}, b"1234"), "invalid shape, data type, or offset for tensor"),
        (header({"a": place(-4, 0)}, b"1234"), "integer `-4`, expected usize"),
        *(
            (header({"a": place(0, 4)}, b"1234")[:left], "not a complete safetensors file")
            for left in (0, 7, 8, 20, -1)
        ),
        (header(b"[" * 100_000), "not a complete safetensors file"),
        (struct.pack("<Q", 1 << 60) + b"{}", "header too large"),
    ],
)
def test_headers_that_lie(made: Make, content: bytes, why: str) -> None:
    source = made()
    (source / "model.safetensors").write_bytes(content)
    assert why in import_refused(source)


def test_a_file_that_shrinks_meanwhile(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source = made()

    def shrink(*args: Any) -> list[str]:
        (source / "model.safetensors").write_bytes(b"")
        return []

    before = (source / "model.safetensors").stat().st_size
    monkeypatch.setattr("sft.weights.import_hf._extra_state_keys", shrink)
    assert before and "became shorter while model.embed_tokens.weight was read" in import_refused(source)


def test_pickles_are_not_opened(made: Make) -> None:
    source = made()
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    assert (
        "pytorch_model.bin, a pickle file.  Pickle files can run code, so this trainer does not open them"
        in import_refused(source)
    )
    (source / "pytorch_model.bin").unlink()
    assert "has no weights" in import_refused(source)


def test_an_index_and_files_that_disagree(made: Make) -> None:
    source = made(shard="20KB")
    path = source / "model.safetensors.index.json"
    good = json.loads(path.read_text())
    files = list(good["weight_map"].values())
    first = next(name for name, file in good["weight_map"].items() if files.count(file) > 1)

    def told(weight_map: Any) -> str:
        path.write_text(json.dumps({"weight_map": weight_map}))
        return import_refused(source)

    rest = {name: file for name, file in good["weight_map"].items() if name != first}
    file = good["weight_map"][first]
    assert f"not in it: {fold_by_layer([first])[0]} ({file})" in told(rest)
    experts = {f"model.layers.1.mlp.experts.{i}.up_proj.weight": file for i in range(100)}
    assert (
        "missing from the file that the index names: model.layers.*.mlp.experts.*.up_proj.weight (layer 1; experts "
        f"0-99) ({file})." in told({**good["weight_map"], **experts})
    )
    other = next(name for name in files if name != file)
    assert f"missing from the file that the index names: {fold_by_layer([first])[0]} ({other})" in told(
        {**rest, first: other}
    )
    assert "gone.safetensors is not a complete safetensors file: [Errno 2]" in told({**rest, first: "gone.safetensors"})
    assert "is damaged" in told([1])
    path.write_text(json.dumps(good))
    (source / "model.safetensors").write_bytes(b"")
    assert "has both model.safetensors and model.safetensors.index.json" in import_refused(source)


def test_an_index_that_cannot_be_read_is_not_called_damaged(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(5, "Input/output error")

    source = made(shard="20KB")
    monkeypatch.setattr("sft.hf.safetensors_index.read_json", fail)
    assert f"{source}/model.safetensors.index.json cannot be read: Input/output error." in import_refused(source)


def test_a_tensor_in_two_files(made: Make) -> None:
    source = made(shard="20KB")
    files = sorted(source.glob("*.safetensors"))
    save_file({**load_file(files[1]), **dict([load_file(files[0]).popitem()])}, files[1])
    assert f"is both in {files[0]} and in {files[1]}" in import_refused(source)


def test_a_target_that_exists(made: Make, tmp_path: Path) -> None:
    source = made()
    import_hf(source, tmp_path / "imported", QUIET)
    for target in (tmp_path / "empty", tmp_path / "file", tmp_path / "link"):
        if target.name == "empty":
            target.mkdir()
        elif target.name == "file":
            target.write_text("kept")
        else:
            target.symlink_to("nowhere")
        for work in (import_hf, export_hf):
            origin = source if work is import_hf else tmp_path / "imported"
            told = refused(lambda: work(origin, target, QUIET), target)  # noqa: B023
            assert told == f"{target} exists; nothing was written.  Name a folder that does not exist."


def test_a_disk_too_small_or_full(made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = made(), tmp_path / "back"
    import_hf(source, tmp_path / "imported", QUIET)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("sft.files.file_digest.HashingFile._put", full)
        told = "was not written: the disk is full (OSError: [Errno 28] No space left on device)"
        assert told in import_refused(source, StorageError)
        assert told in refused(lambda: export_hf(tmp_path / "imported", target, QUIET), target, StorageError)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, (1 << 30) - 4096, 4096))
    assert "has 4.0 KiB free; nothing was written" in import_refused(source, StorageError)
    full_disk = refused(lambda: export_hf(tmp_path / "imported", target, QUIET), target, StorageError)
    assert "has 4.0 KiB free" in full_disk and "needs 0 B" not in full_disk


def test_an_interrupt_leaves_nothing(made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = made()
    monkeypatch.setattr("sft.weights.import_hf._write_common", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt):
        import_hf(source, tmp_path / "there", QUIET)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def imported(made: Make, tmp_path: Path) -> Path:
    import_hf(made(), tmp_path / "imported", QUIET)
    return tmp_path / "imported"


def export_refused(source: Path, **options: Any) -> str:
    target = source.parent / "back"
    return refused(lambda: export_hf(source, target, QUIET, **options), target)


def test_a_checkpoint_that_cannot_tell_its_model(imported: Path, tmp_path: Path) -> None:
    (imported / "hf").rename(tmp_path / "elsewhere")
    assert f"{imported / 'hf'} has no config.json" in export_refused(imported)
    assert "has no config.json" in export_refused(imported, like=tmp_path)
    export_hf(imported, tmp_path / "back", QUIET, like=tmp_path / "elsewhere")
    assert same(tensors(tmp_path / "source"), tensors(tmp_path / "back"))


def test_a_damaged_file_of_the_original(imported: Path) -> None:
    hf.change(imported / "hf", rms_norm_eps=1e-5)
    assert f"{imported}/hf is damaged: {imported}/hf/config.json has " in export_refused(imported)
    (imported / "hf" / "source.json").write_text("{}")
    assert f"{imported}/hf/source.json is damaged" in export_refused(imported)


def test_a_checkpoint_of_another_model(imported: Path) -> None:
    (imported / "hf" / "source.json").unlink()  # a folder with config.json alone is left
    hf.change(imported / "hf", num_hidden_layers=3, intermediate_size=48, layer_types=..., rms_norm_eps=1e-5)
    assert "norm_epsilon is 1e-06 in the checkpoint, but 1e-05 in config.json" in export_refused(imported)
    hf.change(imported / "hf", rms_norm_eps=1e-6, tie_word_embeddings=True)
    told = export_refused(imported)
    assert "surplus: output_layer.weight" in told
    assert "different shape: decoder.layers.mlp.linear_fc1.weight is 2 x 128 x 32, expected 3 x 96 x 32" in told
    hf.change(imported / "hf", vocab_size=385)
    assert "different shape: embedding.word_embeddings.weight is 384 x 32, expected 385 x 32" in export_refused(
        imported
    )


def test_a_flipped_bit_is_found(imported: Path) -> None:
    path = imported / "iter_0000000" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert "is damaged" in export_refused(imported) and "SHA-256" in export_refused(imported)


def test_no_checkpoint(tmp_path: Path) -> None:
    assert "the path has no checkpoint, because it does not exist in " in export_refused(tmp_path / "nowhere")
    (tmp_path / "hf").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "hf" / name).touch()
    assert "hf is a Hugging Face folder already" in export_refused(tmp_path / "hf")


def test_a_checkpoint_whose_router_is_another_one(made: Make, tmp_path: Path) -> None:
    """Shapes do not show how many experts a token chooses, or how their weights are computed."""
    source = made("mixtral")
    before = architecture(read(source), "config.json")
    right = {"moe_router_topk": 2, "moe_router_pre_softmax": False}
    assert _model({"args": Namespace(**right)}, before, source, QUIET)[0] == before.model
    with pytest.raises(CheckpointError) as error:
        _model({"args": Namespace(moe_router_topk=1, moe_router_pre_softmax=True)}, before, source, QUIET)
    assert "moe_router_topk is 1 in the checkpoint, but 2 in config.json" in str(error.value)
    assert "moe_router_pre_softmax is True in the checkpoint, but False in config.json" in str(error.value)
