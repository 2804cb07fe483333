"""Families whose layers compute more than those of Llama: token losses and gradients are those of transformers.

As in test_hf_convert.py, the models are transformers' own.  They have multipliers, layers without rotary positions,
norms after attention and MLP, norms across heads, queries scaled by position, and a shared expert.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sft.batch import Sample
from tests.ranks import scenarios
from tests.ranks.hf_models import (
    GRADIENT_TOLERANCE,
    MEAN_LOSS_TOLERANCE,
    PACKS,
    TOKEN_LOSS_TOLERANCE,
    Reference,
    backward,
    check_losses,
    check_parameters,
    chunked_gradients,
    in_float64,
    in_stored_names,
    load,
    packed_losses,
    recipe_of,
    stored_gradients,
)
from tests.ranks.pool import RankPool
from tests.unit.fixtures import hf

Ranks = Callable[[int], RankPool]
CP, EP, PP = ["parallel.cp=2"], ["parallel.ep=2"], ["parallel.pp=2"]
TP = ["parallel.tp=2", "parallel.sequence_parallel=true"]
SELECTIVE = ["train.recompute=selective"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "tp": (2, TP),
    "tp_whole": (2, ["parallel.tp=2"]),  # every rank has all tokens between layers
    "tp_tiles": (2, [*TP, "train.mlp_tile=32"]),
    "cp": (2, CP),
    "pp": (2, PP),
    "ep": (2, EP),
    "tp_ep": (2, [*TP, *EP]),
    "cp_ep": (2, [*CP, *EP]),
    "cp4": (4, ["parallel.cp=4", *SELECTIVE]),
    "cp_dp": (4, CP),
    "tp_dp": (4, TP),
    "pp_dp": (4, PP),
    "tp_cp": (4, [*TP, *CP, *SELECTIVE]),
    "tp_whole_cp": (4, ["parallel.tp=2", *CP, "train.recompute=full"]),
    "tp_virtual": (4, [*TP, *PP, "parallel.virtual_stages=2"]),
    # With ep 4 no two ranks hold the same expert, so gradients of experts and of the shared expert have other groups.
    "tp_cp_ep": (4, [*TP, *CP, "parallel.ep=4", *SELECTIVE]),
}
# Of two stages each begins with another kind of layer; of four virtual ones too.
FOUR_LAYERS = dict(num_hidden_layers=4, no_rope_layers=[1, 0, 0, 1])
FOUR_KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
MODELS: dict[str, dict[str, Any]] = {
    "granite": dict(family="granite"),
    "granite_tied": dict(family="granite", tied=True),
    "smollm3": dict(family="smollm3", tied=True, **FOUR_LAYERS),
    "smollm3_yarn": dict(family="smollm3", rope_parameters=YARN, **FOUR_LAYERS),
    # Windows shorter and longer than documents and chunks; of two stages each has a layer of each kind.
    "qwen2_windows": dict(family="qwen2", use_sliding_window=True, sliding_window=11, max_window_layers=1),
    "qwen3_windows": dict(family="qwen3", use_sliding_window=True, sliding_window=60, layer_types=FOUR_KINDS)
    | dict(num_hidden_layers=4),
    "qwen3_moe_windows": dict(family="qwen3_moe", use_sliding_window=True, sliding_window=11, norm_topk_prob=True),
    "exaone4_windows": dict(family="exaone4", sliding_window=11, layer_types=FOUR_KINDS, num_hidden_layers=4),
    # A window that no layer has: then no layer has rotary positions.
    "exaone4_unrotated": dict(family="exaone4", sliding_window=11, layer_types=["full_attention"] * 2),
    "olmo2": dict(family="olmo2"),
    "olmo3": dict(family="olmo3", num_hidden_layers=4, layer_types=FOUR_KINDS),
    "gemma": dict(family="gemma", tied=True),
    "cwm": dict(family="cwm"),
    "ministral": dict(family="ministral", num_hidden_layers=4, layer_types=FOUR_KINDS),
    "gemma2": dict(family="gemma2", tied=True, num_hidden_layers=4),
    "gemma3": dict(family="gemma3_text", tied=True, num_hidden_layers=4, layer_types=FOUR_KINDS),
    "gemma4": dict(family="gemma4_text", tied=True, num_hidden_layers=4, layer_types=FOUR_KINDS),
    "gemma4_experts": dict(family="gemma4_text", num_hidden_layers=4, layer_types=FOUR_KINDS, **hf.GEMMA4_MIXTURE),
    "ministral3": dict(family="ministral3"),
    "qwen2_moe": dict(family="qwen2_moe"),
    "qwen2_moe_normalised": dict(family="qwen2_moe", norm_topk_prob=True, tied=True),
    "exaone4": dict(family="exaone4"),
    "olmoe": dict(family="olmoe"),
    "granitemoe": dict(family="granitemoe", tied=True),
    "gpt_oss": dict(family="gpt_oss", num_hidden_layers=4, layer_types=FOUR_KINDS),
    "glm4_moe": dict(family="glm4_moe", num_hidden_layers=4),  # of two stages one has a layer without experts
    "minimax_m2": dict(family="minimax_m2"),
    "llama_biased": dict(family="llama", attention_bias=True, mlp_bias=True),
}


@dataclass(frozen=True)
class Model(Reference):
    """A model of transformers in the folder `source`, and the recipe of its sizes."""

    source: Path
    recipe: list[str]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def get(name: str) -> Model:
        if name not in made:
            source = hf.save(tmp_path_factory.mktemp("model") / "source", **MODELS[name])
            made[name] = Model(str(source), hf.load(source).train(), source, recipe_of(source))
        return made[name]

    return get


@pytest.fixture(scope="module")
def packs() -> list[list[Sample]]:
    """Samples supervised in their last quarter only: packed, and each alone."""
    corpus = scenarios.SkewedCorpus((200, 37, 64, 5, 90))
    return [[corpus.sample(i) for i in pack] for pack in (*PACKS, (0,), (1,), (2,), (3,), (4,))]


CASES = [
    *[("granite", "one"), ("granite", "tp"), ("granite_tied", "pp")],
    *[("smollm3", "pp"), ("smollm3_yarn", "cp")],
    *[("qwen2_windows", "one"), ("qwen3_windows", "cp"), ("qwen3_moe_windows", "cp_ep"), ("exaone4_windows", "tp_cp")],
    ("exaone4_unrotated", "one"),
    *[("olmo2", "one"), ("olmo2", "tp"), ("olmo3", "cp")],
    *[("gemma", "tp"), ("cwm", "cp"), ("ministral", "pp")],
    *[("gemma2", "one"), ("gemma2", "tp_cp"), ("gemma3", "pp"), ("gemma3", "cp")],
    *[("gemma4", "one"), ("gemma4_experts", "cp_ep")],
    *[("ministral3", "one"), ("ministral3", "cp")],
    *[("qwen2_moe", "one"), ("qwen2_moe", "tp_ep"), ("qwen2_moe_normalised", "ep")],
    *[("exaone4", "tp"), ("olmoe", "tp_ep"), ("granitemoe", "ep"), ("llama_biased", "tp")],
    *[("gpt_oss", "one"), ("glm4_moe", "one"), ("glm4_moe", "pp"), ("minimax_m2", "tp_ep")],
]
GRID = [
    *[("olmo3", "tp"), ("olmo3", "pp"), ("olmo3", "one")],
    *[("qwen2_windows", "tp_whole_cp"), ("qwen3_windows", "pp"), ("exaone4_windows", "pp")],
    *[("qwen3_moe_windows", "tp_ep"), ("qwen3_windows", "tp_cp")],
    *[
        ("granite", "cp"),
        ("smollm3", "one"),
        ("smollm3", "tp"),
        ("olmo2", "cp"),
        ("olmo2", "pp"),
        ("olmo2", "tp_whole"),
    ],
    *[("olmo2", "tp_tiles"), ("ministral3", "tp"), ("ministral3", "pp"), ("qwen2_moe", "cp_ep"), ("qwen2_moe", "pp")],
    *[("exaone4", "cp"), ("exaone4", "pp"), ("olmoe", "cp_ep"), ("olmoe", "pp")],
    *[("granitemoe", "tp_ep"), ("granitemoe", "cp"), ("granitemoe", "pp")],
    *[("gpt_oss", layout) for layout in ("tp", "cp", "pp", "ep", "tp_ep", "cp_ep")],
    *[("glm4_moe", layout) for layout in ("tp", "cp", "ep", "tp_ep", "cp_ep")],
    *[("minimax_m2", layout) for layout in ("one", "tp", "cp", "pp", "ep", "cp_ep")],
]


def in_grid(cases: list[tuple[str, str]]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.grid) for case in cases]


@pytest.mark.parametrize("name,layout", CASES + in_grid(GRID))
def test_every_token_has_the_loss_that_transformers_gives_it(
    ranks: Ranks,
    models: Callable[[str], Model],
    packs: list[list[Sample]],
    name: str,
    layout: str,
) -> None:
    model, (world_size, overrides) = models(name), LAYOUTS[layout]
    results = ranks(world_size).run(packed_losses, model.recipe + overrides, model.folder, packs)
    check_losses(results, model, packs)


MIXED = [
    *[("granite", "tp_cp"), ("smollm3_yarn", "tp_virtual"), ("olmo2", "tp_cp"), ("ministral3", "tp_cp")],
    *[("qwen3_windows", "tp_cp"), ("exaone4_windows", "tp_virtual"), ("qwen3_moe_windows", "tp_cp_ep")],
    *[("olmo3", "tp_cp"), ("llama_biased", "tp_whole_cp")],
    *[("gpt_oss", "tp_virtual"), ("gpt_oss", "tp_cp_ep")],
    *[("gemma", "tp_cp"), ("cwm", "tp_cp")],
    *[("gemma2", "tp_virtual"), ("gemma2", "cp4"), ("gemma3", "tp_cp"), ("gemma3", "pp_dp")],
    *[("gemma4", "tp_cp"), ("gemma4", "pp_dp"), ("gemma4_experts", "tp_cp_ep")],
]
GEMMA = [(name, layout) for name in ("gemma2", "gemma3") for layout in ("one", "tp", "tp_tiles", "cp_dp", "tp_dp")]
GEMMA += [("gemma4", layout) for layout in ("one", "tp", "tp_tiles", "cp_dp", "tp_dp", "cp4", "tp_virtual")]
GEMMA += [("gemma4_experts", layout) for layout in ("one", "tp_ep", "cp_dp", "tp_dp", "pp_dp", "tp_virtual")]
GEMMA += [("gemma2", "pp_dp"), ("gemma2", "tp_whole_cp"), ("gemma3", "cp4"), ("gemma3", "tp_virtual")]


@pytest.mark.parametrize(
    "name,layout",
    [
        *MIXED,
        *[("qwen2_moe", "tp_cp_ep"), ("glm4_moe", "tp_cp_ep"), ("glm4_moe", "tp_virtual"), ("minimax_m2", "tp_cp_ep")],
        *in_grid([("glm4_moe", "one"), ("minimax_m2", "one"), ("glm4_moe", "pp_dp"), ("minimax_m2", "cp_dp")]),
        *in_grid([("gpt_oss", "tp_cp"), ("gpt_oss", "ep"), ("gpt_oss", "pp"), ("gpt_oss", "cp_ep")]),
        *in_grid(GEMMA),
        *in_grid([("olmo2", "tp_whole_cp"), ("smollm3", "tp_virtual"), ("qwen2_windows", "tp_whole_cp")]),
    ],
)
def test_loss_and_every_gradient_are_those_of_transformers(
    ranks: Ranks, models: Callable[[str], Model], packs: list[list[Sample]], name: str, layout: str
) -> None:
    model, together, (world_size, overrides) = models(name), packs[:2], LAYOUTS[layout]
    reference = in_float64(model.model)
    expected_loss, count = backward(reference, [sample for pack in together for sample in pack])
    results = ranks(world_size).run(chunked_gradients, model.recipe + overrides, model.folder, together)
    for result in results:
        assert result["num_tokens"] == count
        assert result["loss"] == pytest.approx(expected_loss, rel=MEAN_LOSS_TOLERANCE)
    check_parameters(in_stored_names(model.source, results), stored_gradients(reference), GRADIENT_TOLERANCE)


def statistics(overrides: list[str], folder: str, sample: Sample) -> Any:
    """Log-sum-exp and entropy of each token of one document; needs pp 1."""
    with scenarios.running(overrides) as engine:
        load(engine, folder)
        microbatch = scenarios.microbatch_of(engine, [sample])
        everywhere = replace(microbatch, loss_weights=torch.ones_like(microbatch.loss_weights))
        ((_, rows),) = engine.measure([everywhere], forward_only=True)
        assert rows.lse is not None and rows.entropy is not None
        return rows.lse.numpy(), rows.entropy.numpy()


@pytest.mark.parametrize("impl", ["fused", "chunked", "full"])
def test_entropy_and_z_loss_are_those_of_the_divided_logits(
    ranks: Ranks, models: Callable[[str], Model], packs: list[list[Sample]], impl: str
) -> None:
    model, (sample,) = models("granite"), packs[3]
    world_size, layout = LAYOUTS["tp"]
    loss = [f"loss.impl={impl}", "loss.chunk_size=null", "loss.entropy=true", "loss.z_loss_coef=1e-3"]
    with torch.no_grad():
        logits = model.model(input_ids=torch.from_numpy(sample.tokens.astype(np.int64))[None]).logits[0]
    logprobs = logits.log_softmax(-1)
    expected = logits.logsumexp(-1), -(logprobs.exp() * logprobs).sum(-1)
    for found in ranks(world_size).run(statistics, [*model.recipe, *layout, *loss], model.folder, sample):
        for ours, theirs in zip(found, expected):
            np.testing.assert_allclose(ours[: len(sample.tokens)], theirs.numpy(), rtol=0, atol=TOKEN_LOSS_TOLERANCE)
