"""Checkpoints with a vision tower, converted to Megatron and back: all tensors equal bit for bit, config.json byte for
byte."""

from pathlib import Path

import pytest
import torch

from sft.console import QUIET
from sft.hf.source import open_source
from sft.mcore.checkpoint_io import safe_reader
from sft.weights.export.export_hf import export_hf
from sft.weights.import_hf import import_hf
from tests.unit.fixtures import hf, vision

CASES = [
    ("qwen2_vl", False, torch.float32),
    ("qwen2_5_vl with flat keys", True, torch.bfloat16),
    ("qwen3_vl", True, torch.float32),
    ("qwen3_vl_moe as released", False, torch.bfloat16),
    ("qwen3_vl_moe", True, torch.float32),
    ("mistral3", False, torch.bfloat16),
    ("mistral3/ministral3", True, torch.float32),
    ("mistral3/mistral4", False, torch.bfloat16),
    ("qwen3_5", False, torch.bfloat16),
    ("muse_glimmer", True, torch.bfloat16),
    ("qwen3_5_moe", False, torch.float32),
    ("kimi_k25", False, torch.bfloat16),
    ("exaone4_5", True, torch.float32),
]


@pytest.mark.parametrize("name,tied,dtype", CASES, ids=lambda value: str(value))
def test_there_and_back_is_bitwise(tmp_path: Path, name: str, tied: bool, dtype: torch.dtype) -> None:
    source = vision.made(tmp_path / "source", name, tied=tied, dtype=dtype)
    if name.startswith("qwen3_5"):
        hf.rewrite(source, **{"mtp/fc/weight": torch.randn(32, 64).to(dtype)})
    before = hf.tensors(source)
    counts = {role: len(open_source(source).names(role)) for role in ("trained", "passed through")}
    towers = [one for one in before if any(part in one for part in ("visual.", "vision_", "projector.", "mtp."))]
    assert counts["passed through"] == len(towers) and sum(counts.values()) == len(before)
    import_hf(source, tmp_path / "there", QUIET)
    assert safe_reader.common_state(tmp_path / "there" / "iter_0000000")["args"].max_position_embeddings == 512
    export_hf(tmp_path / "there", tmp_path / "back", QUIET)
    assert hf.same(before, hf.tensors(tmp_path / "back"))
    assert (source / "config.json").read_bytes() == (tmp_path / "back" / "config.json").read_bytes()
    vision.load(tmp_path / "back")
