"""FP8 files of DeepSeek-V3, MiniMax-M2 and GLM-4.5: import and export have the dequantised values, and no FP8 tensor is
left."""

import json
from pathlib import Path

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from sft.console import QUIET
from sft.hf.source import open_source
from sft.weights.export.export_hf import export_hf
from sft.weights.import_hf import import_hf
from tests.unit.fixtures import fp8, hf
from tests.unit.fixtures.hf import same, tensors

# A tensor of the layer for multi-token prediction of DeepSeek-V3, which has two layers here.
NEXT_LAYER = {
    "model.layers.2.eh_proj.weight": torch.randn(160, 320).bfloat16(),
    "model.layers.2.mlp.gate.e_score_correction_bias": torch.randn(8),
    "model.layers.2.mlp.experts.7.up_proj.weight": torch.randn(136, 160).bfloat16(),
}


@pytest.mark.parametrize("family", fp8.SIZES)
def test_an_export_of_an_import_has_the_numbers(tmp_path: Path, family: str) -> None:
    source = tmp_path / "source"
    numbers = fp8.save(source, family, NEXT_LAYER if family == "deepseek_v3" else {})
    import_hf(source, tmp_path / "there", QUIET)
    export_hf(tmp_path / "there", tmp_path / "back", QUIET)
    assert same(tensors(tmp_path / "back"), numbers)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back"))
    assert before.pop("quantization_config") == fp8.CONFIGS[family] and after == before
    if family != "deepseek_v3":  # transformers reports its next layer as unexpected
        hf.load(tmp_path / "back")


def test_blocks_are_those_of_transformers(tmp_path: Path) -> None:
    """transformers accepts whole blocks only, so it gets matrices that are padded with zeros to 256 x 384."""
    fp8.save(tmp_path / "source", "deepseek_v3")
    opened, stored = open_source(tmp_path / "source"), tensors(tmp_path / "source")
    scaled = [name for name in stored if f"{name}_scale_inv" in stored]
    assert len(scaled) == 5 * 2 + 3 + 3 + 3 * 8  # attention, a dense MLP, shared experts, experts
    for name in scaled:
        (rows, columns), scale = stored[name].shape, stored[f"{name}_scale_inv"]
        assert rows % 128 and columns % 128
        whole = torch.zeros(scale.shape[0] * 128, scale.shape[1] * 128, dtype=torch.float8_e4m3fn)
        whole[:rows, :columns] = stored[name]
        expected = Fp8Dequantize(None)._dequantize_one(whole, scale, torch.bfloat16)[:rows, :columns]
        found = torch.empty(rows, columns, dtype=torch.bfloat16)
        opened.stored.read_rows(name, 0, found)
        assert torch.equal(found, expected)
