"""Latent attention: sizes counted by hand, positions and scale against transformers, gradients, and refusals."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    apply_rotary_pos_emb_interleave,
    yarn_apply_mscale,
    yarn_get_mscale,
)

from sft.config import Config, ModelConfig, RopeConfig
from sft.config.latent_attention import LatentAttentionConfig
from sft.estimate.attention_kernels import uses_portable
from sft.estimate.products import ModelProducts, layer_products
from sft.estimate.saved_by_layer import LayerBytes
from sft.layers.flops import AttentionCost, TrainFlops, num_parameters
from sft.layers.mixers.latent import LatentAttention
from sft.mcore.attention import flash_kernel, rope
from sft.mcore.attention.torch_kernel import TorchKernel
from sft.mcore.backends import selection, transformer_engine
from sft.mcore.checkpoint_io.megatron_arguments import model_arguments
from sft.mcore.latent_attention.shared_latent import Setting, keys_and_values, latent_attention
from sft.parallel.alignment import misfits
from sft.parallel.cp_bytes import CpBytes
from sft.parallel.layout import Layout
from tests.builders import layout_config
from tests.plain_flash import PLAIN as PLAIN_FLASH
from tests.reference_attention import in_one_piece

FLOAT64_TOLERANCE = 1e-12
FP32_TOLERANCE = 1e-6  # of numbers near 1, rounded a few times
DEEPSEEK_V3 = dict(num_layers=61, hidden_size=7168, ffn_hidden_size=18432, num_attention_heads=128) | dict(
    latent_attention=dict(kv_lora_rank=512, q_lora_rank=1536),
    rope=dict(scaling="yarn", factor=40.0, original_max_position=4096, mscale_all_dim=1.0, attention_factor=1.0),
)
MOONLIGHT = dict(num_layers=27, hidden_size=2048, ffn_hidden_size=11264, num_attention_heads=16) | dict(
    latent_attention=dict(kv_lora_rank=512)
)


def model(sizes: dict[str, Any], **changes: Any) -> ModelConfig:
    return ModelConfig.model_validate({"hidden_size": 8, "ffn_hidden_size": 8, **sizes, **changes})


def with_tp(sizes: ModelConfig, tp: int, **sections: Any) -> Config:
    return layout_config(parallel={"tp": tp}, **sections).model_copy(update={"model": sizes})


def sent(config: Config) -> int:
    return LatentAttention(config.model).sent(config)


def test_parameters_and_flops_counted_by_hand() -> None:
    """One dense layer of Moonlight: queries 2048 x 16 x 192, down 2048 x 576, up 512 x 16 x 256, output 16 x 128 x
    2048, MLP 3 x 2048 x 11,264; norms of 2 x 2048 and 512."""
    matrices = 2048 * 3072 + 2048 * 576 + 512 * 4096 + 2048 * 2048 + 3 * 2048 * 11264
    dense = model(MOONLIGHT, num_layers=1, tie_embeddings=True)
    assert num_parameters(dense, 10) == matrices + 2 * 2048 + 512 + 11 * 2048
    assert TrainFlops.of(dense, 0).per_token == 6 * matrices
    # Of each pair of tokens 16 x (192 + 128) products, of which causal attention computes half.
    assert AttentionCost.of(dense) == AttentionCost(matrices / (16 * 320 / 2))
    # DeepSeek-V3
    down, up = 7168 * 1536 + 7168 * 576, 1536 * 128 * 192 + 512 * 128 * 256
    assert down + up + 128 * 128 * 7168 == 187_105_280
    of_layer = 187_105_280 + 1536 + 512 + 3 * 7168 * 18432 + 2 * 7168
    assert num_parameters(model(DEEPSEEK_V3, num_layers=2), 0) - num_parameters(
        model(DEEPSEEK_V3, num_layers=1), 0
    ) == (of_layer)


@pytest.mark.parametrize("sizes", [MOONLIGHT, DEEPSEEK_V3])
def test_the_planner_knows_the_products(sizes: dict[str, Any]) -> None:
    """Those of sft/layers/flops.py, and once more 2 FLOPs of the up projection in backward."""
    config = layout_config().model_copy(update={"model": model(sizes)})
    found = layer_products(config, Layout.resolve(config, 1), ModelProducts.of(config.model), tokens=8.0)
    again = 2 * sizes["num_layers"] * 512 * sizes["num_attention_heads"] * 256
    expected = TrainFlops.of(config.model, 0).per_token + again
    assert sum(p.flops * p.num_runs for p in found) == pytest.approx(8 * expected)


def test_the_latent_travels_where_it_is_narrower() -> None:
    """Of DeepSeek-V3 and Moonlight it has 576 numbers; of a head, key and value have 320."""
    deepseek, moonlight = model(DEEPSEEK_V3), model(MOONLIGHT)
    assert [sent(with_tp(deepseek, tp)) for tp in (1, 8, 64, 128)] == [576, 576, 576, 320]
    assert [sent(with_tp(moonlight, tp)) for tp in (1, 8, 16)] == [576, 576, 320]
    te = {"attention": {"backend": "te"}}  # sends keys and values always: 16 heads of 192 + 128 numbers
    assert [sent(with_tp(moonlight, tp, **te)) for tp in (1, 8, 16)] == [5120, 640, 320]
    config = layout_config(parallel={"tp": 2}).model_copy(update={"model": moonlight})
    # bf16 twice forward and in backward, gradients once in fp32
    assert CpBytes.of(config).kv_bytes == 27 * 576 * (2 * 2 + 4)
    assert CpBytes.of(with_tp(moonlight, 2, **te)).kv_bytes == 27 * 8 * 320 * (2 * 2 + 4)


def test_ranks_expand_the_latents_of_the_pack_only_where_latents_travel() -> None:
    """Moonlight's up projection on cp 2: of both ranks' tokens and again in backward, or of its own tokens once."""
    rows = {"portable": (16.0, 1.0), "auto": (16.0, 1.0), "te": (8.0, 0.0)}
    for backend, expected in rows.items():
        config = layout_config(parallel={"cp": 2}, attention={"backend": backend})
        config = config.model_copy(update={"model": model(MOONLIGHT)})
        products = layer_products(config, Layout.resolve(config, 2), ModelProducts.of(config.model), tokens=8.0)
        (up,) = (product for product in products if (product.columns, product.inner) == (16 * 256, 512))
        assert (up.rows, up.repeated) == expected, backend


def test_what_a_token_leaves_by_name() -> None:
    config = layout_config().model_copy(update={"model": model(DEEPSEEK_V3)})
    kept = {
        "layer's input": 14_336, "norms' scales": 4, "MLP's norm input": 14_336,
        "queries": 2 * 128 * 192, "latent and rotary key": 1152, "attention's output": 32_768, "log-sum-exp": 512,
        "latents before their norms": 2 * (1536 + 512) + 8,
    }  # fmt: skip
    found = LatentAttention(config.model).bytes(config, Layout.resolve(config, 1).share(config), 1024)
    assert LayerBytes.of(found, "selective").by_name == kept
    assert LayerBytes.of(found, "none").attention == kept | {"normed input": 14_336, "normed latent of queries": 3072}


def test_what_a_token_leaves_by_name_on_te() -> None:
    """Keys and values of 128 heads, 80 KiB, in place of the latent, and the inputs of both projections up."""
    config = with_tp(model(DEEPSEEK_V3), 1, attention={"backend": "te"})
    found = LatentAttention(config.model).bytes(config, Layout.resolve(config, 1).share(config), 1024)
    kept = {
        "layer's input": 14_336, "norms' scales": 4, "MLP's norm input": 14_336, "normed input": 14_336,
        "queries": 2 * 128 * 192, "keys and values": 2 * 128 * 320, "attention's output": 32_768, "log-sum-exp": 512,
        "latents before their norms": 2 * (1536 + 512) + 8, "normed latents": 2 * (1536 + 512),
    }  # fmt: skip
    assert LayerBytes.of(found, "selective").attention == kept
    assert LayerBytes.of(found, "full").by_name == {"layer's input": 14_336}


# --- positions and scale -------------------------------------------------------------------------------------------


def test_neighbours_are_rotated_as_in_transformers() -> None:
    """transformers puts the results of all first neighbours before those of the second: products are the same."""
    generator = torch.Generator().manual_seed(4)
    query, key = torch.randn(2, 1, 3, 50, 8, generator=generator)
    frequencies = rope.frequencies(RopeConfig(base=100.0), 8)
    angles = torch.outer(torch.arange(50.0), frequencies)
    cos, sin = (torch.cat((x, x), -1)[None] for x in (angles.cos(), angles.sin()))
    expected = torch.einsum("bhqd,bhkd->hqk", *apply_rotary_pos_emb_interleave(query, key, cos, sin))
    config = RopeConfig(base=100.0, interleaved=True)
    rotation = rope.Rotation.of(torch.arange(50), frequencies, torch.float32, config)
    turned = [rotation.apply(x[0].transpose(0, 1)) for x in (query, key)]
    found = torch.einsum("qhd,khd->hqk", *turned)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5)  # sums of 8 products of up to 3
    expected_number = float(query[0, 0, 1, 0]) * math.cos(1.0) - float(query[0, 0, 1, 1]) * math.sin(1.0)
    assert float(turned[0][1, 0, 0]) == pytest.approx(expected_number, rel=FP32_TOLERANCE)


@pytest.mark.parametrize("all_dim", [None, 0.707, 1.0])
def test_yarn_scales_attention_in_two_ways(all_dim: float | None) -> None:
    """attention_factor is on the rotated numbers, mscale_all_dim on the whole product."""
    positions = {**DEEPSEEK_V3["rope"], "mscale_all_dim": all_dim, "attention_factor": 1.25}
    deepseek = model(DEEPSEEK_V3, rope=positions)
    parameters = {"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": all_dim or 0}
    assert rope.softmax_scale(deepseek) == pytest.approx(
        yarn_apply_mscale(parameters, 192**-0.5), rel=FLOAT64_TOLERANCE
    )
    one = torch.zeros(1, dtype=torch.int64)
    whole = rope.rotates_whole_heads(deepseek)
    rotation = rope.Rotation.of(one, torch.ones(32), torch.float32, deepseek.rope, whole_heads=whole)
    assert not whole and rotation.cos.flatten().tolist() == [1.25] * 64


def test_arguments_of_megatron_lm() -> None:
    """mscale is the number whose factor, divided by that of mscale_all_dim, is attention_factor."""
    found = model_arguments(model(DEEPSEEK_V3), padded_vocab_size=128, positions=512, bf16=True)
    expected = dict(multi_latent_attention=True, qk_layernorm=True, q_lora_rank=1536, kv_lora_rank=512) | dict(
        qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128, rope_type="yarn", rotary_scaling_factor=40.0
    )
    assert expected.items() <= found.items() and found["mscale"] == pytest.approx(1.0)
    assert "multi_latent_attention" not in model_arguments(
        model(MOONLIGHT, latent_attention={}), padded_vocab_size=128, positions=512, bf16=True
    )
    scaled = model(DEEPSEEK_V3, rope={**DEEPSEEK_V3["rope"], "mscale_all_dim": 1.3, "attention_factor": 0.9}).rope
    ratio = yarn_get_mscale(40.0, scaled.mscale) / yarn_get_mscale(40.0, 1.3)
    assert ratio == pytest.approx(0.9, rel=FLOAT64_TOLERANCE)


# --- the function ----------------------------------------------------------------------------------------------------

BOUNDARIES = np.array([0, 16, 48, 64], dtype=np.int32)
HEADS, RANK, PLAIN, ROTARY, VALUE, TOKENS, SCALE = (8, 6, 3, 2, 4, 64, 0.4)  # two heads in a group


def setting(kernel: Any, weight: Tensor) -> Setting:
    def expand(latents: Tensor, heads: slice) -> Tensor:
        rows = weight.view(HEADS, PLAIN + VALUE, RANK)[heads].flatten(0, 1)
        return torch.nn.functional.linear(latents, rows).squeeze(1).unflatten(-1, (-1, PLAIN + VALUE))

    return Setting(kernel=kernel, scale=SCALE, cp_group=None, expand=expand, rank=RANK, key_width=PLAIN)


@pytest.mark.parametrize("name", ["torch", "flash"])
def test_output_and_gradients_in_float64(name: str) -> None:
    """Values of 4 and keys of 5 numbers; the flash kernel gets values of the width of keys."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((TOKENS, HEADS, PLAIN + ROTARY), (TOKENS, RANK + ROTARY), (HEADS * (PLAIN + VALUE), RANK))
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    query, compressed, weight = inputs
    make: Any = TorchKernel.of if name == "torch" else partial(flash_kernel.FlashKernel.of, operators=PLAIN_FLASH)
    found = latent_attention(query, compressed, setting(make(BOUNDARIES, 1, 0, torch.device("cpu")), weight), [weight])
    expanded = (compressed[:, :RANK] @ weight.T).view(TOKENS, HEADS, PLAIN + VALUE)
    keys, values = keys_and_values(expanded, compressed[:, None, RANK:], PLAIN)
    expected, _ = in_one_piece(query, keys, values, BOUNDARIES, SCALE)
    assert found.shape == (TOKENS, HEADS, VALUE)
    grad = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    for ours, reference in zip(
        (found, *torch.autograd.grad(found, inputs, grad)), (expected, *torch.autograd.grad(expected, inputs, grad))
    ):
        torch.testing.assert_close(ours, reference, rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, problem",
    [
        (dict(latent_attention=dict(q_lora_rank=8)), "q_lora_rank: has no effect without"),
        (dict(latent_attention=dict(kv_lora_rank=8, qk_rope_head_dim=3)), "qk_rope_head_dim: must be even"),
        (dict(head_dim=192), "head_dim: must be null with latent_attention, whose keys are 192 wide"),
        (dict(num_query_groups=4), "num_query_groups: must be null"),
        (dict(qk_norm=True), "qk_norm: is not supported with latent_attention"),
        (dict(sliding_window=16), "sliding_window: is not supported with latent_attention"),
        (dict(rope=dict(fraction=0.5)), "rope.fraction: is not supported with latent_attention"),
        (dict(rope=dict(mscale_all_dim=1.0)), "mscale_all_dim: has no effect without scaling = yarn"),
    ],
)
def test_what_it_excludes(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem.replace("(", r"\(")):
        model(MOONLIGHT, **changes)


def test_both_backends_have_it() -> None:
    assert model(MOONLIGHT, rope=dict(interleaved=True)).portable_only is None
    ordinary = model(MOONLIGHT, latent_attention={}, rope=dict(interleaved=True))
    assert ordinary.portable_only == "model.rope.interleaved"
    with pytest.raises(ValidationError, match="mscale_all_dim: has no effect without latent_attention"):
        model(MOONLIGHT, latent_attention={}, rope=DEEPSEEK_V3["rope"])
    assert LatentAttentionConfig().compressed_width == 0 and not LatentAttentionConfig().projects_queries


TE = {"attention": {"backend": "te"}, "run": {"dir": "a", "device": "cuda", "precision": "bf16"}}


def recipe(sizes: dict[str, Any], **sections: Any) -> Config:
    base = layout_config().model_dump(exclude_unset=True)
    return Config.model_validate({**base, "model": {"init_from": "random", **sizes}, **sections})


@pytest.mark.parametrize(
    "widths, fits",
    [((128, 64, 128), True), ((64, 32, 64), True), ((192, 64, 256), False), ((128, 64, 96), False), ((6, 4, 7), False)],
)
def test_te_names_the_widths_that_it_has_no_kernel_for(widths: tuple[int, int, int], fits: bool) -> None:
    """GLM-4.7-Flash has keys and values of 256 numbers, which cuDNN does not train on Blackwell by the same table."""
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = {**MOONLIGHT, "latent_attention": {"kv_lora_rank": 512, **dict(zip(names, widths))}}
    assert recipe(sizes).auto_is_portable is not None
    if fits:
        assert recipe(sizes, **TE).shares_latents is False
        return
    with pytest.raises(ValidationError, match=f"has {widths[0] + widths[1]} and {widths[2]}; use portable or auto"):
        recipe(sizes, **TE)


def test_fp8_needs_the_backend_by_name() -> None:
    fp8 = {"run": {**TE["run"], "fp8": "blockwise"}}
    with pytest.raises(ValidationError, match="with latent attention auto is portable; use backend te"):
        recipe(MOONLIGHT, **fp8)
    assert not list(misfits(recipe(MOONLIGHT, **{**TE, **fp8}), 1))
    narrow = {**MOONLIGHT, "latent_attention": {"kv_lora_rank": 500}}
    (problem,) = misfits(recipe(narrow, **{**TE, **fp8}), 1)
    assert "multiples of 32, but kv_lora_rank = 500" in problem
    # 16 heads of tp 16: 192 rows of queries, 256 of keys and values, 128 columns of the output
    assert not list(misfits(recipe(MOONLIGHT, **{**TE, **fp8}, parallel={"tp": 16}), 16))


@pytest.mark.parametrize("backend", ["auto", "te"])
def test_auto_keeps_the_memory_that_is_planned(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr(transformer_engine, "missing", lambda: None)
    monkeypatch.setattr(transformer_engine, "check_release", lambda config: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    config = recipe(MOONLIGHT, **{**TE, "attention": {"backend": backend}})
    chosen = selection.choose(config, "cuda")
    assert chosen.name == {"auto": "portable", "te": "te"}[backend]
    assert uses_portable(config) is (backend == "auto")
    if backend == "auto":
        assert "not te: it saves and sends keys and values of all heads, not latents" in str(chosen)
    capability = (8, 0)
    assert "needs a GPU of compute capability 9.0" in str(transformer_engine.unfit(config, "cuda"))
