"""Dequantised MXFP4 experts of gpt-oss: by hand, compared with transformers, and in imports and exports."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from sft.console import QUIET
from sft.errors import CheckpointError
from sft.hf.source import open_source
from sft.low_bits.fp4 import dequantised
from sft.weights.export.export_hf import export_hf
from sft.weights.import_hf import import_hf
from tests.unit.fixtures import hf
from tests.unit.fixtures.hf import Make, tensors
from tests.unit.fixtures.mxfp4 import quantise


@pytest.fixture
def quantised(made: Make) -> tuple[Path, dict[str, torch.Tensor]]:
    source = made("gpt_oss", dtype=torch.bfloat16, hidden_size=64, intermediate_size=32)
    return source, quantise(source)


def test_bytes_written_out() -> None:
    """The lower four bits of a byte are the first number; the fourth bit of a number is its sign; the scale 127 means
    1."""
    blocks = torch.zeros(1, 16, dtype=torch.uint8)
    blocks[0, 0], blocks[0, 15] = 0x72, 0xFA  # 1.0 and 6.0; -1.0 and -6.0
    for scale, factor in ((127, 1.0), (128, 2.0), (120, 2.0**-7), (0, 2.0**-127)):
        found = dequantised(blocks, torch.tensor([scale], dtype=torch.uint8))
        assert found.tolist() == [1.0 * factor, 6.0 * factor, *[0.0] * 28, -1.0 * factor, -6.0 * factor]


def test_every_number_is_the_stored_one_times_its_scale(quantised: tuple[Path, dict[str, torch.Tensor]]) -> None:
    source, meant = quantised
    opened = open_source(source)
    assert opened.describe().endswith("tensors trained; 224 KiB, 4 tensors stored in MXFP4")
    assert not any(name.endswith(("_blocks", "_scales")) for name in opened.manifest)
    for name, numbers in meant.items():
        expected = numbers.bfloat16()
        assert torch.equal(expected.double(), numbers)  # two bits and an exponent, which bf16 represents exactly
        experts, columns, rows = expected.shape
        assert (opened.manifest[name].shape, opened.manifest[name].dtype) == ((experts, columns, rows), "BF16")
        assert b"".join(opened.stored.raw_blocks(name, 999)) == expected.view(torch.uint8).numpy().tobytes()
        part = torch.empty(5, columns - 10)  # every second row of the transposed matrix, and columns across blocks
        opened.stored.read_rows(name, 3, part, index=(2,), transposed=True, step=2, first_column=7)
        assert torch.equal(part, expected[2].T[3:13:2, 7:-3].float())


def test_transformers_reads_the_same_numbers(quantised: tuple[Path, dict[str, torch.Tensor]]) -> None:
    source, meant = quantised
    stored = tensors(source)
    for name, numbers in meant.items():
        theirs = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        assert torch.equal(theirs, numbers.bfloat16())


def test_an_import_and_an_export_hold_plain_numbers(
    quantised: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    source, meant = quantised
    others = {name: tensor for name, tensor in tensors(source).items() if not name.endswith(("_blocks", "_scales"))}
    import_hf(source, tmp_path / "there", QUIET)
    export_hf(tmp_path / "there", tmp_path / "back", QUIET)
    assert hf.same(tensors(tmp_path / "back"), {name: value.bfloat16() for name, value in meant.items()} | others)
    assert "quantization_config" not in (tmp_path / "back" / "config.json").read_text()
    hf.load(tmp_path / "back")


@pytest.mark.parametrize(
    "change",
    [lambda blocks, scales: (blocks, scales[:, :-1]), lambda blocks, scales: (blocks.bfloat16(), scales)],
    ids=["too few", "another type"],
)
def test_blocks_without_usable_scales_are_refused(
    quantised: tuple[Path, dict[str, torch.Tensor]],
    change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    source, _ = quantised
    name = "model/layers/1/mlp/experts/down_proj"
    stored = tensors(source)
    blocks, scales = change(*(stored[f"{name.replace('/', '.')}_{kind}"] for kind in ("blocks", "scales")))
    hf.rewrite(source, **{f"{name}_blocks": blocks, f"{name}_scales": scales.contiguous()})
    with pytest.raises(CheckpointError, match=r"MXFP4 blocks without usable scales .*down_proj \(layer 1\)"):
        open_source(source)
