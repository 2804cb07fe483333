"""The list of matrix products has the multiplications that flops.py counts; the two are written independently."""

import pytest

from sft.estimate.products import layer_products
from sft.hf.architecture import architecture
from sft.layers.flops import TrainFlops
from sft.layers.matrices import ModelProducts
from sft.parallel.layout import Layout
from tests.builders import LLAMA_8B, layout_config
from tests.unit.fixtures.hf import released


@pytest.mark.parametrize(
    "name",
    [
        *("gpt_oss_20b", "qwen3_30b_a3b", "gemma_3_27b", "gemma_4_31b", "gemma_4_26b_a4b"),
        *("qwen3_6_35b_a3b", "qwen3_6_27b", "dense_layers"),
    ],
)
def test_products_of_released_models(name: str) -> None:
    """dense_layers: dense first layers, as in GLM-4.5 and DeepSeek-V3."""
    model = architecture(released("qwen3_30b_a3b" if name == "dense_layers" else name), "config.json").model
    if name == "dense_layers":
        model = model.model_copy(update={"moe": model.moe.model_copy(update={"dense_layers": 3})})
    config = layout_config().model_copy(update={"model": model})
    products = layer_products(config, Layout.resolve(config, 1), ModelProducts.of(model), tokens=8.0)
    states = 6.0 * 3 * model.linear_attention.value_width * model.linear_attention.key_head_dim
    expected = TrainFlops.of(model, 0).per_token - states * len(model.linear_attention.layers)
    assert sum(p.flops * p.num_runs for p in products) == pytest.approx(8 * expected)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"tp": 4, "pp": 2}])
def test_ranks_share_the_products(layout: dict[str, int]) -> None:
    """Each of the 8 ranks of tp x cp x pp that share a pack computes an eighth."""
    sizes = {"tp": 1, "pp": 1, **layout}
    config = layout_config(model=LLAMA_8B, parallel={**sizes, "cp": 8 // (sizes["tp"] * sizes["pp"])})
    found = Layout.resolve(config, 8)
    products = layer_products(config, found, ModelProducts.of(config.model), tokens=32768 / found.cp)
    # 32 x (4096 x (2 x 4096 + 2 x 1024) + 3 x 4096 x 14,336) = 6,979,321,856 products per token, 6 FLOPs each
    assert sum(p.flops * p.num_runs for p in products) == pytest.approx(32768 * 6 * 6_979_321_856 / 8)
