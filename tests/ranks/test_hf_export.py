"""A model that was trained on any layout is exported whole: transformers and the trainer compute the same losses with
it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from sft.console import QUIET
from sft.hf.source import open_source
from sft.weights import kept
from sft.weights.export.export_hf import export_hf
from tests.ranks.hf_comparison import form_of
from tests.ranks.hf_models import TOKEN_LOSS_TOLERANCE, VISIBLE, check_losses, packs_of, recipe_of
from tests.ranks.layouts import CP, EP, PP, SP, TP
from tests.ranks.pool import Ranks
from tests.ranks.saving import train_and_save
from tests.unit.fixtures import families, hf, vision

# Two large steps make tiny models with linear attention sensitive: single token losses differ from float64 by up to
# 2.4e-5 here, and by up to 1.6e-5 in transformers' fp32.  The root mean square of the differences is equal, 1e-6 to
# 3e-6.
TRAINED_LINEAR_TOLERANCE = 4e-5
CASES: list[Any] = [
    ("qwen3", TP),
    ("llama", CP),
    ("phi3", PP),
    ("qwen3_moe", EP),
    ("gpt_oss", EP),
    ("gemma4_text", TP),
    ("glm4_moe", EP),
    ("deepseek_v3", [*SP, *EP]),
    ("qwen2_5_vl", TP),
    ("qwen3_vl_moe", EP),
    *(pytest.param(family, layout, marks=pytest.mark.grid) for family in hf.FAMILIES for layout in (CP, SP, PP)),
    *(pytest.param(family, EP, marks=pytest.mark.grid) for family in hf.BIASED_FAMILIES if family != "glm4_moe"),
    *(pytest.param(family, layout, marks=pytest.mark.grid) for family in vision.VISION for layout in (CP, SP, PP)),
    *(pytest.param(family, CP, marks=pytest.mark.grid) for family in families.WITHOUT_TYPE),
]


@pytest.mark.card("export")
@pytest.mark.parametrize("family,layout", CASES, ids=lambda v: " ".join(v) if isinstance(v, list) else str(v))
def test_a_trained_model_in_transformers(ranks: Ranks, tmp_path: Path, family: str, layout: list[str]) -> None:
    models = form_of(family)
    source = models.save(tmp_path / "source", family)
    overrides = [*recipe_of(source), "optim.lr=1e-2", "checkpoint.async_save=false", *layout]
    overrides += ["model.moe.bias_update_rate=0.01"] if family in hf.CORRECTED else []
    packs, run = packs_of(), tmp_path / "run"
    kept.keep(open_source(source), run / "hf")
    results = ranks(2).run(train_and_save, overrides, str(source), str(run / "checkpoints"), packs)
    export_hf(run, tmp_path / "exported", QUIET)
    assert told_by_headers(tmp_path / "exported") == told_by_headers(source)

    trained, original = models.load(tmp_path / "exported"), models.load(source)
    tolerance = TRAINED_LINEAR_TOLERANCE if "qwen3_5" in family or family == "qwen3_next" else TOKEN_LOSS_TOLERANCE
    check_losses([result["after"] for result in results], trained, packs, tolerance)
    check_losses([result["before"] for result in results], original, packs)
    before, after = hf.tensors(source), hf.tensors(tmp_path / "exported")
    unchanged = {name for name in before if hf.same({name: before[name]}, {name: after[name]})}
    kept_parts = ("visual", "vision", "projector", "layer_scalar")
    assert unchanged == {name for name in before if any(part in name for part in kept_parts)}
    name = next(name for name in before if "layers.1." in name and name.endswith("norm.weight") and "vis" not in name)
    assert float((before[name] - after[name]).abs().max()) > VISIBLE
    tokens = torch.tensor([[5, 7, 11]])
    assert trained.generate(tokens, max_new_tokens=3, do_sample=False).shape == (1, 6)


def told_by_headers(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """The type and shape of every tensor, as the safetensors library reads them from the headers."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            found |= {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    return found


def test_a_correction_bias_that_moved_is_exported_in_fp32(ranks: Ranks, tmp_path: Path) -> None:
    """Also if the original files hold the bias in bf16, which would round its steps away."""
    source = hf.save(tmp_path / "source", "minimax_m2", dtype=torch.bfloat16)
    overrides = [*recipe_of(source), "checkpoint.async_save=false", "run.precision=bf16"]
    overrides += ["model.moe.bias_update_rate=1e-3", *EP]
    run, packs = tmp_path / "run", packs_of()
    kept.keep(open_source(source), run / "hf")
    ranks(2).run(train_and_save, overrides, str(source), str(run / "checkpoints"), packs)
    export_hf(run, tmp_path / "exported", QUIET)
    before, after = hf.tensors(source), hf.tensors(tmp_path / "exported")
    for name, tensor in before.items():
        is_bias = name.endswith("e_score_correction_bias")
        assert after[name].dtype == (torch.float32 if is_bias else torch.bfloat16), name
        if is_bias:  # after two steps up, two down, or one of each
            moved = ((after[name] - tensor.float()) / 1e-3).round().abs()
            assert set(moved.tolist()) <= {0.0, 1.0, 2.0} and moved.any()
