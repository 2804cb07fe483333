"""A conversion to Megatron and back gives bitwise the same tensors."""

import io
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sft.checkpoint import folders, manifest
from sft.cli import main
from sft.console import QUIET, Console
from sft.hf.architecture import architecture, read
from sft.hf.families import FAMILIES
from sft.hf.source import open_source
from sft.mcore.checkpoint_io import safe_reader
from sft.weights.export.export_hf import _model, export_hf
from sft.weights.import_hf import import_hf
from sft.weights.torch_dist import TorchDistReader, TorchDistWriter
from tests.covering import covering_set
from tests.unit.fixtures import families, hf
from tests.unit.fixtures.hf import Make, same, tensors

WAYS = {"family": [*hf.FAMILIES], "tied": [False, True], "groups": [4, 8], "dtype": [torch.float32, torch.bfloat16]}


def there_and_back(source: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of an import that is exported again."""
    import_hf(source, folder / "there", QUIET)
    export_hf(folder / "there", folder / "back", QUIET)
    return tensors(folder / "back")


# --- there and back ----------------------------------------------------------------------------------------


@pytest.mark.card("conversion")
@pytest.mark.parametrize("case", covering_set(WAYS), ids=lambda case: " ".join(map(str, case.values())))
def test_there_and_back_is_bitwise(made: Make, tmp_path: Path, case: dict[str, Any]) -> None:
    tied = case["tied"] and case["family"] not in hf.UNTIED_FAMILIES
    source = made(case["family"], tied=tied, num_key_value_heads=case["groups"], dtype=case["dtype"])
    before = tensors(source)
    assert ("lm_head.weight" in before) is not tied
    assert {tensor.dtype for tensor in before.values()} == {case["dtype"]}
    assert same(before, there_and_back(source, tmp_path))
    assert (source / "config.json").read_bytes() == (tmp_path / "back" / "config.json").read_bytes()
    hf.load(tmp_path / "back")


# Entries whose models have tensors that are passed through, or types that transformers lacks.
BESIDE = {name: name in ("qwen3_vl_moe", "kimi_k25", "step3p5") for name in FAMILIES if name not in hf.FAMILIES}


@pytest.mark.card("conversion")
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if quick else pytest.mark.grid) for name, quick in BESIDE.items()]
)
def test_there_and_back_with_what_is_passed_through(tmp_path: Path, family: str) -> None:
    source = families.save(tmp_path / "source", family)
    opened, before = open_source(source), tensors(source)
    names = {way: opened.names(way) for way in ("trained", "passed through")}
    assert {*names["trained"], *names["passed through"]} == before.keys() and names["trained"]
    assert bool(names["passed through"]) is (family not in ("kimi_k2", "step3p5"))
    assert same(before, there_and_back(source, tmp_path))


@pytest.mark.parametrize("extra", ["a tied output, stored twice", "frequencies, as old files store them"])
def test_what_no_model_reads_comes_back_too(made: Make, tmp_path: Path, extra: str) -> None:
    source = made("llama", tied=True)
    if extra.startswith("a tied output"):
        hf.rewrite(source, **{"lm_head/weight": tensors(source)["model.embed_tokens.weight"].clone()})
    else:
        hf.rewrite(source, **{f"model/layers/{i}/self_attn/rotary_emb/inv_freq": torch.ones(4) + i for i in (0, 1)})
    assert same(tensors(source), there_and_back(source, tmp_path))


@pytest.mark.parametrize("family", sorted({*hf.LINEAR_FAMILIES[:3], "nemotron_h", *hf.MTP_FAMILIES} - {"solar_open"}))
def test_mtp_comes_back_as_it_was(made: Make, tmp_path: Path, family: str) -> None:
    """Tensors of a layer that no model trains, one of them of another type, are counted and stay unchanged."""
    mtp = {"mtp.fc.weight": torch.randn(32, 64), "mtp.layers.0.mlp.gate.weight": torch.randn(4, 32).bfloat16()}
    if family in hf.MTP_FAMILIES and family != "exaone_moe":  # one layer more than the two of the model
        block = {"eh_proj.weight": torch.randn(32, 64), "mlp.gate.e_score_correction_bias": torch.randn(8)}
        block |= {
            "embed_tokens.weight": torch.randn(301, 32).bfloat16(),
            "self_attn.o_proj.weight": torch.randn(32, 56),
        }
        mtp = {f"model.layers.2.{name}": tensor for name, tensor in block.items()}
    source = hf.rewrite(made(family), **{name.replace(".", "/"): tensor for name, tensor in mtp.items()})
    before = tensors(source)
    assert sorted(open_source(source).names("passed through")) == sorted(mtp)
    assert len(open_source(source).names("trained")) == len(before) - len(mtp)
    after = there_and_back(source, tmp_path)
    assert same(before, after) and same(mtp, {name: after[name] for name in mtp})


def test_padding_of_the_vocabulary_is_zeros_and_stays_behind(made: Make, tmp_path: Path) -> None:
    import_hf(made(), tmp_path / "there", QUIET)
    boxes = TorchDistReader(tmp_path / "there" / "iter_0000000")
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert boxes.shapes[key] == (384, hf.WIDTH)
        assert not boxes.read(key, (301, 0), (83, hf.WIDTH)).any()
    export_hf(tmp_path / "there", tmp_path / "back", QUIET)
    assert tensors(tmp_path / "back")["lm_head.weight"].shape == (301, hf.WIDTH)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_several_files_and_blocks_smaller_than_a_tensor(
    made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The result does not depend on where files and blocks end."""
    monkeypatch.setattr("sft.weights.import_hf.BLOCK_BYTES", 700)  # five rows
    monkeypatch.setattr("sft.weights.export.trained_tensors._WHOLE_TENSOR_BYTES", 0)
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


def test_experts_are_stacked_gate_above_up(made: Make, tmp_path: Path) -> None:
    """Layers are stacked, then experts, in the form that every layout reads; no two experts are equal."""
    source = made("qwen3_moe")
    import_hf(source, tmp_path / "there", QUIET)
    path = tmp_path / "there" / "iter_0000000"
    theirs, boxes, prefix = tensors(source), TorchDistReader(path), "decoder.layers.mlp"
    assert boxes.shapes[f"{prefix}.router.weight"] == (2, 4, 32)
    assert boxes.shapes[f"{prefix}.experts.experts.linear_fc1.weight"] == (2, 4, 48, 32)
    assert boxes.shapes[f"{prefix}.experts.experts.linear_fc2.weight"] == (2, 4, 32, 24)
    assert boxes.shapes["decoder.layers.pre_mlp_layernorm.weight"] == (2, 32)
    assert not any(key.startswith(f"{prefix}.linear_fc") for key in boxes.shapes)
    first = boxes.read(f"{prefix}.experts.experts.linear_fc1.weight", (0, 0, 0, 0), (2, 4, 48, 32))
    second = boxes.read(f"{prefix}.experts.experts.linear_fc2.weight", (0, 0, 0, 0), (2, 4, 32, 24))
    for layer in (0, 1):
        for expert in range(4):
            name = f"model.layers.{layer}.mlp.experts.{expert}"
            assert torch.equal(first[layer, expert, :24], theirs[f"{name}.gate_proj.weight"])
            assert torch.equal(first[layer, expert, 24:], theirs[f"{name}.up_proj.weight"])
            assert torch.equal(second[layer, expert], theirs[f"{name}.down_proj.weight"])
    assert len({matrix.sum().item() for matrix in second.flatten(0, 1)}) == 8
    args = safe_reader.common_state(path)["args"]
    assert (args.num_experts, args.moe_router_topk, args.moe_ffn_hidden_size) == (4, 2, 24)
    assert args.moe_router_pre_softmax is True
    assert {key for key in safe_reader.objects(path) if ".mlp." in key or "pre_mlp" in key} == {
        *(f"decoder.layers.pre_mlp_layernorm._extra_state/shard_{layer}_2" for layer in (0, 1)),
        *(
            f"decoder.layers.mlp.experts.experts.linear_{name}._extra_state/shard_{layer}.{expert}_2.4"
            for name in ("fc1", "fc2")
            for layer in (0, 1)
            for expert in range(4)
        ),
    }


def test_experts_are_read_and_written_one_by_one(made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never all experts of a layer together: they can exceed the machine's memory."""
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
    """Norms in fp32 and matrices in bf16: both types stay, and tensors are aligned to their type."""
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
    assert order == sorted(order, reverse=True) and set(order) == {"F32", "BF16"}  # tensors of wider types come first


def test_the_type_in_config_is_that_of_the_weights(made: Make, tmp_path: Path) -> None:
    """transformers loads in the type of config.json: it would round fp32 weights under `bfloat16` without a message."""
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
    (source / "own.txt").write_text("m")
    (source / "merges.txt").symlink_to("own.txt")
    (source / "modeling_own.py").write_text("raise SystemExit")
    import_hf(source, tmp_path / "there", QUIET)
    shutil.rmtree(source)
    export_hf(tmp_path / "there", tmp_path / "back", QUIET)
    found = {str(path.relative_to(tmp_path / "back")) for path in (tmp_path / "back").rglob("*") if path.is_file()}
    own = {"config.json", "generation_config.json", "model.safetensors", "manifest.json", "merges.txt", "README.md"}
    assert found == own | texts.keys()
    assert all((tmp_path / "back" / name).read_text() == text for name, text in texts.items())
    assert (tmp_path / "back" / "merges.txt").read_text() == "m"


def test_the_checkpoint_is_one(made: Make, tmp_path: Path) -> None:
    """It is the newest checkpoint of its folder, and has the plain values that Megatron-LM reads."""
    source = made("qwen3", dtype=torch.bfloat16)
    import_hf(source, tmp_path / "there", QUIET)
    (path,) = folders.candidates(tmp_path / "there")
    assert path.name == "iter_0000000" and folders.read_pointer(tmp_path / "there") == 0
    args = safe_reader.common_state(path)["args"]
    assert (args.num_layers, args.hidden_size, args.num_query_groups, args.kv_channels) == (2, 32, 4, 8)
    assert args.qk_layernorm and not args.add_qkv_bias and args.bf16 and args.padded_vocab_size == 384
    assert safe_reader.common_state(path)["iteration"] == 0
    attention, norms = (f"self_attention.linear_{name}" for name in ("qkv", "proj")), ("q_layernorm", "k_layernorm")
    modules = [*attention, *(f"self_attention.{name}" for name in norms), "mlp.linear_fc1", "mlp.linear_fc2"]
    assert safe_reader.objects(path) == {"decoder.final_layernorm._extra_state/shard_0_1"} | {
        f"decoder.layers.{module}._extra_state/shard_{layer}_2" for module in modules for layer in (0, 1)
    }


def test_the_manifests_have_a_digest_of_every_file(made: Make, tmp_path: Path) -> None:
    import_hf(made(dtype=torch.bfloat16), tmp_path / "there", QUIET)
    export_hf(tmp_path / "there", tmp_path / "back", QUIET)
    for folder in (tmp_path / "there" / "iter_0000000", tmp_path / "back"):
        written = manifest.read(folder)
        assert written is not None and not manifest.damage(folder, written, verify="full")
        assert sorted(written.files) == manifest.names_in(folder)


# --- model settings of a run --------------------------------------------------------------------------------


def test_model_of_the_recipe_wins_over_config(made: Make) -> None:
    """The values come from the recipe of the run, such as its positions; keys that config.json cannot express are
    reported."""
    source, stream = made("mixtral"), io.StringIO()
    before = architecture(read(source), "config.json")
    recipe = {f"model.{key}": value for key, value in before.values.items()} | {
        "model.rope.base": 5e5, "data.seq_length": 4096, "model.megatron.moe_x": 1,
        "model.moe.capacity_factor": 1.25, "model.moe.aux_loss_coef": 0.01,
    }  # fmt: skip
    model, length = _model({"sft": {"recipe": recipe}}, before, source, Console(0, stream))
    assert (model.rope.base, length) == (5e5, 4096)
    assert (model.moe.num_experts, model.moe.top_k, model.moe.normalize_top_k) == (4, 2, True)
    lost = "WARNING: config.json cannot store megatron.moe_x, moe.capacity_factor, which the run set\n"
    assert stream.getvalue() == lost


# --- the commands ------------------------------------------------------------------------------------------


def test_the_commands(made: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def sft(*words: object) -> tuple[int, str]:
        code = main([*map(str, words)])
        return code, capsys.readouterr().err

    source, there, back = made(), tmp_path / "there", tmp_path / "back"
    capsys.readouterr()  # removes the output of transformers from saving a model
    assert sft("import", source, there) == (0, "")
    (there / "hf").rename(tmp_path / "moved")
    assert sft("export", there, back, "--hf", tmp_path / "moved", "--verify", "size") == (0, "")
    assert same(tensors(source), tensors(back))
    refusal = f"CheckpointError: {there} exists; nothing was written.  Name a folder that does not exist.\n"
    assert sft("import", source, there) == (2, refusal)
    code, refusal = sft("export", there, tmp_path / "other", "run.seed=1")
    assert code == 2 and "unexpected argument run.seed=1" in refusal
