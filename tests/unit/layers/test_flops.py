"""Parameters and FLOPs, computed by hand."""

import math

import numpy as np
import pytest

from sft.config.linear_attention import LinearAttentionConfig
from sft.hf.architecture import architecture
from sft.layers.adapters import Trained, Weight
from sft.layers.flops import AttentionCost, TrainFlops, active_parameters, describe_parameters, num_parameters
from tests.builders import LLAMA_8B, layout_config
from tests.unit.fixtures.hf import released
from tests.unit.fixtures.layouts import TINY, adapted


def test_the_crossover_of_llama_8b() -> None:
    """4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) products per token and layer; 4096 per squared length."""
    assert AttentionCost.of(layout_config(model=LLAMA_8B).model) == AttentionCost(53_248)
    windows = layout_config(
        model={**LLAMA_8B, "sliding_window": 4096, "sliding_window_layers": list(range(1, 33, 2))}
    ).model
    assert AttentionCost.of(windows) == AttentionCost(106_496, 4096, 106_496)
    everywhere = AttentionCost.of(layout_config(model={**LLAMA_8B, "sliding_window": 4096}).model)
    assert everywhere == AttentionCost(math.inf, 4096, 53_248)
    assert everywhere.equal_length() == math.inf  # 4096 keys cost at most 2 * 4096 / 53,248 of a token


def test_attention_of_gpt_oss_20b() -> None:
    """64 query heads of 64 have 4096 elements; 12 layers have windows of 128, and 12 have full attention.

    In a full layer, a query attends to (length + 1) / 2 keys on average, about length / 2; in a layer with a window to
    128, except the first 128 queries.  Each pair has 2 x 2 x 4096 FLOPs in forward, and three times as many with
    backward.
    """
    model = architecture(released("gpt_oss_20b"), "config.json").model
    of_pair = 3 * 2 * 2 * 4096
    for length, full, window in ((8192, 33_554_432, 1_040_384), (131_072, 8_589_934_592, 16_769_024)):
        assert (full, window) == (length * length // 2, 128 * (2 * length - 128) // 2)
        found = TrainFlops.of(model, 201_088).attention(np.array([length]))
        assert found == pytest.approx(12 * (full + window) * of_pair)
    # Per token and layer: q, k, v and output 2880 x (2 x 4096 + 2 x 512), router 2880 x 32, four experts of 3 x 2880 x
    # 2880: 126,167,040 products.  In 24 layers, 6 FLOPs each.
    assert TrainFlops.of(model, 201_088).per_token == 6 * 24 * 126_167_040
    # Attention has as many FLOPs as all other computation at 61 thousand tokens; with full attention in all layers, at
    # half of that.
    cost = AttentionCost.of(model)
    assert cost == AttentionCost(24 * 126_167_040 / (12 * 4096), 128, 24 * 126_167_040 / (12 * 4096))
    assert cost.equal_length() == pytest.approx(61_349, abs=1)


def test_cost_of_attention() -> None:
    """A window of 20: 10 tokens have 100 / 2 pairs, 100 tokens have 20 * (200 - 20) / 2."""
    cost = AttentionCost(10.0, 20, 10.0)
    assert cost(np.array([10, 100])).tolist() == [10 + 10, 1000 + 360]
    assert AttentionCost()(np.array([10, 100])).tolist() == [0, 0]
    assert AttentionCost(10.0).equal_length() == 10.0
    assert cost.equal_length() == pytest.approx(5.0)  # 25 / 10 twice
    assert AttentionCost(math.inf, 20, 10.0).equal_length() == pytest.approx(10.0)
    far = AttentionCost(1000.0, 20, 100.0).equal_length()
    assert far**2 / 1000 + 20 * (2 * far - 20) / 100 == pytest.approx(far)


def test_parameters_counted_by_hand() -> None:
    # embedding 10*4, qkv 4*12, proj 4*4, fc1 4*16, fc2 8*4, two norms of 4, last norm 4
    assert num_parameters(layout_config(model=TINY).model, 10) == 40 + 48 + 16 + 64 + 32 + 8 + 4
    # an output weight that is not tied, biases of q, k, v, norms of q and k
    changed = {**TINY, "tie_embeddings": False, "qkv_bias": True, "qk_norm": True}
    assert num_parameters(layout_config(model=changed).model, 10) == 212 + 40 + 12 + 4
    # one group: k and v are one head of 2
    assert num_parameters(layout_config(model={**TINY, "num_query_groups": 1}).model, 10) == 212 - 16
    # norms before and after attention and MLP
    assert num_parameters(layout_config(model={**TINY, "norm_placement": "both"}).model, 10) == 212 + 8


def test_linear_attention_counted_by_hand() -> None:
    """One key head of width 3, two value heads of width 5, 4 taps; one of two layers has linear attention.

    Matrices: q and k have 3 rows, v and z 10, decay and beta 2, output 10.  Other parameters: taps of 16 channels, a
    decay and a bias for each value head, a norm of 5.  A state has 3 x 5 elements and is multiplied three times.
    """
    full = layout_config(model={**TINY, "num_layers": 2}).model
    linear = LinearAttentionConfig(
        layers=[1], num_key_heads=1, num_value_heads=2, key_head_dim=3, value_head_dim=5, conv_kernel=4
    )
    mixed = full.model_copy(update={"linear_attention": linear})
    matrices, others, mlp, attention = 4 * (3 + 3 + 10 + 10 + 2 + 2 + 10), 16 * 4 + 2 * 2 + 5, 3 * 4 * 8, 4 * 4 * 4
    assert num_parameters(full, 10) == 40 + 2 * (attention + mlp + 8) + 4
    assert num_parameters(mixed, 10) == 40 + (attention + mlp + 8) + (matrices + others + mlp + 8) + 4
    per_token = attention + matrices + 2 * mlp + 3 * 2 * 3 * 5
    assert TrainFlops.of(mixed, 10) == TrainFlops(6.0 * per_token, 6.0 * 40, AttentionCost(per_token / 4))
    frozen = TrainFlops.of(mixed, 10, Trained(whole=(), adapted=()))
    assert frozen.per_token == 4.0 * (per_token - 90) + 6.0 * 90 and frozen.saved == 2.0 * (per_token - 90)
    all_linear = full.model_copy(update={"linear_attention": linear.model_copy(update={"layers": [1, 2]})})
    assert AttentionCost.of(all_linear) == AttentionCost()
    gated = full.model_copy(update={"attention_output_gate": True})
    assert num_parameters(gated, 10) == num_parameters(full, 10) + 2 * 4 * 4


def test_norms_across_heads_have_a_weight_for_every_head() -> None:
    sizes = {"num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 4, "num_query_groups": 2}
    per_head = layout_config(model={**sizes, "head_dim": 2, "qk_norm": True}).model
    across = layout_config(model={**sizes, "head_dim": 2, "qk_norm": True, "qk_norm_across_heads": True}).model
    assert num_parameters(across, 10) - num_parameters(per_head, 10) == 2 * ((8 + 4) - (2 + 2))
    assert TrainFlops.of(across, 10) == TrainFlops.of(per_head, 10)


def test_experts_counted_by_hand() -> None:
    experts = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 2}
    # the dense model has 212 parameters, 96 of them in the MLP
    moe = layout_config(model={**TINY, "moe": experts}).model
    # router 4*8; each of 8 experts: gate, up and down 3*4*2
    assert num_parameters(moe, 10) == 212 - 96 + 32 + 8 * 24
    # qkv 48, proj 16; a token is multiplied with the router and two experts
    flops = TrainFlops.of(moe, 10)
    assert (flops.per_token, flops.per_label) == (6 * (48 + 16 + 32 + 2 * 24), 6 * 40)
    assert flops.attention(np.array([10, 1])) == pytest.approx(6 * 4 * (100 + 1))
    shared = {"shared_ffn_hidden_size": 6, "shared_gate": True}  # 3*4*6, and a gate of 4
    both = layout_config(model={**TINY, "moe": {**experts, **shared}}).model
    assert num_parameters(both, 10) == num_parameters(moe, 10) + 76
    assert TrainFlops.of(both, 10).per_token == flops.per_token + 6 * 76
    # experts are as wide as the dense MLP
    wide = layout_config(model={**TINY, "moe": {"num_experts": 8, "top_k": 2}}).model
    assert num_parameters(wide, 10) == 212 - 96 + 32 + 8 * 96


def test_what_one_token_meets() -> None:
    """A token goes to two of 8 experts with 24 parameters each."""
    model = {**TINY, "num_layers": 3, "tie_embeddings": False}
    experts = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 2}
    dense, sparse = layout_config(model=model).model, layout_config(model={**model, "moe": experts}).model
    assert active_parameters(dense, 10) == num_parameters(dense, 10)
    assert active_parameters(sparse, 10) == num_parameters(sparse, 10) - 3 * 6 * 24
    assert describe_parameters(dense, 10) == "588"
    assert describe_parameters(sparse, 10) == "972 (540 for a token)"
    # two of three layers have experts, and 128 parameters more than a dense layer
    first = {**experts, "dense_layers": 1}
    mixed = layout_config(model={**model, "moe": first}).model
    assert describe_parameters(mixed, 10) == "844 (556 for a token)"
    # Products of a layer: 64 in attention; 96 in the MLP, or 32 in the router and 48 in two experts.
    assert TrainFlops.of(mixed, 10).per_token == 6 * (3 * 64 + 96 + 2 * (32 + 48))


def test_a_frozen_matrix_takes_no_product_for_its_gradient() -> None:
    """The tiny model has 160 parameters in layers and 40 in the output weight; of these, fc1 (64) and norms are
    trained."""
    model = layout_config(model=TINY).model
    fc1 = Weight(key="decoder.layers.mlp.linear_fc1.weight", index=(0,), shape=(16, 4))
    norm = Weight(key="decoder.final_layernorm.weight", index=(), shape=(4,))
    table = Weight(key="embedding.word_embeddings.weight", index=(), shape=(10, 4))
    some = TrainFlops.of(model, 10, Trained(whole=[fc1, norm]))
    assert (some.per_token, some.per_label, some.saved) == (4 * 160 + 2 * 64, 4 * 40, 2 * (160 - 64))
    lengths = np.array([10, 7])
    assert some.attention(lengths) == pytest.approx(TrainFlops.of(model, 10).attention(lengths)) == 24 * (100 + 49)
    output = TrainFlops.of(model, 10, Trained(whole=[table]))
    assert (output.per_token, output.per_label) == (4 * 160, 6 * 40)
    proj = adapted("self_attention.linear_proj", (4,), (0,))
    assert TrainFlops.of(model, 10, Trained(adapted=[proj], whole=[]), 2).per_token == 4 * 160 + 6 * 2 * (4 + 4)
