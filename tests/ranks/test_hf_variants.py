"""A model computes the same as transformers with the same files, on every layout: token losses and gradients.

transformers makes and saves the models, and computes the expected losses and gradients.  After plain models with scaled
positions and experts come families with other parts: multipliers, layers without rotary positions, norms after
attention and MLP, norms across heads, queries scaled by position, shared experts, linear and latent attention.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sft.batch import Sample
from tests.ranks import scenarios
from tests.ranks.hf_comparison import (
    LAYOUTS,
    LINEAR_SEED,
    Case,
    Models,
    compare_gradients,
    compare_token_losses,
    layout_of,
    pairs,
    saved_once,
    skewed_packs,
)
from tests.ranks.hf_models import TOKEN_LOSS_TOLERANCE, load
from tests.ranks.pool import Ranks
from tests.unit.fixtures import hf

# With two stages, and with four virtual stages, each stage begins with another kind of layer.
FOUR_LAYERS = dict(num_hidden_layers=4, no_rope_layers=[1, 0, 0, 1])
FOUR_KINDS = dict(
    num_hidden_layers=4, layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
)
ORIGINAL = 64  # context before scaling; samples of 200 tokens are longer


def rope(kind: str, theta: float, **more: float) -> dict[str, Any]:
    original = {} if kind == "linear" else {"original_max_position_embeddings": ORIGINAL}
    return {"rope_type": kind, "rope_theta": theta, **original, **more}


CASES: dict[str, Case] = {
    "llama": Case(dict(family="llama", rms_norm_eps=1e-5), losses="cp", gradients="one", more_losses="one tp_whole pp"),
    "llama all heads": Case(
        dict(family="llama", num_key_value_heads=8, tied=True), losses="one tp_whole", more_losses="cp pp"
    ),
    "mistral": Case(dict(family="mistral"), losses="pp", gradients="one", more_losses="one cp tp_whole"),
    "qwen2": Case(dict(family="qwen2"), losses="cp", gradients="one", more_losses="one tp_whole pp"),
    "qwen3 tied": Case(dict(family="qwen3", tied=True), losses="tp_whole", gradients="one", more_losses="one cp pp"),
    # The settings of the models that Qwen released.
    "qwen3 moe": Case(
        dict(family="qwen3_moe", norm_topk_prob=True),
        losses="ep",
        gradients="one cp_ep",
        more_losses="one cp_ep tp_ep pp",
        more_gradients="ep",
    ),
    "qwen3 moe, weights of the softmax": Case(
        dict(family="qwen3_moe", tied=True), losses="one cp_ep", more_losses="ep tp_ep pp"
    ),
    "mixtral": Case(
        dict(family="mixtral"),
        losses="tp_ep",
        gradients="one ep",
        more_losses="one ep cp_ep pp",
        more_gradients="cp_ep",
    ),
    "seed oss": Case(dict(family="seed_oss"), losses="one pp", more_losses="cp tp_whole"),
    "phi 4": Case(dict(family="phi3", rms_norm_eps=1e-5), losses="one cp", more_losses="tp_whole pp"),
    "linear positions": Case(
        dict(family="llama", rope_parameters=rope("linear", 1e4, factor=4.0)),
        losses="tp_whole",
        more_losses="one cp pp",
    ),
    "llama3 positions": Case(
        dict(
            family="llama", rope_parameters=rope("llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
        ),
        losses="pp",
        more_losses="one cp tp_whole",
    ),
    "yarn": Case(
        dict(family="qwen2", rope_parameters=rope("yarn", 1e6, factor=4.0)), losses="cp", more_losses="one tp_whole pp"
    ),
    "yarn with everything set": Case(
        dict(
            family="llama",
            rope_parameters=rope("yarn", 1e4, factor=4.0, beta_fast=8.0, beta_slow=0.5, attention_factor=1.3),
        ),
        losses="tp_whole",
        more_losses="one cp pp",
    ),
    "granite": Case(dict(family="granite"), losses="one tp", more_losses="cp", gradients="tp_cp+selective"),
    "granite_tied": Case(dict(family="granite", tied=True), losses="pp"),
    "arcee": Case(
        dict(family="arcee", attention_bias=True, mlp_bias=True),
        losses="cp",
        more_losses="one tp pp",
        gradients="tp_whole+full",
        more_gradients="one tp_cp+selective pp_dp tp_tiles",
    ),
    "smollm3": Case(
        dict(family="smollm3", tied=True, **FOUR_LAYERS), losses="pp", more_losses="one tp", more_gradients="tp_virtual"
    ),
    "smollm3_yarn": Case(
        dict(family="smollm3", rope_parameters=rope("yarn", 1e4, factor=4.0), **FOUR_LAYERS),
        losses="cp",
        gradients="tp_virtual",
    ),
    # Windows shorter and longer than documents and chunks; each of two stages has layers of both kinds.
    "qwen2_windows": Case(
        dict(family="qwen2", use_sliding_window=True, sliding_window=11, max_window_layers=1),
        losses="one",
        more_losses="tp_whole_cp+full",
        more_gradients="tp_whole_cp+full",
    ),
    "qwen3_windows": Case(
        dict(family="qwen3", use_sliding_window=True, sliding_window=60, **FOUR_KINDS),
        losses="cp",
        more_losses="pp tp_cp+selective",
        gradients="tp_cp+selective",
    ),
    "qwen3_moe_windows": Case(
        dict(family="qwen3_moe", use_sliding_window=True, sliding_window=11, norm_topk_prob=True),
        losses="cp_ep",
        more_losses="tp_ep",
        gradients="tp_cp_ep+selective",
    ),
    "exaone4_windows": Case(
        dict(family="exaone4", sliding_window=11, **FOUR_KINDS),
        losses="tp_cp+selective",
        more_losses="pp",
        gradients="tp_virtual",
    ),
    # The config names a window, but no layer has one; then no layer has rotary positions.
    "exaone4_unrotated": Case(
        dict(family="exaone4", sliding_window=11, layer_types=["full_attention"] * 2), losses="one"
    ),
    "olmo2": Case(
        dict(family="olmo2"),
        losses="one tp",
        more_losses="cp pp tp_whole tp_tiles",
        gradients="tp_cp+selective",
        more_gradients="tp_whole_cp+full",
    ),
    "olmo3": Case(
        dict(family="olmo3", **FOUR_KINDS), losses="cp", more_losses="tp pp one", gradients="tp_cp+selective"
    ),
    "gemma": Case(dict(family="gemma", tied=True), losses="tp", gradients="tp_cp+selective"),
    "cwm": Case(dict(family="cwm"), losses="cp", gradients="tp_cp+selective"),
    "ministral": Case(dict(family="ministral", **FOUR_KINDS), losses="pp"),
    "gemma2": Case(
        dict(family="gemma2", tied=True, num_hidden_layers=4),
        losses="one",
        more_losses="tp_cp+selective",
        gradients="tp_virtual cp4+selective",
        more_gradients="one tp tp_tiles cp_dp tp_dp pp_dp tp_whole_cp+full",
    ),
    "gemma3": Case(
        dict(family="gemma3_text", tied=True, **FOUR_KINDS),
        losses="pp",
        more_losses="cp",
        gradients="tp_cp+selective pp_dp",
        more_gradients="one tp tp_tiles cp_dp tp_dp cp4+selective tp_virtual",
    ),
    "gemma4": Case(
        dict(family="gemma4_text", tied=True, **FOUR_KINDS),
        losses="one",
        gradients="tp_cp+selective pp_dp",
        more_gradients="one tp tp_tiles cp_dp tp_dp cp4+selective tp_virtual",
    ),
    "gemma4_experts": Case(
        dict(family="gemma4_text", **FOUR_KINDS, **hf.GEMMA4_MIXTURE),
        losses="cp_ep",
        gradients="tp_cp_ep+selective",
        more_gradients="one tp_ep cp_dp tp_dp pp_dp tp_virtual",
    ),
    "ministral3": Case(dict(family="ministral3"), losses="one cp", more_losses="tp pp", gradients="tp_cp+selective"),
    "qwen2_moe": Case(
        dict(family="qwen2_moe"), losses="one tp_ep", more_losses="cp_ep pp", gradients="tp_cp_ep+selective"
    ),
    "qwen2_moe_normalised": Case(dict(family="qwen2_moe", norm_topk_prob=True, tied=True), losses="ep"),
    "exaone4": Case(dict(family="exaone4"), losses="tp", more_losses="cp pp"),
    "olmoe": Case(dict(family="olmoe"), losses="tp_ep", more_losses="cp_ep pp"),
    "granitemoe": Case(dict(family="granitemoe", tied=True), losses="ep", more_losses="tp_ep cp pp"),
    "gpt_oss": Case(
        dict(family="gpt_oss", **FOUR_KINDS),
        losses="one",
        more_losses="tp cp pp ep tp_ep cp_ep",
        gradients="tp_virtual tp_cp_ep+selective",
        more_gradients="tp_cp+selective ep pp cp_ep",
    ),
    # With two stages, one has a layer without experts.
    "glm4_moe": Case(
        dict(family="glm4_moe", num_hidden_layers=4),
        losses="one pp",
        more_losses="tp cp ep tp_ep cp_ep",
        gradients="tp_cp_ep+selective tp_virtual",
        more_gradients="one pp_dp",
    ),
    # With two stages, one has a dense layer; a scaled embedding; layers without a window have no positions.
    "afmoe": Case(
        dict(family="afmoe", **FOUR_KINDS),
        losses="one",
        more_losses="tp cp pp ep tp_ep cp_ep",
        gradients="tp_cp_ep+selective tp_virtual",
        more_gradients="one pp_dp cp4+selective cp_dp tp_dp",
    ),
    # With seed 5, gradients of the norms of heads in transformers in fp32 differ by 1.5e-5 from its float64 gradients.
    "laguna": Case(
        dict(family="laguna", seed=7, num_attention_heads_per_layer=[4, 8, 8, 4], **FOUR_KINDS),
        losses="one",
        more_losses="tp cp pp ep",
        gradients="tp_cp_ep+selective tp_virtual",
        more_gradients="one cp4+selective pp_dp cp_ep",
    ),
    "mimo": Case(
        dict(family="mimo_v2_flash", **FOUR_KINDS),
        losses="one",
        more_losses="tp cp pp ep",
        gradients="tp_cp_ep2+selective tp_virtual",
        more_gradients="one cp4+selective pp_dp cp_ep",
    ),
    # The class of transformers with a vision tower, on text.
    "step": Case(
        dict(family="step3p7"),
        losses="one",
        more_losses="tp cp pp ep",
        gradients="tp_cp_ep+selective tp_virtual",
        more_gradients="one cp4+selective pp_dp cp_ep",
    ),
    "ernie": Case(
        dict(family="ernie4_5"),
        losses="tp",
        more_losses="one cp pp",
        gradients="tp_cp+selective",
        more_gradients="one pp_dp",
    ),
    "ernie_moe": Case(
        dict(family="ernie4_5_moe", tied=True),
        losses="one",
        more_losses="tp cp pp ep",
        gradients="tp_cp_ep+selective",
        more_gradients="one pp_dp cp_ep",
    ),
    "hunyuan": Case(
        dict(family="hunyuan_v1_dense"),
        losses="one",
        more_losses="tp cp pp",
        gradients="tp_cp+selective",
        more_gradients="one pp_dp cp4+selective",
    ),
    "hunyuan_moe": Case(
        dict(family="hunyuan_v1_moe"),
        losses="tp_ep",
        more_losses="one tp cp pp ep",
        gradients="cp_ep+selective",
        more_gradients="one tp_cp_ep+selective pp_dp",
    ),
    "minimax_m2": Case(
        dict(family="minimax_m2"),
        losses="tp_ep",
        more_losses="one tp cp pp ep cp_ep",
        gradients="tp_cp_ep+selective",
        more_gradients="one cp_dp",
    ),
    "solar_open": Case(
        dict(family="solar_open"),
        losses="one",
        more_losses="tp cp pp ep tp_ep cp_ep",
        gradients="tp_cp_ep+selective",
        more_gradients="one pp_dp cp4",
    ),
    "hy_v3": Case(
        dict(family="hy_v3", num_hidden_layers=4),
        losses="one",
        more_losses="tp cp pp ep tp_ep cp_ep",
        gradients="tp_virtual",
        more_gradients="one tp_cp_ep+selective pp_dp cp4",
    ),
    # The layers of the two kinds of attention are not those of the two kinds of MLP.
    "exaone_moe": Case(
        dict(family="exaone_moe", mlp_layer_types=["dense"] * 2 + ["sparse"] * 2, **FOUR_KINDS),
        losses="one",
        more_losses="tp cp pp ep tp_ep cp_ep",
        gradients="tp_cp_ep+selective",
        more_gradients="one tp_virtual pp_dp cp4",
    ),
    "llama_biased": Case(
        dict(family="llama", attention_bias=True, mlp_bias=True), losses="tp", gradients="tp_whole_cp+full"
    ),
    "granitemoehybrid": Case(
        dict(family="granitemoehybrid", time_step_limit=(0.01, 0.3)),
        gradients="tp_cp_ep2+selective",
        more_losses="one tp cp ep",
        more_gradients="one cp4 pp_dp",
    ),
    # No experts, and attention with rotary positions.
    "granite_hybrid_dense": Case(
        dict(family="granitemoehybrid", tied=True, num_local_experts=0, position_embedding_type="rope"),
        losses="pp",
        more_gradients="one tp_cp+selective",
    ),
    "nemotron_h": Case(
        dict(family="nemotron_h"),
        losses="pp",
        more_losses="one tp cp cp4 ep tp_ep cp_ep",
        gradients="tp_cp_ep+selective tp_virtual",
        more_gradients="one tp_ep cp+selective cp4 ep pp cp_ep+full pp_dp tp_pp+full tp_dp cp_dp dp_sharded",
    ),
    # Layers of both kinds; keys and values have unequal widths, and each key head has two value heads.
    "qwen3_5_text": Case(
        dict(family="qwen3_5_text", seed=LINEAR_SEED),
        losses="one",
        more_losses="tp_whole+full dp+selective pp cp4+selective tp_cp",
        gradients="tp_whole+full cp4+selective tp_virtual+selective",
        more_gradients="one dp+selective pp tp_cp",
    ),
    "qwen3_next": Case(
        dict(family="qwen3_next", seed=LINEAR_SEED),
        losses="one",
        more_losses="dp+selective pp cp4+selective tp_cp_ep2+selective",
        gradients="tp_cp_ep2+selective",
        more_gradients="one dp+selective pp cp4+selective",
    ),
    "qwen3_5_moe_text": Case(
        dict(family="qwen3_5_moe_text", seed=LINEAR_SEED),
        more_losses="one dp+selective pp cp4+selective tp_cp_ep2+selective",
        gradients="pp",
        more_gradients="one dp+selective cp4+selective tp_cp_ep2+selective",
    ),
    # Beta reaches 2; layers with and without linear attention have norms at other places.
    "olmo_hybrid": Case(
        dict(family="olmo_hybrid", seed=3),
        losses="one",
        more_losses="tp_whole+full dp+selective pp cp4+selective tp_cp",
        gradients="tp_cp tp_virtual+selective",
        more_gradients="one tp_whole+full dp+selective pp cp4+selective",
    ),
    "olmo_hybrid, no positions": Case(
        dict(family="olmo_hybrid", seed=3, rope_parameters=dict(rope_type="default", rope_theta=None)),
        losses="cp",
    ),
    "deepseek": Case(
        dict(family="deepseek_v3"),
        losses="one",
        gradients="cp+selective tp_cp_ep tp_pp+selective",
        more_gradients="one tp ep one+selective pp dp_sharded cp4 tp_cp+full tp4 cp_dp tp_dp pp_dp cp_ep+selective "
        "tp_ep",
    ),
    "kimi_linear": Case(
        dict(family="kimi_linear", seed=LINEAR_SEED),
        losses="one",
        more_losses="cp+selective",
        gradients="tp_cp_ep2+selective",
        more_gradients="one tp cp+full cp4+selective pp ep dp_sharded tp_virtual tp_pp",
    ),
    "ling": Case(
        dict(family="bailing_hybrid", seed=LINEAR_SEED),
        losses="one",
        more_losses="cp+selective",
        gradients="tp_virtual",
        more_gradients="one tp cp+full cp4+selective pp ep tp_cp_ep2+selective",
    ),
    "moonlight": Case(
        dict(
            family="deepseek_v3",
            q_lora_rank=None,
            rms_norm_eps=1e-2,
            n_group=1,
            topk_group=1,
            rope_parameters=dict(rope_type="default", rope_theta=5e4),
        ),
        losses="cp+selective",
        gradients="one+selective tp_ep pp_cp+full",
        more_gradients="pp dp_sharded one cp+selective tp cp4 tp4 tp_cp+full tp_pp+selective cp_dp",
    ),
    "flash": Case(
        dict(family="glm4_moe_lite"),
        gradients="cp_ep+selective",
        more_gradients="one tp cp+selective pp dp_sharded ep tp_cp_ep",
    ),
    "mistral4": Case(
        dict(family="mistral4"),
        losses="one",
        gradients="tp_cp_ep pp_cp+full",
        more_gradients="one tp ep cp+selective pp dp_sharded cp4 tp_dp cp_ep+selective tp_ep",
    ),
    # A latent has 84 elements; keys and values of a rank have 136 elements with tp 1, and 68 with tp 2.
    "wide": Case(
        dict(family="deepseek_v3", kv_lora_rank=80, rope_interleave=False, first_k_dense_replace=0),
        more_losses="tp_cp+full",
        gradients="tp_cp+full tp_dp",
        more_gradients="one cp+selective tp tp_pp+selective",
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return saved_once(tmp_path_factory, {name: case.model for name, case in CASES.items()})


@pytest.mark.parametrize("name,layout", pairs(CASES, "losses"))
def test_every_token_has_the_loss_that_transformers_gives_it(
    ranks: Ranks, models: Models, name: str, layout: str
) -> None:
    compare_token_losses(ranks, models(name), layout_of(layout), skewed_packs())


@pytest.mark.parametrize("name,layout", pairs(CASES, "gradients"))
def test_loss_and_every_gradient_are_those_of_transformers(
    ranks: Ranks, models: Models, name: str, layout: str
) -> None:
    compare_gradients(ranks, models(name), layout_of(layout), skewed_packs()[:2])


def statistics(overrides: list[str], folder: str, sample: Sample) -> Any:
    """The log-sum-exp and entropy of each token of one document; needs pp 1."""
    with scenarios.running(overrides) as engine:
        load(engine, folder)
        microbatch = scenarios.microbatch_of(engine, [sample])
        everywhere = replace(microbatch, loss_weights=torch.ones_like(microbatch.loss_weights))
        ((_, rows),) = engine.measure([everywhere], forward_only=True)
        assert rows.lse is not None and rows.entropy is not None
        return rows.lse.numpy(), rows.entropy.numpy()


@pytest.mark.parametrize("impl", ["fused", "chunked", "full"])
def test_entropy_and_z_loss_are_those_of_the_divided_logits(ranks: Ranks, models: Models, impl: str) -> None:
    model, (sample,) = models("granite"), skewed_packs()[3]
    world_size, layout = LAYOUTS["tp"]
    loss = [f"loss.impl={impl}", "loss.chunk_size=null", "loss.entropy=true", "loss.z_loss_coef=1e-3"]
    with torch.no_grad():
        logits = model.model(input_ids=torch.from_numpy(sample.tokens.astype(np.int64))[None]).logits[0]
    logprobs = logits.log_softmax(-1)
    expected = logits.logsumexp(-1), -(logprobs.exp() * logprobs).sum(-1)
    for found in ranks(world_size).run(statistics, [*model.recipe, *layout, *loss], str(model.source), sample):
        for ours, theirs in zip(found, expected):
            np.testing.assert_allclose(ours[: len(sample.tokens)], theirs.numpy(), rtol=0, atol=TOKEN_LOSS_TOLERANCE)
