"""Adapters of every Linear of a model equal, on ranks, a transformers model into whose weights they are merged.

transformers computes token losses and the gradients of merged weights in float64; the gradients of an adapter's factors
follow from those.  test_lora.py compares models with those of peft.
"""

from pathlib import Path

import pytest
import torch

from sft.hf.architecture import architecture, read
from sft.weights.lora.parameters import STACKED
from sft.weights.lora.targets import kinds_of
from tests.cards import Measured
from tests.ranks.hf_cases import CASES
from tests.ranks.hf_comparison import Models, form_of, layout_of, saved_once
from tests.ranks.hf_models import (
    GRADIENT_TOLERANCE,
    SHORT,
    backward,
    check_token_losses,
    expected_losses,
    in_float64,
    packs_of,
    stored_gradients,
)
from tests.ranks.peft_models import (
    SMALL,
    VALUES,
    factors,
    gradients_of_factors,
    lora_recipe,
    losses_and_gradients,
    merged,
    shapes_of,
    whole,
)
from tests.ranks.pool import Ranks
from tests.ranks.scenarios import check_parameters

DENSE, MIXTURE = "tp_cp+selective", "tp_cp_ep2+selective"
QUICK = {
    "olmo_hybrid": DENSE,
    "kimi_linear": MIXTURE,
    "ling": "tp_virtual",
    "muse_glimmer": DENSE,
    "laguna": MIXTURE,
    "nemotron_h": MIXTURE,
    "granite_hybrid_dense": "pp",
}
_MORE_DENSE = (
    *("arcee", "ernie", "hunyuan", "exaone4_5", "granite_swa", "mistral", "qwen2", "seed oss", "ministral", "cwm"),
    *("granite", "smollm3", "olmo2", "olmo3", "ministral3", "exaone4", "gemma", "gemma3", "gemma3_vision"),
    *("gemma4_unified_text", "gemma4_unified", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5_vision", "mistral3"),
    "mistral3/ministral3",
)
_MORE_MIXTURES = (
    *("granitemoehybrid", "mistral4", "afmoe", "mimo", "step", "ernie_moe", "hunyuan_moe", "solar_open", "hy_v3"),
    *("exaone_moe", "dots1", "granitemoe_swa", "kimi_k25", "qwen3 moe", "mixtral", "granitemoe", "qwen2_moe", "olmoe"),
    *("glm4_moe", "minimax_m2", "gemma4_vision", "qwen3_vl_moe", "qwen3_5_moe_text", "qwen3_5_moe_vision"),
    *("mistral3/mistral4", "kimi_k2", "step3p5"),
)
MORE = {**dict.fromkeys(_MORE_DENSE, DENSE), **dict.fromkeys(_MORE_MIXTURES, MIXTURE)}
DELTA_RULE = ("olmo_hybrid", "kimi_linear", "ling", "qwen3_5_moe_text", "qwen3_5_moe_vision", "qwen3_5_vision")
KINDS = ("linear", "expert", STACKED)  # what can have an adapter


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return saved_once(tmp_path_factory, {name: CASES[name].model for name in (*QUICK, *MORE)})


@pytest.mark.card("LoRA")
@pytest.mark.parametrize(
    "name,layout", [*QUICK.items(), *(pytest.param(*case, marks=pytest.mark.grid) for case in MORE.items())]
)
def test_adapters_of_every_linear(
    ranks: Ranks, models: Models, tmp_path: Path, measured: Measured, name: str, layout: str
) -> None:
    source, packs = models(name).source, packs_of(SHORT)
    found = architecture(read(source), str(source))
    kinds = kinds_of(found.family, found.model)
    stacks = ["experts.gate_up_proj", "experts.down_proj"]
    stacks = [stack for stack in stacks if any(stack in name for name, kind in kinds.items() if kind == STACKED)]
    excluded = sorted({".".join(name.split(".")[-2:]) for name, kind in kinds.items() if kind not in KINDS})
    adapted = lora_recipe(source, ["all-linear", *["experts.*"] * ("expert" in kinds.values())], stacks)
    adapted += [f"lora.exclude=[{', '.join(excluded)}]"]
    (shapes,) = ranks(1).run(shapes_of, adapted)
    values = factors(shapes, SMALL if name in DELTA_RULE else VALUES)
    form = form_of(CASES[name].model["family"])
    exact = in_float64(form.load(merged(source, tmp_path / "merged", values), dtype=torch.float64))
    _, count = backward(exact, [sample for pack in packs for sample in pack])
    expected = gradients_of_factors(stored_gradients(exact), values)

    world_size, overrides = layout_of(layout)
    recipe = [*adapted, *overrides]
    results = ranks(world_size).run(losses_and_gradients, recipe, str(source), values, packs)
    check_token_losses([result["losses"] for result in results], expected_losses(exact, packs), packs)
    measured(check_parameters(whole(results, "gradients"), expected, GRADIENT_TOLERANCE), GRADIENT_TOLERANCE)
