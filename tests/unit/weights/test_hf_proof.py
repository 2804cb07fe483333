"""An export has the names, types and shapes of its original, and proves this from the files that it wrote."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sft.console import QUIET
from sft.errors import CheckpointError
from sft.hf.architecture import read
from sft.weights.export import written_tensors
from sft.weights.export.export_hf import export_hf
from sft.weights.import_hf import import_hf
from tests.unit.fixtures import hf
from tests.unit.fixtures.hf import Make, same, tensors

Tensors = dict[str, torch.Tensor]
UP, NORM, HEAD = "model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"
UNTRAINED = "model.layers.0.self_attn.rotary_emb.inv_freq"  # its family stores this tensor, and does not train it


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensors], Any]) -> None:
    """Makes the export write other tensors than it planned."""
    write = written_tensors.write_tensors

    def write_changed(folder: Path, planned: Tensors, values: Any, *rest: Any, **options: Any) -> Any:
        written = dict(values)
        change(written)
        planned = {name: tensor.to("meta") for name, tensor in written.items()}
        return write(folder, planned, iter(written.items()), *rest, **options)

    monkeypatch.setattr(written_tensors, "write_tensors", write_changed)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda written: written.pop(UP), "missing: model.layers.*.mlp.up_proj.weight (layer 1)"),
        (
            lambda written: written.update({"norm.weight": written.pop(NORM)}),
            f"missing: {NORM}\n  surplus: norm.weight",
        ),
        (lambda written: written.update({HEAD: written["model.embed_tokens.weight"].clone()}), f"surplus: {HEAD}"),
        (lambda written: written.update({NORM: written[NORM].float()}), f"type F32 instead of BF16: {NORM}"),
        (lambda written: written.update({NORM: written[NORM][:-1]}), f"different shape: {NORM} is 31, expected 32"),
        (
            lambda written: written.update({UNTRAINED: written[UNTRAINED] + 1}),
            "tensors that are not trained differ from those of the original: "
            "model.layers.*.self_attn.rotary_emb.inv_freq (layer 0)",
        ),
    ],
    ids=["dropped", "renamed", "a tied head written twice", "widened", "a row less", "changed"],
)
def test_a_loss_is_refused_by_name(
    made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensors], Any], message: str
) -> None:
    source = made("llama", tied=True, dtype=torch.bfloat16)
    hf.rewrite(source, **{UNTRAINED.replace(".", "/"): torch.ones(4)})
    import_hf(source, tmp_path / "imported", QUIET)
    plant(monkeypatch, change)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError) as error:
        export_hf(tmp_path / "imported", tmp_path / "back", QUIET)
    assert message in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def trained_in_fp32(made: Make, tmp_path: Path) -> tuple[Path, Tensors]:
    """An fp32 checkpoint of the bf16 model `source`, and its weights, which bf16 would round."""
    source = made("llama", dtype=torch.bfloat16)
    weights = {name: tensor.float() * 1.001 for name, tensor in tensors(source).items()}
    import_hf(hf.write(tmp_path / "trained", read(source), weights), tmp_path / "imported", QUIET)
    return tmp_path / "imported", weights


def test_a_run_in_fp32_of_a_bf16_model_exports_bf16(trained_in_fp32: tuple[Path, Tensors], tmp_path: Path) -> None:
    checkpoint, weights = trained_in_fp32
    export_hf(checkpoint, tmp_path / "back", QUIET, like=tmp_path / "source")
    assert same(tensors(tmp_path / "back"), {name: tensor.bfloat16() for name, tensor in weights.items()})
    assert read(tmp_path / "back")["dtype"] == "bfloat16"


def test_the_type_that_the_user_asks_for(trained_in_fp32: tuple[Path, Tensors], tmp_path: Path) -> None:
    checkpoint, weights = trained_in_fp32
    export_hf(checkpoint, tmp_path / "back", QUIET, like=tmp_path / "source", dtype="float32")
    assert same(tensors(tmp_path / "back"), weights)
    assert read(tmp_path / "back")["dtype"] == "float32"


def test_numbers_that_the_type_cannot_hold(made: Make, tmp_path: Path) -> None:
    source = made("llama")
    hf.rewrite(source, **{"model/norm/weight": torch.full((32,), 1e6)})
    import_hf(source, tmp_path / "imported", QUIET)
    with pytest.raises(CheckpointError, match="model.norm.weight has numbers that F16, .* cannot hold"):
        export_hf(tmp_path / "imported", tmp_path / "back", QUIET, dtype="float16")
    assert not (tmp_path / "back").exists()


def test_a_model_whose_original_has_other_tensors(made: Make, tmp_path: Path) -> None:
    """The original shows which tensors a server expects."""
    import_hf(made("qwen2"), tmp_path / "imported", QUIET)
    hf.save(tmp_path / "other", "qwen2", num_hidden_layers=3)
    with pytest.raises(CheckpointError, match="different shape: decoder.layers.mlp.linear_fc1.weight is 2 x 128"):
        export_hf(tmp_path / "imported", tmp_path / "back", QUIET, like=tmp_path / "other")
