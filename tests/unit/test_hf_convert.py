"""To Megatron and back is bitwise the same; and what is refused leaves nothing behind."""

import io
import json
import os
import shutil
import struct
import subprocess
import sys
from argparse import Namespace
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from sft.checkpoint import folders, manifest
from sft.config import ModelConfig
from sft.console import Console
from sft.errors import CheckpointError, ConfigError, SftError
from sft.hf.convert.export_hf import export_hf
from sft.hf.convert.import_hf import import_hf
from sft.hf.convert.tensor_check import fold_by_layer
from sft.hf.convert.torch_dist import TorchDistReader, TorchDistWriter
from sft.mcore.checkpoint_io import safe_reader
from tests.unit.fixtures import hf

QUIET = Console(0, io.StringIO())
Make = Callable[..., Path]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, as the safetensors library reads it; none is in two files."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        there = load_file(file)
        assert not found.keys() & there.keys()
        found |= there
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    def raw(tensor: torch.Tensor) -> bytes:
        return tensor.contiguous().view(torch.uint8).numpy().tobytes()

    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and a[name].shape == b[name].shape and raw(a[name]) == raw(b[name]) for name in a
    )


@pytest.fixture
def made(tmp_path: Path) -> Make:
    def make(family: str = "qwen2", **fields: Any) -> Path:
        return hf.save(tmp_path / "source", family, **fields)

    return make


# --- there and back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", [4, 8])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", hf.FAMILIES)
def test_there_and_back_is_bitwise(
    made: Make, tmp_path: Path, family: str, tied: bool, groups: int, dtype: torch.dtype
) -> None:
    source = made(family, tied=tied, num_key_value_heads=groups, dtype=dtype)
    import_hf(source, tmp_path / "there", QUIET)
    export_hf(tmp_path / "there", tmp_path / "back", QUIET)
    before = tensors(source)
    assert ("lm_head.weight" in before) is not tied
    assert {one.dtype for one in before.values()} == {dtype}
    assert same(before, tensors(tmp_path / "back"))
    assert (source / "config.json").read_bytes() == (tmp_path / "back" / "config.json").read_bytes()
    hf.load(tmp_path / "back")


@pytest.mark.parametrize("vocab,padded", [(301, 384), (384, 384), (1, 128)])
def test_padding_of_the_vocabulary_is_zeros_and_stays_behind(
    made: Make, tmp_path: Path, vocab: int, padded: int
) -> None:
    source = made(vocab_size=vocab)
    import_hf(source, tmp_path / "there", QUIET)
    boxes = TorchDistReader(tmp_path / "there" / "iter_0000000")
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert boxes.shapes[key] == (padded, hf.WIDTH)
        assert not boxes.read(key, (vocab, 0), (padded - vocab, hf.WIDTH)).any()
    export_hf(tmp_path / "there", tmp_path / "back", QUIET)
    assert tensors(tmp_path / "back")["lm_head.weight"].shape == (vocab, hf.WIDTH)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "mixtral"])
def test_several_files_and_blocks_smaller_than_a_tensor(
    made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Nothing depends on where files and blocks end."""
    monkeypatch.setattr("sft.hf.convert.import_hf.BLOCK_BYTES", 700)  # five rows
    monkeypatch.setattr("sft.hf.convert.export_hf._WHOLE_TENSOR_BYTES", 0)
    monkeypatch.setattr(TorchDistWriter.__init__, "__defaults__", (50_000,))
    source = made(family, shard="20KB")
    assert len(list(source.glob("*.safetensors"))) > 3
    import_hf(source, tmp_path / "there", QUIET)
    assert len(list((tmp_path / "there" / "iter_0000000").glob("*.distcp"))) > 3
    export_hf(tmp_path / "there", tmp_path / "back", QUIET, shard_bytes=30_000)
    files = sorted(path.name for path in (tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert same(tensors(source), tensors(tmp_path / "back"))
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    for file in files:
        with safe_open(tmp_path / "back" / file, "pt") as opened:
            assert all(index["weight_map"][name] == file for name in opened.keys())
    assert len(index["weight_map"]) == len(tensors(source))
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in tensors(source).values())
    hf.load(tmp_path / "back")


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_are_stacked_gate_above_up(made: Make, tmp_path: Path, family: str) -> None:
    """Layers, then experts, as every layout of ranks reads them; and no two experts are the same."""
    source = made(family)
    import_hf(source, tmp_path / "there", QUIET)
    theirs, boxes = tensors(source), TorchDistReader(tmp_path / "there" / "iter_0000000")
    block = {"qwen3_moe": "mlp", "mixtral": "block_sparse_moe"}[family]
    gate, up, down = {"qwen3_moe": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}[family]
    prefix = "decoder.layers.mlp"
    assert boxes.shapes[f"{prefix}.router.weight"] == (2, 4, 32)
    assert boxes.shapes[f"{prefix}.experts.experts.linear_fc1.weight"] == (2, 4, 48, 32)
    assert boxes.shapes[f"{prefix}.experts.experts.linear_fc2.weight"] == (2, 4, 32, 24)
    assert boxes.shapes["decoder.layers.pre_mlp_layernorm.weight"] == (2, 32)
    assert not any(key.startswith(f"{prefix}.linear_fc") for key in boxes.shapes)
    first = boxes.read(f"{prefix}.experts.experts.linear_fc1.weight", (0, 0, 0, 0), (2, 4, 48, 32))
    second = boxes.read(f"{prefix}.experts.experts.linear_fc2.weight", (0, 0, 0, 0), (2, 4, 32, 24))
    for layer in (0, 1):
        for expert in range(4):
            name = f"model.layers.{layer}.{block}.experts.{expert}"
            assert torch.equal(first[layer, expert, :24], theirs[f"{name}.{gate}.weight"])
            assert torch.equal(first[layer, expert, 24:], theirs[f"{name}.{up}.weight"])
            assert torch.equal(second[layer, expert], theirs[f"{name}.{down}.weight"])
    assert len({one.sum().item() for one in second.flatten(0, 1)}) == 8


def test_experts_are_read_and_written_one_by_one(made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never all of a layer's: they can be larger than a machine's memory."""
    taken: dict[str, int] = {}

    def watch(kind: type, name: str, key_at: int, data_of: Callable[..., torch.Tensor]) -> None:
        work = getattr(kind, name)

        def watched(self: Any, *args: Any) -> Any:
            found = work(self, *args)
            if "experts" in args[key_at]:
                taken[name] = max(taken.get(name, 0), data_of(found, *args).numel())
            return found

        monkeypatch.setattr(kind, name, watched)

    watch(TorchDistWriter, "write_chunk", 0, lambda found, key, shape, offset, part: part)
    watch(TorchDistReader, "read", 0, lambda found, *args: found)
    import_hf(made("qwen3_moe"), tmp_path / "there", QUIET)
    export_hf(tmp_path / "there", tmp_path / "back", QUIET)
    assert taken == {"write_chunk": 48 * 32, "read": 48 * 32}


def test_types_are_kept_tensor_by_tensor(made: Make, tmp_path: Path) -> None:
    """Norms in fp32 beside matrices in bf16: both stay, and numbers lie where their type wants them."""
    source = made(dtype=torch.bfloat16)
    changed = {name: one.float() if "norm" in name else one for name, one in tensors(source).items()}
    save_file(changed, source / "model.safetensors")
    import_hf(source, tmp_path / "there", QUIET)
    export_hf(tmp_path / "there", tmp_path / "back", QUIET)
    assert same(changed, tensors(tmp_path / "back"))
    assert (source / "config.json").read_bytes() == (tmp_path / "back" / "config.json").read_bytes()
    content = (tmp_path / "back" / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    told = json.loads(content[8 : 8 + length])
    del told["__metadata__"]
    assert length % 8 == 0
    order = [one["dtype"] for one in sorted(told.values(), key=lambda one: int(one["data_offsets"][0]))]
    assert order == sorted(order, reverse=True) and set(order) == {"F32", "BF16"}  # the wider ones first


def test_the_type_in_config_is_that_of_the_weights(made: Make, tmp_path: Path) -> None:
    """transformers loads as config.json says: fp32 weights under `bfloat16` would be rounded without a word."""
    source = hf.change(made(), dtype="bfloat16")
    import_hf(source, tmp_path / "there", QUIET)
    export_hf(tmp_path / "there", tmp_path / "back", QUIET)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float32"


def test_what_belongs_to_a_model_goes_along(made: Make, tmp_path: Path) -> None:
    source = made()
    texts = {
        "tokenizer.json": "{}",
        "tokenizer_config.json": '{"a": 1}',
        "chat_template.jinja": "{{ messages }}",
        "additional_chat_templates/tools.jinja": "{{ tools }}",
    }
    for name, text in texts.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    (tmp_path / "blob").write_text("m")
    (source / "merges.txt").symlink_to(tmp_path / "blob")  # as a download has it
    (source / "modeling_own.py").write_text("raise SystemExit")
    import_hf(source, tmp_path / "there", QUIET)
    shutil.rmtree(source)
    (tmp_path / "blob").unlink()
    export_hf(tmp_path / "there", tmp_path / "back", QUIET)
    found = {str(path.relative_to(tmp_path / "back")) for path in (tmp_path / "back").rglob("*") if path.is_file()}
    own = {"config.json", "generation_config.json", "model.safetensors", "manifest.json", "merges.txt"}
    assert found == own | texts.keys()
    assert all((tmp_path / "back" / name).read_text() == text for name, text in texts.items())
    assert (tmp_path / "back" / "merges.txt").read_text() == "m"


def test_the_checkpoint_is_one(made: Make, tmp_path: Path) -> None:
    """The newest of its folder, whole by its manifest, with the plain values that Megatron-LM looks for."""
    source = made("qwen3", dtype=torch.bfloat16)
    import_hf(source, tmp_path / "there", QUIET)
    (path,) = folders.candidates(tmp_path / "there")
    assert path.name == "iter_0000000" and folders.read_pointer(tmp_path / "there") == 0
    written = manifest.read(path)
    assert written is not None and not manifest.damage(path, written, verify="full")
    assert sorted(written.files) == manifest.names_in(path)
    args = safe_reader.common_state(path)["args"]
    assert (args.num_layers, args.hidden_size, args.num_query_groups, args.kv_channels) == (2, 32, 4, 8)
    assert args.qk_layernorm and not args.add_qkv_bias and args.bf16 and args.padded_vocab_size == 384
    assert safe_reader.common_state(path)["iteration"] == 0
    attention, norms = (f"self_attention.linear_{name}" for name in ("qkv", "proj")), ("q_layernorm", "k_layernorm")
    modules = [*attention, *(f"self_attention.{name}" for name in norms), "mlp.linear_fc1", "mlp.linear_fc2"]
    assert safe_reader.objects(path) == {"decoder.final_layernorm._extra_state/shard_0_1"} | {
        f"decoder.layers.{module}._extra_state/shard_{layer}_2" for module in modules for layer in (0, 1)
    }


@pytest.mark.parametrize("family,pre_softmax", [("qwen3_moe", True), ("mixtral", False)])
def test_arguments_of_experts(made: Make, tmp_path: Path, family: str, pre_softmax: bool) -> None:
    """What Megatron-LM reads of a checkpoint about them: four, two for a token, of width 24."""
    import_hf(made(family), tmp_path / "there", QUIET)
    args = safe_reader.common_state(tmp_path / "there" / "iter_0000000")["args"]
    assert (args.num_experts, args.moe_router_topk, args.moe_ffn_hidden_size) == (4, 2, 24)
    assert args.moe_router_pre_softmax is pre_softmax


def test_objects_beside_experts(made: Make, tmp_path: Path) -> None:
    """One for each expert's matrix in the place of one for each layer's, as Megatron's experts name them."""
    import_hf(made("mixtral"), tmp_path / "there", QUIET)
    found = safe_reader.objects(tmp_path / "there" / "iter_0000000")
    assert {key for key in found if ".mlp." in key or "pre_mlp" in key} == {
        *(f"decoder.layers.pre_mlp_layernorm._extra_state/shard_{layer}_2" for layer in (0, 1)),
        *(
            f"decoder.layers.mlp.experts.experts.linear_{name}._extra_state/shard_{layer}.{expert}_2.4"
            for name in ("fc1", "fc2")
            for layer in (0, 1)
            for expert in range(4)
        ),
    }


def test_the_manifest_has_a_digest_of_every_tensor(made: Make, tmp_path: Path) -> None:
    import hashlib

    source = made(dtype=torch.bfloat16)
    import_hf(source, tmp_path / "there", QUIET)
    export_hf(tmp_path / "there", tmp_path / "back", QUIET)
    expected = {
        name: hashlib.sha256(one.view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, one in tensors(source).items()
    }
    for folder in (tmp_path / "there" / "iter_0000000", tmp_path / "back"):
        written = manifest.read(folder)
        assert written is not None and written.facts["tensors"] == expected
        assert not manifest.damage(folder, written, verify="full")


# --- refusals: every one leaves nothing behind -------------------------------------------------------------


def refused(work: Callable[[], object], target: Path, kind: type[SftError] = CheckpointError) -> str:
    before = sorted(target.parent.rglob("*"))
    with pytest.raises(kind) as error:
        work()
    assert sorted(target.parent.rglob("*")) == before
    return str(error.value)


def import_refused(source: Path, kind: type[SftError] = CheckpointError) -> str:
    target = source.parent / "there"
    return refused(lambda: import_hf(source, target, QUIET), target, kind)


def rewrite(source: Path, **changes: torch.Tensor | None) -> Path:
    """Other tensors in the one file, by name with `/` for `.`; None removes one."""
    found: dict[str, torch.Tensor | None] = {**tensors(source)}
    found |= {name.replace("/", "."): one for name, one in changes.items()}
    save_file({name: one for name, one in found.items() if one is not None}, source / "model.safetensors")
    return source


def test_missing_surplus_and_misshapen_tensors_are_told_at_once(made: Make) -> None:
    source = rewrite(
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
        f"{source} does not hold this model:\n"
        "  missing: model.layers.*.mlp.up_proj.weight (layers 0-1)\n"
        "  missing: model.layers.*.self_attn.k_proj.bias (layer 1)\n"
        "  surplus: model.layers.*.mlp.experts.weight (layer 0)\n"
        "  another shape: model.norm.weight is 33, expected 32\n"
        "  of type F64, only F32, F16, BF16 are supported: lm_head.weight"
    )


def test_experts_that_are_missing_surplus_or_misshapen(made: Make) -> None:
    expert = "model/layers/{}/block_sparse_moe/experts/{}/{}/weight".format
    source = rewrite(
        made("mixtral"),
        **{expert(0, 3, "w3"): None, expert(1, 0, "w1"): None, expert(1, 1, "w1"): None},
        **{expert(layer, 4, "w2"): torch.zeros(32, 24) for layer in (0, 1)},
        **{expert(layer, i, "w2"): torch.zeros(32, 23) for layer in (0, 1) for i in range(4)},
        **{"model/layers/0/block_sparse_moe/gate/weight": torch.zeros(5, 32)},
    )
    block = "model.layers.*.block_sparse_moe"
    assert import_refused(source) == (
        f"{source} does not hold this model:\n"
        f"  missing: {block}.experts.*.w1.weight (layer 1; experts 0-1)\n"
        f"  missing: {block}.experts.*.w3.weight (layer 0; expert 3)\n"
        f"  surplus: {block}.experts.*.w2.weight (layers 0-1; expert 4)\n"
        f"  another shape: {block}.gate.weight is 5 x 32, expected 4 x 32 (layer 0)\n"
        f"  another shape: {block}.experts.*.w2.weight is 32 x 23, expected 32 x 24 (layers 0-1; experts 0-3)"
    )


def test_experts_of_two_types(made: Make) -> None:
    """Experts are one tensor of ours: what is said of layers holds for them."""
    half = {"model/layers/1/mlp/experts/2/down_proj/weight": torch.zeros(32, 24, dtype=torch.bfloat16)}
    told = import_refused(rewrite(made("qwen3_moe"), **half))
    assert (
        "of several types, which become one tensor: F32 (model.layers.0.mlp.experts.0.down_proj.weight), BF16 (" in told
    )


def test_one_tensor_of_ours_cannot_have_two_types(made: Make) -> None:
    half = torch.zeros(hf.FFN, hf.WIDTH, dtype=torch.bfloat16)
    told = import_refused(rewrite(made(), **{"model/layers/1/mlp/up_proj/weight": half}))
    assert "of several types, which become one tensor: F32 (model.layers.0.mlp.gate_proj.weight), BF16 (" in told


def test_an_output_that_is_tied_and_stored_twice_is_left_out(made: Make, tmp_path: Path) -> None:
    """As some published files have it; transformers stores it once, too."""
    source = made(tied=True)
    before = tensors(source)
    rewrite(source, **{"lm_head/weight": before["model.embed_tokens.weight"].clone()})
    import_hf(source, tmp_path / "there", QUIET)
    export_hf(tmp_path / "there", tmp_path / "back", QUIET)
    assert same(before, tensors(tmp_path / "back"))


@pytest.mark.parametrize("what", ["one number", "another type", "another shape"])
def test_an_output_that_is_tied_and_another_is_refused(made: Make, what: str) -> None:
    source = made(tied=True)
    head = tensors(source)["model.embed_tokens.weight"].clone()
    if what == "one number":
        head[-1, -1] += 1
    head = head.half() if what == "another type" else head[:-1] if what == "another shape" else head
    told = import_refused(rewrite(source, **{"lm_head/weight": head}))
    assert "surplus: lm_head.weight" in told
    assert "lm_head.weight is another tensor than model.embed_tokens.weight: one is wrong" in told


def test_frequencies_that_old_files_store_are_passed_over(made: Make, tmp_path: Path) -> None:
    source = made("llama")
    before = tensors(source)
    rewrite(source, **{f"model/layers/{i}/self_attn/rotary_emb/inv_freq": torch.zeros(4) for i in (0, 1)})
    import_hf(source, tmp_path / "there", QUIET)
    export_hf(tmp_path / "there", tmp_path / "back", QUIET)
    assert same(before, tensors(tmp_path / "back"))


def test_an_unknown_model_type(made: Make) -> None:
    assert 'model_type = "mamba" is not known' in import_refused(hf.change(made(), model_type="mamba"), ConfigError)


@pytest.mark.parametrize("left", [0, 7, 8, 100, 3000, -1])
def test_a_truncated_file(made: Make, left: int) -> None:
    source = made()
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    assert import_refused(source).startswith(f"{path} is not a whole safetensors file: ")


def test_a_file_that_shrinks_meanwhile(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source = made()

    def shrink(*args: Any, **kwargs: Any) -> None:
        (source / "model.safetensors").write_bytes(b"")

    before = (source / "model.safetensors").stat().st_size
    monkeypatch.setattr("sft.hf.convert.import_hf._check", shrink)
    assert before and "became shorter while model.embed_tokens.weight was read" in import_refused(source)


def header(content: Any, data: bytes = b"") -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + data


def place(*offsets: int, dtype: str = "F32", shape: tuple[int, ...] = (1,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "content,why",
    [
        (header({"a": place(0, 4)}, b"12345"), "file not fully covered (the file has "),
        (header({"a": place(0, 4), "b": place(0, 4)}, b"1234"), "invalid offset for tensor `"),  # either of them
        (header({"a": place(4, 8)}, b"12345678"), "invalid offset for tensor `a`"),
        (header({"a": place(0, 4, shape=(2,))}, b"1234"), "invalid shape, data type, or offset for tensor"),
        (header({"a": place(4, 0)}, b"1234"), "invalid offset for tensor `a`"),
        (header({"a": place(-4, 0)}, b"1234"), "integer `-4`, expected usize"),
        (header({"a": {"dtype": "F32", "shape": [1]}}, b"1234"), "missing field `data_offsets`"),
        (header({"a": place(0, 4, shape=(-1,))}, b"1234"), "integer `-1`, expected usize"),
        (header(b'{"a": {}, "a": {}}'), "missing field `dtype`"),
        (header(b"[1]"), "invalid JSON in header"),
        (header(b"{"), "not a whole safetensors file"),
        (header(b"[" * 100_000), "not a whole safetensors file"),
        (struct.pack("<Q", 1 << 60) + b"{}", "header too large"),
    ],
)
def test_headers_that_lie(made: Make, content: bytes, why: str) -> None:
    source = made()
    (source / "model.safetensors").write_bytes(content)
    assert why in import_refused(source)


def test_a_pipe_is_not_waited_for(made: Make) -> None:
    source = made()
    (source / "model.safetensors").unlink()
    os.mkfifo(source / "model.safetensors")
    assert "model.safetensors is not a whole safetensors file: it is no file" in import_refused(source)


def test_pickles_are_not_opened(made: Make) -> None:
    source = made()
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    assert "pytorch_model.bin, a pickle, which can run any code and is not opened" in import_refused(source)
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
        f"not in the file it names: model.layers.*.mlp.experts.*.up_proj.weight (layer 1; experts 0-99) ({file})."
        in told({**good["weight_map"], **experts})
    )
    assert "names '../secret.safetensors', which is no safetensors file" in told(
        {**rest, first: "../secret.safetensors"}
    )
    assert "gone.safetensors is not a whole safetensors file: No such file" in told({**rest, first: "gone.safetensors"})
    assert "is damaged" in told([1])
    path.write_text(json.dumps(good))
    (source / "model.safetensors").write_bytes(b"")
    assert "has both model.safetensors and model.safetensors.index.json" in import_refused(source)


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
            assert told == f"{target} exists; nothing was written.  Remove it, or name another folder."


def test_a_disk_too_small(made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = made()
    import_hf(source, tmp_path / "imported", QUIET)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, (1 << 30) - 4096, 4096))
    assert "has 4.0 KiB left; nothing was written" in import_refused(source)
    target = tmp_path / "back"
    assert "has 4.0 KiB left" in refused(lambda: export_hf(tmp_path / "imported", target, QUIET), target)


def test_a_disk_that_fills_up(made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = made()
    import_hf(source, tmp_path / "imported", QUIET)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sft.checkpoint.manifest.HashingFile._put", full)
    assert "was not written: [Errno 28] No space left on device" in import_refused(source)
    target = tmp_path / "back"
    assert "No space left" in refused(lambda: export_hf(tmp_path / "imported", target, QUIET), target)


def test_an_interrupt_leaves_nothing(made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = made()
    monkeypatch.setattr(
        "sft.hf.convert.import_hf._write_common", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt):
        import_hf(source, tmp_path / "there", QUIET)
    assert sorted(tmp_path.rglob("*")) == before


# --- refusals of an export ---------------------------------------------------------------------------------


@pytest.fixture
def imported(made: Make, tmp_path: Path) -> Path:
    import_hf(made(), tmp_path / "imported", QUIET)
    return tmp_path / "imported"


def export_refused(source: Path, kind: type[SftError] = CheckpointError, **options: Any) -> str:
    target = source.parent / "back"
    return refused(lambda: export_hf(source, target, QUIET, **options), target, kind)


def test_a_checkpoint_that_cannot_tell_its_model(imported: Path, tmp_path: Path) -> None:
    (imported / "hf").rename(tmp_path / "elsewhere")
    assert f"no config.json in {imported / 'hf'}" in export_refused(imported)
    assert "has no config.json" in export_refused(imported, like=tmp_path)
    export_hf(imported, tmp_path / "back", QUIET, like=tmp_path / "elsewhere")
    assert same(tensors(tmp_path / "source"), tensors(tmp_path / "back"))


def test_a_checkpoint_of_another_model(imported: Path) -> None:
    hf.change(imported / "hf", num_hidden_layers=3, intermediate_size=48, layer_types=..., rms_norm_eps=1e-5)
    assert "norm_epsilon is 1e-06 in the checkpoint, and 1e-05 in config.json" in export_refused(imported)
    hf.change(imported / "hf", rms_norm_eps=1e-6, tie_word_embeddings=True)
    told = export_refused(imported)
    assert "surplus: output_layer.weight" in told
    assert "another shape: decoder.layers.mlp.linear_fc1.weight is 2 x 128 x 32, expected 3 x 96 x 32" in told
    hf.change(imported / "hf", vocab_size=385)
    assert "another shape: embedding.word_embeddings.weight is 384 x 32, expected 385 x 32" in export_refused(imported)


def test_a_flipped_bit_is_found(imported: Path) -> None:
    path = imported / "iter_0000000" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert "is damaged" in export_refused(imported) and "SHA-256" in export_refused(imported)


def test_no_checkpoint(tmp_path: Path) -> None:
    assert "no checkpoint there" in export_refused(tmp_path / "nowhere")


def test_a_part_that_is_missing(tmp_path: Path) -> None:
    writer = TorchDistWriter(tmp_path)
    writer.write_chunk("a", (4, 2), (0, 0), torch.ones(2, 2))
    writer.finish()
    assert TorchDistReader(tmp_path).read("a", (1, 0), (1, 2)).tolist() == [[1.0, 1.0]]
    with pytest.raises(CheckpointError, match="chunks of a are missing"):
        TorchDistReader(tmp_path).read("a", (0, 0), (4, 2))


def test_a_box_of_several_parts(tmp_path: Path) -> None:
    """Rows 1 to 3, columns 1 and 2, of a tensor that was written in quarters."""
    whole = torch.arange(16.0).view(4, 4)
    writer = TorchDistWriter(tmp_path)
    for row in (0, 2):
        for column in (0, 2):
            writer.write_chunk("a", (4, 4), (row, column), whole[row : row + 2, column : column + 2].clone())
    writer.finish()
    assert TorchDistReader(tmp_path).read("a", (1, 1), (3, 2)).tolist() == [[5.0, 6.0], [9.0, 10.0], [13.0, 14.0]]


def test_a_box_in_a_stack_of_experts(tmp_path: Path) -> None:
    """Two layers of three experts in halves, as two tensor-parallel ranks write them; a box may span any of them."""
    whole = torch.arange(2 * 3 * 4 * 2.0).view(2, 3, 4, 2)
    writer = TorchDistWriter(tmp_path)
    for layer in (1, 0):
        for expert in (2, 0, 1):
            for row in (2, 0):
                part = whole[layer : layer + 1, expert : expert + 1, row : row + 2].clone()
                writer.write_chunk("a", (2, 3, 4, 2), (layer, expert, row, 0), part)
    writer.finish()
    boxes = TorchDistReader(tmp_path)
    assert torch.equal(boxes.read("a", (1, 2, 1, 0), (1, 1, 2, 2)), whole[1:, 2:, 1:3])
    assert torch.equal(boxes.read("a", (0, 1, 0, 1), (2, 2, 4, 1)), whole[:, 1:, :, 1:])
    with pytest.raises(CheckpointError, match="chunks of a are missing"):
        boxes.read("a", (1, 3, 0, 0), (1, 1, 4, 2))


def test_a_row_of_a_part_that_is_not_the_first(tmp_path: Path) -> None:
    """That the first part has one row, as every part of a stack has one layer, says nothing of the others."""
    whole = torch.arange(6.0).view(3, 2)
    writer = TorchDistWriter(tmp_path)
    for start, stop in ((0, 1), (1, 3)):
        writer.write_chunk("a", (3, 2), (start, 0), whole[start:stop].clone())
    writer.finish()
    assert torch.equal(TorchDistReader(tmp_path).read("a", (2, 0), (1, 2)), whole[2:])


def test_an_expert_is_not_looked_for_among_all(made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of parts, each compared with thousands, would take minutes."""
    seen: list[int] = []

    def plan(key: str, entry: Any, boxes: Any) -> Any:
        seen.append(len(entry.chunks))
        return create_read_items_for_chunk_list(key, entry, boxes)

    monkeypatch.setattr("sft.mcore.checkpoint_io.chunk_index.create_read_items_for_chunk_list", plan)
    import_hf(made("mixtral"), tmp_path / "there", QUIET)
    export_hf(tmp_path / "there", tmp_path / "back", QUIET)
    assert len(seen) > 16 and set(seen) == {1}


def test_model_of_the_recipe_wins_over_config(imported: Path, tmp_path: Path) -> None:
    """A run tells its own positions; keys that config.json cannot say are told."""
    from sft.hf.architecture import architecture, read
    from sft.hf.convert.export_hf import _model

    before = architecture(read(imported / "hf"), "config.json")
    sizes = {f"model.{key}": value for key, value in before.values.items()}
    recipe = {**sizes, "model.rope.base": 5e5, "model.megatron.moe_x": 1, "data.seq_length": 4096}
    stream = io.StringIO()
    model, length = _model({"sft": {"recipe": recipe}}, before, imported, Console(0, stream))
    assert isinstance(model, ModelConfig) and (model.rope.base, length) == (5e5, 4096)
    assert "WARNING: the run set megatron.moe_x" in stream.getvalue()


def test_a_run_with_experts_tells_what_config_cannot_say(made: Make, tmp_path: Path) -> None:
    from sft.hf.architecture import architecture, read
    from sft.hf.convert.export_hf import _model

    source = made("mixtral")
    before = architecture(read(source), "config.json")
    sizes = {f"model.{key}": value for key, value in before.values.items()}
    recipe = {**sizes, "model.moe.capacity_factor": 1.25, "model.moe.aux_loss_coef": 0.01}
    stream = io.StringIO()
    model, _ = _model({"sft": {"recipe": recipe}}, before, source, Console(0, stream))
    assert (model.moe.num_experts, model.moe.top_k, model.moe.normalize_top_k) == (4, 2, True)
    told = stream.getvalue()
    assert "WARNING: the run set moe.capacity_factor, which config.json cannot say" in told and "aux_loss" not in told


def test_a_checkpoint_whose_router_is_another_one(made: Make, tmp_path: Path) -> None:
    """Shapes do not tell how many experts a token goes to, nor what their weights are."""
    from sft.hf.architecture import architecture, read
    from sft.hf.convert.export_hf import _model

    source = made("mixtral")
    before = architecture(read(source), "config.json")
    right = {"moe_router_topk": 2, "moe_router_pre_softmax": False}
    assert _model({"args": Namespace(**right)}, before, source, QUIET)[0] == before.model
    with pytest.raises(CheckpointError) as error:
        _model({"args": Namespace(moe_router_topk=1, moe_router_pre_softmax=True)}, before, source, QUIET)
    assert "moe_router_topk is 1 in the checkpoint, and 2 in config.json" in str(error.value)
    assert "moe_router_pre_softmax is True in the checkpoint, and False in config.json" in str(error.value)


# --- the tools ---------------------------------------------------------------------------------------------


def tool(name: str, *words: object) -> tuple[int, str, str]:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, str(root / "tools" / f"{name}_hf.py"), *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_tools(made: Make, tmp_path: Path) -> None:
    source, there, back = made(), tmp_path / "there", tmp_path / "back"
    code, out, _ = tool("import", source, there)
    assert code == 0 and f"start a run from it with model.init_from={there}" in out
    (there / "hf").rename(tmp_path / "moved")
    code, out, _ = tool("export", there, back, "--hf", tmp_path / "moved", "--verify", "size")
    assert code == 0 and "config.json, unchanged" in out
    assert same(tensors(source), tensors(back))
    code, _, error = tool("import", source, there)
    assert code == 2 and error.endswith("nothing was written.  Remove it, or name another folder.\n")
    assert error.startswith("CheckpointError: ") and "Traceback" not in error
