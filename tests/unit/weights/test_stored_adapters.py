"""Adapters are read from a checkpoint by the names of their Linears; adapters of experts are parts of stacked
tensors."""

from pathlib import Path

import pytest
import torch

from sft.errors import CheckpointError
from sft.weights.export.stored_adapters import A, B, StoredAdapters
from sft.weights.torch_dist import TorchDistReader, TorchDistWriter

DENSE, EXPERTS = "adapter.layers.0.q_proj", "adapter.layers.0.experts.*.up_proj"
FACTORS = {
    f"{DENSE}{A}": torch.randn(2, 3),
    f"{DENSE}{B}": torch.randn(5, 2),
    f"{EXPERTS}{A}": torch.randn(4, 2, 3),
    f"{EXPERTS}{B}": torch.randn(4, 7, 2),
    "optimizer.state.exp_avg.adapter.layers.0.q_proj.lora_A.weight": torch.randn(2, 3),
}


def stored(folder: Path, factors: dict[str, torch.Tensor]) -> StoredAdapters:
    """Stores each tensor in two chunks, as two ranks would."""
    folder.mkdir()
    writer = TorchDistWriter(folder)
    for key, tensor in factors.items():
        for first, chunk in zip((0, len(tensor) // 2), (tensor[: len(tensor) // 2], tensor[len(tensor) // 2 :])):
            writer.write_chunk(key, tensor.shape, [first] + [0] * (tensor.dim() - 1), chunk)
    writer.finish()
    return StoredAdapters(TorchDistReader(folder))


def test_every_linear_has_its_factors(tmp_path: Path) -> None:
    adapters = stored(tmp_path / "checkpoint", FACTORS)
    experts = {f"layers.0.experts.{i}.up_proj": (7, 3) for i in range(4)}
    assert adapters.shapes == {"layers.0.q_proj": (5, 3), **experts} and adapters.dtype is torch.float32
    for factor in (A, B):
        assert torch.equal(adapters.read("layers.0.q_proj", factor), FACTORS[f"{DENSE}{factor}"])
        for i, name in enumerate(experts):
            assert torch.equal(adapters.read(name, factor), FACTORS[f"{EXPERTS}{factor}"][i])


def test_a_factor_without_its_partner(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds adapter.layers.0.q_proj.lora_A.weight, but not .*lora_B.weight"):
        stored(tmp_path / "checkpoint", {f"{DENSE}{A}": FACTORS[f"{DENSE}{A}"]})
