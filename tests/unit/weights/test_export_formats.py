"""Exports in quantised formats, read by our readers and by transformers; exports as the source; refusals."""

import io
import json
import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from sft.commands.convert import FORMATS
from sft.config.checkpoint import ExportFormat
from sft.console import QUIET, Console
from sft.errors import CheckpointError, ConfigError, SftError
from sft.hf import safetensors_writer
from sft.hf.source import open_source
from sft.low_bits import fp8, grouped
from sft.low_bits.fp4 import TransposedMxfp4
from sft.weights import kept
from sft.weights.export.export_hf import export_hf
from sft.weights.import_hf import import_hf
from tests.unit.fixtures import fp8 as fp8_models
from tests.unit.fixtures import hf, mxfp4, packed, vision
from tests.unit.fixtures.hf import tensors

WIDE: dict[str, Any] = dict(dtype=torch.bfloat16, hidden_size=128, intermediate_size=256, head_dim=32)
SIZES: dict[str, dict[str, Any]] = {
    "qwen3": WIDE,
    "qwen3_moe": WIDE | dict(moe_intermediate_size=128),
    "gpt_oss": WIDE,
    "deepseek_v3": WIDE | dict(moe_intermediate_size=128, head_dim=...),
}
QWEN3_LINEARS = {
    f"model.layers.{i}.{name}.weight"
    for i in (0, 1)
    for name in (
        *(f"self_attn.{letter}_proj" for letter in "qkvo"),
        *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    )
}
EXPERTS_OF_GPT_OSS = {f"model.layers.{i}.mlp.experts.{part}" for i in (0, 1) for part in ("gate_up_proj", "down_proj")}
NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
IGNORED = ["lm_head", "model.embed_tokens", "model.norm"] + [
    f"model.layers.{i}.{norm}" for i in (0, 1) for norm in NORMS
]


def imported(folder: Path, family: str, **fields: Any) -> Path:
    """A checkpoint with the weights of a random bf16 model, which is in the folder `source`."""
    hf.save(folder / "source", family, **(SIZES[family] | fields))
    import_hf(folder / "source", folder / "there", QUIET)
    return folder / "there"


def export(checkpoint: Path, format: str, **options: Any) -> tuple[Path, str]:
    """An export, and what it said."""
    said, target = io.StringIO(), checkpoint.with_name(f"as {format}")
    export_hf(checkpoint, target, Console(0, said), format=format, **options)
    return target, said.getvalue()


def values(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder as our reader gives them."""
    source = open_source(folder)
    return {name: kept.read_tensor(source, name) for name in source.manifest}


def quantisation(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


# --- what is quantised, and how it is read ---------------------------------------------------------------------------


def meant(format: str, name: str, value: Tensor, largest: Tensor) -> Tensor:
    """The values of a weight after its quantisation.  largest: of the weights with which servers fuse it"""
    if format == "fp8_block":
        return fp8.quantised(value, (128, 128)).values(torch.bfloat16)
    if value.dim() == 3:
        return TransposedMxfp4.quantised(value).values(torch.bfloat16)
    form, group = {"int4": ("pack-quantized", 128), "nvfp4": ("nvfp4-pack-quantized", 16)}.get(
        format, ("mxfp4-pack-quantized", 32)
    )
    whole = grouped.global_scale(largest) if format == "nvfp4" else None
    return grouped.quantised(value, form, 4, group, whole=whole).values(torch.bfloat16)


CASES = [
    *(("qwen3", format) for format in ("fp8_block", "mxfp4", "nvfp4", "int4")),
    ("qwen3_moe", "fp8_block"),
    ("qwen3_moe", "int4"),
    ("gpt_oss", "mxfp4"),
]


@pytest.mark.parametrize("family,format", CASES)
def test_our_reader_and_transformers_read_what_was_quantised(tmp_path: Path, family: str, format: str) -> None:
    checkpoint = imported(tmp_path, family)
    folder, said = export(checkpoint, format)
    source, found = tensors(tmp_path / "source"), values(folder)
    linears = {name for name in source if not torch.equal(source[name], found[name])}
    if family == "qwen3":
        assert linears == QWEN3_LINEARS
    elif family == "gpt_oss":
        assert linears == EXPERTS_OF_GPT_OSS
    else:
        assert len(linears) == 2 * (4 + 4 * 3) and not any(name.endswith("mlp.gate.weight") for name in linears)
    fused = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": ("gate", "up"), "up": ("gate", "up")}
    for name in linears:
        module, _, last = name.removesuffix("_proj.weight").rpartition(".")
        parts = [f"{module}.{part}_proj.weight" for part in fused.get(last, [last])]
        largest = torch.stack(
            [source[part].abs().amax() for part in parts if part in source] or [torch.ones(())]
        ).amax()
        assert torch.equal(found[name], meant(format, name, source[name], largest)), name
    theirs = read_by_transformers(folder, format)
    plain = {name: tensor.contiguous() for name, tensor in found.items()}
    content = {key: v for key, v in json.loads((folder / "config.json").read_text()).items() if "quant" not in key}
    ours = hf.load(hf.write(tmp_path / "plain", content, plain), dtype=torch.bfloat16).state_dict()
    assert hf.same(theirs, dict(ours))
    assert f"{format}: {len(linears)} quantised, relative RMS error" in said


def read_by_transformers(folder: Path, format: str) -> dict[str, Tensor]:
    """The weights of the model that transformers loads and dequantises, in bf16."""
    import transformers

    if quantisation(folder)["quant_method"] == "compressed-tensors":
        pytest.importorskip("compressed_tensors", reason="an optional package: pip install compressed-tensors")
        config: Any = transformers.CompressedTensorsConfig(dequantize=True)
    elif format == "mxfp4":
        config = transformers.Mxfp4Config(dequantize=True)
    else:
        config = transformers.FineGrainedFP8Config(dequantize=True)
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    return dict(model.state_dict())


def test_compressed_tensors_reads_experts_in_nvfp4(tmp_path: Path) -> None:
    """transformers 5.23 reads experts without their global scales, so its values are not compared here."""
    pytest.importorskip("compressed_tensors", reason="an optional package: pip install compressed-tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    folder, _ = export(imported(tmp_path, "qwen3_moe"), "nvfp4")
    stored, found = tensors(folder), values(folder)
    arguments = QuantizationArgs(**quantisation(folder)["config_groups"]["group_0"]["weights"])
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    for expert in range(4):
        module = f"model.layers.1.mlp.experts.{expert}.up_proj"
        state = {name.removeprefix(f"{module}."): tensor for name, tensor in stored.items() if name.startswith(module)}
        theirs = compressor.decompress(state, QuantizationScheme(targets=["Linear"], weights=arguments))["weight"]
        assert torch.equal(theirs.bfloat16(), found[f"{module}.weight"])


def test_config_json_as_servers_read_it(tmp_path: Path) -> None:
    checkpoint = imported(tmp_path, "qwen3")
    described = {
        format: quantisation(export(checkpoint, format)[0]) for format in ("fp8_block", "nvfp4", "int4", "mxfp4")
    }
    assert described["fp8_block"] == dict(
        quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128],
        modules_to_not_convert=sorted(IGNORED),
    )  # fmt: skip
    common = dict(type="float", symmetric=True, dynamic=False, num_bits=4)
    weights = {
        "nvfp4": dict(strategy="tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"),
        "mxfp4": dict(strategy="group", group_size=32, scale_dtype="torch.uint8"),
        "int4": dict(strategy="group", group_size=128, type="int"),
    }
    for format, own in weights.items():
        form = "pack-quantized" if format == "int4" else f"{format}-pack-quantized"
        group = dict(
            targets=["Linear"], weights=common | own, input_activations=None, output_activations=None, format=form
        )
        assert described[format] == dict(
            quant_method="compressed-tensors", format=form, quantization_status="compressed", ignore=sorted(IGNORED),
            config_groups={"group_0": group}, kv_cache_scheme=None,
        )  # fmt: skip


def test_fused_weights_of_nvfp4_have_one_global_scale(tmp_path: Path) -> None:
    """vLLM takes one global scale for q, k and v, and one for gate and up."""
    stored = tensors(export(imported(tmp_path, "qwen3"), "nvfp4")[0])
    scale = {name: float(tensor) for name, tensor in stored.items() if name.endswith("global_scale")}
    at = "model.layers.0.{}_proj.weight_global_scale".format
    assert scale[at("self_attn.q")] == scale[at("self_attn.k")] == scale[at("self_attn.v")]
    assert scale[at("mlp.gate")] == scale[at("mlp.up")]
    assert len(set(scale.values())) == 8  # for each layer: q with k and v, o, gate with up, down


def test_a_linear_that_does_not_fit_keeps_its_type_with_those_of_its_fused_layer(tmp_path: Path) -> None:
    """Keys and values have 64 rows, which are half a block; vLLM needs queries in the same type."""
    folder, said = export(imported(tmp_path, "qwen3", head_dim=16), "fp8_block")
    listed = quantisation(folder)["modules_to_not_convert"]
    kept_in_bf16 = {name for name in listed if "_proj" in name}
    assert kept_in_bf16 == {f"model.layers.{i}.self_attn.{letter}_proj" for i in (0, 1) for letter in "qkv"}
    assert (
        "8 quantised" in said and "6 Linears keep their type, because rows and columns must be multiples of 128" in said
    )
    assert open_source(folder).stored.tensors["model.layers.0.self_attn.q_proj.weight"].dtype == "BF16"


def test_the_card_has_the_errors(tmp_path: Path) -> None:
    checkpoint = imported(tmp_path, "qwen3")
    folder, _ = export(checkpoint, "fp8_block")
    name = "model.layers.1.mlp.down_proj.weight"
    hf.rewrite(tmp_path / "source", **{name.replace(".", "/"): torch.zeros(128, 256, dtype=torch.bfloat16)})
    source, found = tensors(tmp_path / "source"), values(folder)
    relative = {}
    for linear in QWEN3_LINEARS - {name}:
        difference = (found[linear].double() - source[linear].double()).square().sum()
        relative[linear] = float((difference / source[linear].double().square().sum()).sqrt())
    worst = max(relative, key=lambda linear: relative[linear])
    card = (folder / "README.md").read_text()
    assert "## Quantisation" in card and f"| {worst} | {relative[worst]:.4%} |" in card
    assert 0.02 < relative[worst] < 0.04  # half a step of three bits, at most 1/16, on average about 1/38


# --- as the source ---------------------------------------------------------------------------------------------------


def gpt_oss(folder: Path) -> None:
    hf.save(folder, "gpt_oss", dtype=torch.bfloat16, hidden_size=64, intermediate_size=32)
    mxfp4.quantise(folder)


def kimi(folder: Path) -> None:
    vision.save(folder, "kimi_k25", moe_intermediate_size=32, dtype=torch.bfloat16)
    packed.quantise(folder, "int4", ".experts.")
    content = hf.released("kimi_k2_5")["text_config"]["quantization_config"]
    text = json.loads((folder / "config.json").read_text())["text_config"]
    hf.change(folder, text_config=text | {"quantization_config": content})


def of_form(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        hf.save(folder, "qwen3", dtype=torch.bfloat16, hidden_size=64, intermediate_size=96)
        packed.quantise(folder, name)
        hf.change(folder, quantization_config=packed.FORMS[name].config())

    return make


SOURCES: dict[str, Callable[[Path], Any]] = {
    "gpt-oss, MXFP4": gpt_oss,
    "DeepSeek, FP8 blocks": lambda folder: fp8_models.save(folder, "deepseek_v3"),
    "GLM, FP8 rows": lambda folder: fp8_models.save(folder, "glm4_moe"),
    "Kimi, INT4": kimi,
    **{name: of_form(name) for name in packed.FORMS if name != "int4"},
}


@pytest.mark.parametrize("name", SOURCES)
def test_an_untrained_model_is_the_source_byte_for_byte(tmp_path: Path, name: str) -> None:
    SOURCES[name](tmp_path / "source")
    import_hf(tmp_path / "source", tmp_path / "there", QUIET)
    folder, said = export(tmp_path / "there", "as_source")
    assert hf.same(tensors(folder), tensors(tmp_path / "source"))
    assert (folder / "config.json").read_bytes() == (tmp_path / "source" / "config.json").read_bytes()
    assert (
        f"as_source: 0 quantised again, {len(open_source(folder).stored.dequantised)} as the source stores them" in said
    )


@pytest.mark.parametrize("name", SOURCES)
def test_only_changed_tensors_are_quantised_again(tmp_path: Path, name: str) -> None:
    """The weights of the checkpoint differ from those of the source in one tensor."""
    SOURCES[name](tmp_path / "source")
    import_hf(tmp_path / "source", tmp_path / "there", QUIET)
    plain, _ = export(tmp_path / "there", "bf16")
    source = open_source(tmp_path / "source")
    changed = sorted(name for name in source.stored.dequantised if source.manifest[name].role == "trained")[0]
    stored = tensors(plain)
    hf.rewrite(plain, **{changed.replace(".", "/"): (stored[changed].float() * 1.01).bfloat16()})
    import_hf(plain, tmp_path / "trained" / "there", QUIET)
    folder, said = export(tmp_path / "trained" / "there", "as_source", like=tmp_path / "source")
    others, parts = tensors(tmp_path / "source"), set(source.stored.stored_names(changed))
    found = tensors(folder)
    assert found.keys() == others.keys()
    assert {
        full for full in found if not torch.equal(found[full].view(torch.uint8), others[full].view(torch.uint8))
    } <= parts
    error = (values(folder)[changed].float() - tensors(plain)[changed].float()).norm() / tensors(plain)[
        changed
    ].float().norm()
    assert 0 < error < (0.05 if "8" in name else 0.16)
    assert "as_source: 1 quantised again" in said
    assert quantisation(folder) == quantisation(tmp_path / "source") if "Kimi" not in name else True


def test_nvfp4_keeps_the_global_scale_of_fused_weights_or_changes_all_of_them(tmp_path: Path) -> None:
    of_form("nvfp4")(tmp_path / "source")
    import_hf(tmp_path / "source", tmp_path / "there", QUIET)
    plain, _ = export(tmp_path / "there", "bf16")
    q, k = (f"model.layers.0.self_attn.{letter}_proj.weight" for letter in "qk")
    hf.rewrite(plain, **{q.replace(".", "/"): tensors(plain)[q] * 64})
    import_hf(plain, tmp_path / "trained" / "there", QUIET)
    folder, said = export(tmp_path / "trained" / "there", "as_source", like=tmp_path / "source")
    stored = tensors(folder)
    assert torch.equal(stored[f"{q}_global_scale"], stored[f"{k}_global_scale"])
    assert not torch.equal(stored[f"{q}_global_scale"], tensors(tmp_path / "source")[f"{q}_global_scale"])
    assert "as_source: 3 quantised again, 11 as the source stores them" in said
    error = (values(folder)[q].float() - tensors(plain)[q].float()).norm() / tensors(plain)[q].float().norm()
    assert error < 0.15


def test_a_source_that_is_not_quantised_gives_a_plain_export(tmp_path: Path) -> None:
    folder, said = export(imported(tmp_path, "qwen3"), "as_source")
    assert hf.same(tensors(folder), tensors(tmp_path / "source"))
    assert (
        "is not quantised, so the export is not" in said
        and "quantization_config" not in (folder / "config.json").read_text()
    )


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_source_without_its_stored_tensors_is_refused(tmp_path: Path) -> None:
    gpt_oss(tmp_path / "source")
    import_hf(tmp_path / "source", tmp_path / "there", QUIET)
    for file in (tmp_path / "source").glob("*.safetensors"):
        file.rename(tmp_path / file.name)
    with pytest.raises(
        CheckpointError, match="has no model.safetensors or .* Name the folder with its quantised files"
    ):
        export(tmp_path / "there", "as_source")
    assert not list(tmp_path.glob("as as_source*"))
    (tmp_path / "model.safetensors").rename(tmp_path / "source" / "model.safetensors")
    hf.rewrite(tmp_path / "source", **{"model/extra": torch.zeros(2), "model/layers/0/mlp/router/bias": torch.zeros(5)})
    with pytest.raises(CheckpointError):
        export(tmp_path / "there", "as_source")


@pytest.mark.parametrize("format", ["fp8_block", "nvfp4", "int4"])
def test_stacked_experts_have_no_reader(tmp_path: Path, format: str) -> None:
    with pytest.raises(ConfigError, match="does not fit gpt_oss: .*gate_up_proj stores the experts of a layer as one"):
        export(imported(tmp_path, "gpt_oss"), format)
    assert not list(tmp_path.glob("as *"))


def test_a_model_that_fits_nowhere_is_refused(tmp_path: Path) -> None:
    checkpoint = imported(tmp_path, "qwen3", hidden_size=48, intermediate_size=72, head_dim=6)
    with pytest.raises(ConfigError, match="would quantise nothing, because rows and columns must be multiples of 128"):
        export(checkpoint, "fp8_block")


def test_a_type_and_a_quantised_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--dtype float32 is the type of an export that is not quantised"):
        export(imported(tmp_path, "qwen3"), "nvfp4", dtype="float32")


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    hf.save(tmp_path / "source", "qwen3", **WIDE)
    weight = torch.zeros(128, 256, dtype=torch.bfloat16)
    weight[3, 4] = torch.inf
    hf.rewrite(tmp_path / "source", **{"model/layers/0/mlp/down_proj/weight": weight})
    import_hf(tmp_path / "source", tmp_path / "there", QUIET)
    with pytest.raises(CheckpointError, match="layers.0.mlp.down_proj.weight has numbers that are not finite"):
        export(tmp_path / "there", "int4")
    assert not list(tmp_path.glob("as *"))


def test_a_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = imported(tmp_path, "qwen3")
    monkeypatch.setattr(
        "sft.weights.export.export_hf.write_model_card", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        export(checkpoint, "fp8_block")
    assert not list(tmp_path.glob("as *"))


# --- kills -----------------------------------------------------------------------------------------------------------

STRIDE = 11  # events from one kill to the next


def killed_at(number: int, action: Callable[[], object], folder: str) -> bool:
    """Runs an action in a forked process.  SIGKILL ends it at event `number`, from 0, if there are so many: the start
    of a tensor's write, or a file that is opened, made or renamed below a path that begins with `folder`.

    Returns whether it was killed.
    """
    if not (process := os.fork()):
        numbers, bytes_of = count(), safetensors_writer.bytes_of

        def strike() -> None:
            if next(numbers) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        def look(event: str, arguments: tuple[Any, ...]) -> None:
            if event in ("os.mkdir", "os.rename", "open") and str(arguments[0]).startswith(folder):
                strike()

        def noted(tensor: Tensor) -> memoryview:
            strike()
            return bytes_of(tensor)

        safetensors_writer.bytes_of = noted
        sys.addaudithook(look)
        try:
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(process, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def is_whole(folder: Path, expected: dict[str, Tensor]) -> bool:
    """Whether our reader opens a folder.  All tensors are then there."""
    try:
        open_source(folder)
    except SftError:
        return False
    assert hf.same(tensors(folder), expected)
    return True


def test_a_killed_export_leaves_nothing_half_written_and_its_repeat_is_the_same(tmp_path: Path) -> None:
    """The export has two files of tensors and an index."""
    checkpoint = imported(tmp_path, "qwen3")

    def exported() -> Path:
        return export(checkpoint, "nvfp4", shard_bytes=200_000)[0]

    target = exported()
    expected = {path.name: path.read_bytes() for path in target.iterdir()}
    expected_tensors = tensors(target)
    assert len([name for name in expected if name.endswith(".safetensors")]) == 2
    target.rename(tmp_path / "whole")
    opened = []
    for number in count(0, STRIDE):
        if not killed_at(number, exported, f"{target}.tmp-"):
            break
        assert not target.exists()
        [leftover] = tmp_path.glob("as nvfp4.tmp-*") if number else [tmp_path / "none"]
        opened.append(is_whole(leftover, expected_tensors))
        if leftover.exists():
            leftover.rename(tmp_path / f"left by {number}")
    assert {path.name: path.read_bytes() for path in target.iterdir()} == expected
    assert len(opened) > 6 and opened[0] is False and opened[-1] is True


def test_the_command_knows_every_format() -> None:
    assert FORMATS == get_args(ExportFormat)
