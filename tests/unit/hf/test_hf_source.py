"""Every tensor of a folder is trained, passed through, or refused by name; and the lines of `sft check` about
weights."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sft.cli import main
from sft.config import ModelConfig
from sft.console import QUIET
from sft.errors import CheckpointError, ConfigError
from sft.hf.families import FAMILIES
from sft.hf.model_family import model_family
from sft.hf.source import Expected, open_source
from sft.recipe.load import parse_recipe
from sft.weights.import_hf import import_hf
from sft.weights.initial import describe
from tests.builders import chats
from tests.unit.fixtures import hf
from tests.unit.fixtures.hf import Make, tensors

REST = """
data: {train: chat.jsonl, seq_length: 512, doc_multiple: 32, tokenizer: byte}
train: {num_steps: 5, global_batch_size: 4}
optim: {lr: 1e-3}
run: {dir: run, device: cpu, precision: fp32}
"""


@pytest.fixture
def with_mtp(made: Make, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files that mix layers of the decoder and of MTP, as in AReaL#1403: no file has only one of them."""
    monkeypatch.setitem(FAMILIES, "qwen2", replace(FAMILIES["qwen2"], passed_through=("mtp.*",)))
    source = made("qwen2", shard="20KB")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    for number, file in enumerate(sorted(source.glob("*.safetensors"))):
        extra = {
            f"mtp.layers.0.{number}.weight": torch.randn(3, 5, dtype=torch.bfloat16),
            f"mtp.layers.0.{number}.scale": torch.randn(4).to(torch.float8_e4m3fn),  # a type that is never trained
        }
        save_file({**load_file(file), **extra}, file)
        index["weight_map"] |= dict.fromkeys(extra, file.name)
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    return source


def test_shards_that_mix_what_is_trained_and_what_is_not(with_mtp: Path) -> None:
    stored = tensors(with_mtp)
    source = open_source(with_mtp, "Org/Model")
    assert set(source.manifest) == set(stored)
    assert source.names("passed through") == [name for name in stored if name.startswith("mtp.")] != []
    assert set(source.names("trained")) == {name for name in stored if name.startswith(("model.", "lm_head."))}
    for name, tensor in stored.items():
        role = "passed through" if name.startswith("mtp.") else "trained"
        dtype = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}[tensor.dtype]
        assert source.manifest[name] == Expected(shape=tuple(tensor.shape), dtype=dtype, role=role)
        assert b"".join(source.stored.raw_blocks(name, 1000)) == tensor.contiguous().view(torch.uint8).numpy().tobytes()
    shards = len({tensor.file for tensor in source.stored.tensors.values()})
    # 3 tensors outside of the layers, and 12 in each of two layers: 44,256 fp32 numbers; and two tensors of 34 bytes in
    # each file
    assert source.describe() == f"Org/Model: 27 tensors trained, {2 * shards} passed through; 173 KiB"


@pytest.mark.parametrize(
    "old,new,told",
    [
        ("model.layers.1.mlp.up_proj.weight", None, "missing: model.layers.*.mlp.up_proj.weight (layer 1)"),
        ("model.norm.weight", "model.final_norm.weight", "surplus: model.final_norm.weight"),
        ("model.norm.weight", "mtp.norm.weight", "missing: model.norm.weight"),
        ("mtp.layers.0.0.weight", "draft.0.weight", "surplus: draft.0.weight"),
    ],
)
def test_a_tensor_that_is_dropped_or_renamed_is_named(with_mtp: Path, old: str, new: str | None, told: str) -> None:
    path = with_mtp / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = with_mtp / index["weight_map"].pop(old)
    held = load_file(file)
    tensor = held.pop(old)
    if new is not None:
        held[new] = tensor
        index["weight_map"][new] = file.name
    save_file(held, file)
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as error:
        open_source(with_mtp)
    assert told in str(error.value)


def test_a_tied_output_that_is_stored_is_a_copy(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft.hf.source._COMPARED_BYTES", 4000)  # ten blocks
    source = made(tied=True)
    embedding = tensors(source)["model.embed_tokens.weight"]
    hf.rewrite(source, **{"lm_head/weight": embedding.clone()})
    assert open_source(source).manifest["lm_head.weight"].role == "tied copy"
    changed = embedding.clone()
    changed[300, 31] += 1  # the last element
    hf.rewrite(source, **{"lm_head/weight": changed})
    with pytest.raises(CheckpointError, match="lm_head.weight and model.embed_tokens.weight differ"):
        open_source(source)


def config_of(hf_folder: Path | None, *overrides: str) -> Any:
    named = "" if hf_folder is None else f"hf: {hf_folder}"
    return parse_recipe(f"model: {{{named}}}\n{REST}", "a.yaml", overrides).config


def test_what_a_start_finds(made: Make, tmp_path: Path) -> None:
    source = made("qwen3_moe", dtype=torch.bfloat16)
    import_hf(source, tmp_path / "imported", QUIET)
    checkpoint = tmp_path / "imported" / "iter_0000000"
    assert describe(config_of(source), None).startswith(f"{source}: 45 tensors trained; ")
    assert describe(config_of(source, "model.init_from=random"), None) == "random (seed 1234)"
    rounded = [f"{dtype} is rounded to BF16" for dtype in ("F16", "F32")]
    for dtype, told in ((torch.float16, rounded[0]), (torch.float32, rounded[1]), (torch.bfloat16, "BF16")):
        other = hf.save(tmp_path / str(dtype), "llama", dtype=dtype)
        assert describe(config_of(other, "run.precision=bf16"), None).endswith(told) is (dtype != torch.bfloat16)
    # 3 tensors outside of the layers, and 9 kinds of tensors in layers
    found = describe(config_of(source, f"model.init_from={tmp_path}/imported"), None)
    assert found.startswith(f"{checkpoint}: 12 tensors; ")
    sizes = [f"model.{key}={str(value).lower()}" for key, value in SIZES.items()]
    # the sizes match the table of a family
    typed = describe(config_of(None, *sizes, f"model.init_from={tmp_path}/imported"), 259)
    assert typed == found


SIZES = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "head_dim": 8,
    "qk_norm": True,
    "moe.num_experts": 4,
    "moe.top_k": 2,
    "moe.ffn_hidden_size": 24,
}


def test_the_family_of_a_recipe_with_typed_sizes_has_its_tensors() -> None:
    def family_of(**model: Any) -> str | None:
        sizes = {key: value for key, value in SIZES.items() if "." not in key}
        found = model_family(ModelConfig.model_validate(sizes | model))
        return found and found.model_type

    experts = {"num_experts": 4, "top_k": 2}
    assert family_of() == family_of(num_layers=3) == "qwen3"
    # the norms of this family are other tensors
    assert family_of(norm_placement="post", qk_norm_across_heads=True) == "olmo2"
    assert family_of(moe=experts) == "qwen3_moe"
    routed = experts | {"score_function": "sigmoid", "correction_bias": True}
    assert family_of(moe=routed, qk_norm_across_heads=True) == "minimax_m2"
    assert family_of(moe=experts | {"shared_ffn_hidden_size": 8}) is None


def refused(*arguments: Any) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as error:
        describe(config_of(*arguments), 259)
    return str(error.value)


def test_weights_that_no_run_could_load(made: Make, tmp_path: Path) -> None:
    source = made("qwen3")
    import_hf(source, tmp_path / "imported", QUIET)
    from_imported = f"model.init_from={tmp_path}/imported"
    assert refused(source, f"model.init_from={tmp_path}/none").startswith(
        f"model.init_from = {tmp_path}/none: the path has no checkpoint"
    )
    assert f"{source} is a Hugging Face folder, but must be a Megatron checkpoint" in refused(
        source, f"model.init_from={source}"
    )
    assert f"model.hf={source} model.init_from=null" in refused(source, f"model.init_from={source}")
    assert f"To start from its weights: model.init_from={tmp_path}/imported" in refused(tmp_path / "imported")
    sizes = [f"model.{key}={str(value).lower()}" for key, value in SIZES.items() if "moe" not in key]
    other = refused(None, *sizes, "model.num_layers=3", "model.hidden_size=16", from_imported)
    assert "decoder.layers.mlp.linear_fc1.weight is 2 x 128 x 32, expected 3 x 128 x 16" in other
    assert "missing: decoder.layers.self_attention.linear_qkv.bias" in refused(
        None, *sizes, "model.qk_norm=false", "model.qkv_bias=true", from_imported
    )
    shard = tmp_path / "imported" / "iter_0000000" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"{shard} has " in refused(source, from_imported)
    (source / "model.safetensors").unlink()
    assert f"{source} has no weights" in refused(source)


def test_check_prints_the_weights(
    made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = made("qwen3", shard="20KB")
    monkeypatch.chdir(tmp_path)
    chats(tmp_path, 40)
    (tmp_path / "recipe.yaml").write_text(f"model: {{hf: {source}}}\n{REST}")
    assert main(["check", "recipe.yaml"]) == 0
    assert f"weights {source}: 25 tensors trained; 172 KiB\n" in capsys.readouterr().out
    next(source.glob("*-00002-*")).unlink()
    assert main(["check", "recipe.yaml"]) == 2
    assert "model-00002-of-" in capsys.readouterr().err
