"""Packed weights of compressed-tensors: written out, compared with that package, read in parts, refused if damaged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sft.console import QUIET
from sft.errors import CheckpointError
from sft.hf.packed import PackedFolder
from sft.hf.quantization import scheme_of
from sft.hf.source import open_source
from sft.low_bits.grouped import unpacked
from sft.weights.export.export_hf import export_hf
from sft.weights.import_hf import import_hf
from tests.unit.fixtures import hf, packed, vision
from tests.unit.fixtures.hf import Make, tensors
from tests.unit.fixtures.packed import FORMS

SIZES: dict[str, Any] = dict(dtype=torch.bfloat16, hidden_size=64, intermediate_size=96)
E4M3 = torch.float8_e4m3fn


@pytest.fixture
def quantised(made: Make) -> Callable[[str], tuple[Path, dict[str, torch.Tensor]]]:
    """A folder of a small Qwen3 in a format, and the values of its weights."""

    def make(name: str) -> tuple[Path, dict[str, torch.Tensor]]:
        source = made("qwen3", **SIZES)
        meant = packed.quantise(source, name)
        return hf.change(source, quantization_config=FORMS[name].config()), meant

    return make


def octets(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.uint8)


# The tensors that compressed-tensors 0.20 makes of a weight of one row or more, and the values that it reads from them.
WRITTEN: dict[str, tuple[str, dict[str, Any], dict[str, torch.Tensor], list[float]]] = {
    "int4": (
        "int4",
        dict(group_size=4),
        {
            "weight_packed": torch.tensor([[99575604], [2093521241]], dtype=torch.int32),
            "weight_scale": torch.tensor([[0.25, 0.125], [0.5, 0.3]], dtype=torch.bfloat16),
            "weight_shape": torch.tensor([2, 8]),
        },
        [-1, -1.25, -0.25, -0.5, 0.875, 0.75, -0.375, -1, 0.5, -1.5, 0.5, 0.5, 0, 1.203125, 1.203125, -0.30078125],
    ),
    "int4 with zero points": (
        "int4 with zero points",
        dict(group_size=4),
        {
            "weight_packed": torch.tensor(
                [[12800], [33028], [21286], [14779], [38534], [40089], [43693], [53161], [16]], dtype=torch.int32
            ),
            "weight_scale": torch.full((9, 1), 0.25, dtype=torch.bfloat16),
            "weight_zero_point": torch.tensor([[-324508640], [0]], dtype=torch.int32),
            "weight_shape": torch.tensor([9, 4]),
        },
        [
            *(0, 0, 0.5, 0.75, 0.5, -0.5, -0.25, 1.5, 0.5, -0.5, -0.25, 0.25, 1.25, 1.25, 0.75, -0.75, -0.5, 0),
            *(-0.5, 0.25, -0.25, -0.25, 0.5, -0.25, 0.25, -0.5, -0.5, -0.5, -1.25, -1, 0.25, -0.5, 0, 0.25, 0, 0),
        ],
    ),
    "int8 by row": (
        "int8 by row",
        {},
        {
            "weight_packed": torch.tensor([[1432816656, 6342101], [-1886305904, 1958264454]], dtype=torch.int32),
            "weight_scale": torch.tensor([[0.25], [0.5]], dtype=torch.bfloat16),
            "weight_shape": torch.tensor([2, 8]),
        },
        [-28, -29, -6.25, -10.75, 21.25, 17.25, -8, -32, 8, -31.5, 8.5, 7.5, 3, 31, 28, -6],
    ),
    "nvfp4": (
        "nvfp4",
        {},
        {
            "weight_packed": octets(126, 43, 119, 119, 110, 89, 210, 15),
            "weight_scale": octets(121).view(E4M3),
            "weight_global_scale": torch.tensor([1000.3]),
        },
        [
            *(-1.1484375, 1.7265625, -0.431640625, 0.287109375, 1.7265625, 1.7265625, 1.7265625, 1.7265625),
            *(-1.1484375, 1.1484375, -0.1435546875, 0.86328125, 0.287109375, -0.86328125, -1.7265625, 0),
        ],
    ),
    "mxfp4": (
        "mxfp4",
        {},
        {
            "weight_packed": octets(163, 20, 168, 36, 204, 48, 173, 84, 223, 25, 64, 33, 178, 195, 145, 26),
            "weight_scale": octets(126),
        },
        [
            *(0.75, -0.5, 1, 0.25, -0.0, -0.5, 1, 0.5, -1, -1, 0, 0.75, -1.5, -0.5, 1, 1.5),
            *(-3, -1.5, -0.25, 0.25, 0, 1, 0.25, 0.5, 0.5, -0.75, 0.75, -1, 0.25, -0.25, -0.5, 0.25),
        ],
    ),
    "mxfp8": (
        "mxfp8",
        {},
        {
            "weight": octets(*(110, 229, 112, 99, 174, 233, 113, 101), *([0] * 24)).view(E4M3),
            "weight_scale": octets(120),
        },
        [0.875, -0.40625, 1, 0.34375, -0.00341796875, -0.5625, 1.125, 0.40625, *([0] * 24)],
    ),
}


def read(
    folder: Path, stored: dict[str, torch.Tensor], config: dict[str, Any], dtype: str = "bfloat16"
) -> torch.Tensor:
    """The values of the weight `a.weight` of a folder with the tensors `stored`.  dtype: type of the model"""
    hf.write(folder, {}, {f"a.{name}": tensor for name, tensor in stored.items()})
    scheme, problems = scheme_of({"quantization_config": config, "dtype": dtype})
    assert scheme is not None and not problems
    opened = PackedFolder(folder, scheme)  # type: ignore[arg-type]
    assert opened.tensors.keys() == {"a.weight"}
    found = torch.empty(opened.tensors["a.weight"].shape, dtype=getattr(torch, dtype))
    opened.read_rows("a.weight", 0, found)
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])  # products are rounded to bf16 in any case
@pytest.mark.parametrize("case", WRITTEN)
def test_numbers_written_out(tmp_path: Path, case: str, dtype: str) -> None:
    name, changes, stored, expected = WRITTEN[case]
    assert read(tmp_path / "model", stored, FORMS[name].config(**changes), dtype).flatten().tolist() == expected


def test_the_first_number_is_in_the_lowest_bits() -> None:
    words = torch.tensor([[0x000000F1]], dtype=torch.int32)
    assert unpacked(words, 4).tolist() == [[-7, 7, -8, -8, -8, -8, -8, -8]]
    assert unpacked(words, 8).tolist() == [[113, -128, -128, -128]]


@pytest.mark.parametrize("name", FORMS)
def test_every_number_is_the_stored_one_times_its_scale(
    quantised: Callable[[str], tuple[Path, dict[str, torch.Tensor]]], name: str
) -> None:
    source, meant = quantised(name)
    opened = open_source(source)
    assert opened.describe().endswith(f"14 tensors stored in {FORMS[name].shown}")
    assert not any("packed" in one or "scale" in one or "shape" in one or "zero" in one for one in opened.manifest)
    assert len(meant) == 14
    for full, expected in meant.items():
        rows, columns = expected.shape
        assert (opened.manifest[full].shape, opened.manifest[full].dtype) == ((rows, columns), "BF16")
        assert b"".join(opened.stored.raw_blocks(full, 999)) == expected.view(torch.uint8).numpy().tobytes()
        part = torch.empty(5, 27)  # every second row from one that begins no word of zero points; columns across groups
        opened.stored.read_rows(full, 13, part, step=2, first_column=11)
        assert torch.equal(part, expected[13:23:2, 11:38].float())
        part = torch.empty(6, 7)  # the same of the transpose
        opened.stored.read_rows(full, 9, part, transposed=True, step=3, first_column=17)
        assert torch.equal(part, expected[17:24, 9:27:3].T.float())


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("seed", range(3))
def test_compressed_tensors_reads_the_same_numbers(tmp_path: Path, name: str, seed: int) -> None:
    """All exponents, and scales that round in every step."""
    form = FORMS[name]
    stored, _ = packed.random_weight((72, 160), name, seed)
    if stored["weight_scale"].dtype == torch.uint8:
        stored["weight_scale"] = torch.arange(72 * 5, dtype=torch.int32).to(torch.uint8).reshape(72, 5)
    if name.startswith("int") and seed == 1:
        stored["weight_scale"] = stored["weight_scale"].float() * 1.0001  # fp32 scales
    found = read(tmp_path / "model", stored, form.config())
    assert torch.equal(found.view(torch.int16), of_the_package(stored, name).view(torch.int16))


@pytest.mark.parametrize("case", WRITTEN)
def test_compressed_tensors_reads_the_numbers_written_out(case: str) -> None:
    name, changes, stored, expected = WRITTEN[case]
    assert of_the_package(stored, name, **changes).flatten().tolist() == expected


def of_the_package(stored: dict[str, torch.Tensor], name: str, **changes: Any) -> torch.Tensor:
    """The values of a weight that compressed-tensors computes, in bf16."""
    pytest.importorskip("compressed_tensors", reason="an optional package: pip install compressed-tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(**(dict(symmetric=True) | FORMS[name].weights | changes))
    compressor = BaseCompressor.get_value_from_registry(FORMS[name].format)
    values = compressor.decompress(dict(stored), QuantizationScheme(targets=["Linear"], weights=args))["weight"]
    return torch.as_tensor(values.bfloat16())


def test_an_import_and_an_export_of_kimi_hold_plain_numbers(tmp_path: Path) -> None:
    """Experts in INT4, as in Kimi-K2.5; everything else, the tower included, stays as it was."""
    source = vision.save(tmp_path / "source", "kimi_k25", moe_intermediate_size=32, dtype=torch.bfloat16)
    meant = packed.quantise(source, "int4", ".experts.")
    others = {name: tensor for name, tensor in tensors(source).items() if ".experts." not in name}
    content = hf.released("kimi_k2_5")["text_config"]["quantization_config"]
    text = json.loads((source / "config.json").read_text())["text_config"]
    hf.change(source, text_config=text | {"quantization_config": content})
    import_hf(source, tmp_path / "there", QUIET)
    export_hf(tmp_path / "there", tmp_path / "back", QUIET)
    assert len(meant) == 24 and hf.same(tensors(tmp_path / "back"), meant | others)
    assert "quantization_config" not in (tmp_path / "back" / "config.json").read_text()
    vision.load(tmp_path / "back")


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name,changes,told",
    [
        ("int4", dict(num_bits=3), 'num_bits = 3, type = "int", strategy = "group", group_size = 32'),
        ("int4", dict(num_bits=True), "num_bits = true"),
        ("int4", dict(group_size=0), "group_size = 0"),
        ("int4", dict(group_size=None), 'strategy = "group", symmetric = true in format = "pack-quantized"'),
        ("int4", dict(actorder="group"), 'actorder = "group"'),
        ("int4", dict(strategy="tensor_group"), 'strategy = "tensor_group"'),
        ("int4", dict(symmetric=None), 'strategy = "group", group_size = 32 in format'),
        ("int8 by row", dict(group_size=128), 'strategy = "channel", group_size = 128'),
        ("nvfp4", dict(group_size=32), "group_size = 32"),
        ("nvfp4", dict(symmetric=False), "symmetric = false"),
        ("mxfp4", dict(type="int"), 'type = "int"'),
        (
            "mxfp8",
            dict(group_size=16),
            'group_size = 16, symmetric = true in format = "mxfp8-quantized", which are not',
        ),
    ],
)
def test_descriptions_that_are_refused(name: str, changes: dict[str, Any], told: str) -> None:
    assert told in hf.refusal(hf.llama(quantization_config=FORMS[name].config(**changes)))


@pytest.mark.parametrize("named", [["pack-quantized"], {"a": 1}, 4, None, "marlin-24"], ids=str)
def test_formats_that_are_refused(named: Any) -> None:
    config = FORMS["int4"].config() | {"format": named}
    assert f"in format = {json.dumps(named)}, which are not" in hf.refusal(hf.llama(quantization_config=config))


def test_groups_of_several_formats_are_refused() -> None:
    config = FORMS["int4"].config()
    config["config_groups"]["group_1"] = FORMS["nvfp4"].config()["config_groups"]["group_0"] | {
        "format": "nvfp4-pack-quantized"
    }
    assert "groups of different formats, blocks or sizes" in hf.refusal(hf.llama(quantization_config=config))


LAST = "model.layers.1.mlp.down_proj"
Stored = dict[str, torch.Tensor]


@pytest.mark.parametrize(
    "name,change",
    [
        ("int4", lambda s: {"weight_scale": s["weight_scale"][:, :-1]}),  # two groups of 32 for 96 columns
        ("int4", lambda s: {"weight_scale": s["weight_scale"].T}),
        ("int4", lambda s: {"weight_scale": s["weight_scale"].to(E4M3)}),
        ("int4", lambda s: {"weight_scale": None}),
        ("int4", lambda s: {"weight_shape": None}),
        ("int4", lambda s: {"weight_shape": torch.tensor([64, 96, 1])}),
        ("int4", lambda s: {"weight_packed": s["weight_packed"][:-1]}),
        ("int4", lambda s: {"weight_packed": s["weight_packed"].to(torch.int64)}),
        ("int4", lambda s: {"weight_packed": s["weight_packed"][:, :0]}),
        ("int4", lambda s: {"weight": torch.zeros(64, 96, dtype=torch.bfloat16)}),  # the weight twice
        ("int4 with zero points", lambda s: {"weight_zero_point": None}),
        ("int4 with zero points", lambda s: {"weight_zero_point": s["weight_zero_point"][:-1]}),
        ("int8 by row", lambda s: {"weight_scale": s["weight_scale"].repeat(1, 2)}),
        ("nvfp4", lambda s: {"weight_global_scale": None}),
        ("nvfp4", lambda s: {"weight_global_scale": torch.ones(64)}),
        ("nvfp4", lambda s: {"weight_scale": s["weight_scale"].float()}),
        ("mxfp4", lambda s: {"weight_scale": s["weight_scale"][:, :1]}),
        ("mxfp8", lambda s: {"weight_scale": s["weight_scale"].to(torch.int8)}),
        ("mxfp8", lambda s: {"weight_scale": None}),
    ],
)
def test_weights_without_usable_scales_are_refused(
    quantised: Callable[[str], tuple[Path, Stored]], name: str, change: Callable[[Stored], dict[str, Any]]
) -> None:
    source, _ = quantised(name)
    stored = {full.removeprefix(f"{LAST}."): one for full, one in tensors(source).items() if full.startswith(LAST)}
    changed = {full: None if one is None else one.contiguous() for full, one in change(stored).items()}
    hf.rewrite(source, **{f"{LAST}.{full}".replace(".", "/"): one for full, one in changed.items()})
    with pytest.raises(CheckpointError, match=r"weights without usable scales .*\.down_proj\.weight.* \(layer 1\)"):
        open_source(source)


def test_a_shape_that_the_weight_does_not_have_is_refused(
    quantised: Callable[[str], tuple[Path, Stored]], tmp_path: Path
) -> None:
    """weight_shape is read with the values, because `sft check` may know only the headers of files."""
    source, _ = quantised("int4")
    hf.rewrite(source, **{f"{LAST}.weight_shape".replace(".", "/"): torch.tensor([64, 95])})
    with pytest.raises(CheckpointError, match=r"down_proj.weight_shape is \[64, 95\], but .* give \[64, 96\]"):
        import_hf(source, tmp_path / "there", QUIET)
    assert not (tmp_path / "there").exists()


def test_zero_points_of_symmetric_weights_are_refused(quantised: Callable[[str], tuple[Path, Stored]]) -> None:
    source, _ = quantised("int4 with zero points")
    hf.change(source, quantization_config=FORMS["int4 with zero points"].config(symmetric=True))
    with pytest.raises(CheckpointError, match=r"surplus: model\.layers\.\*\..*weight_zero_point"):
        open_source(source)
