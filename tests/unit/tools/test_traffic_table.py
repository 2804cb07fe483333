"""The table of bytes by link: its numbers, computed by hand."""

import pytest

from sft.config.linear_attention import LinearAttentionConfig
from sft.parallel.layout import Layout
from sft.recipe.load import load_recipe
from tools.traffic_table import GPUS_PER_MACHINE, RECIPES, RING, ROOT, Traffic, of

NUM_GPUS = 16  # of every recipe below
pytestmark = pytest.mark.usefixtures("released_models")


def traffic(name: str, *overrides: str) -> dict[str, Traffic]:
    config = load_recipe(str(ROOT / "recipes" / f"{name}.yaml"), list(overrides)).config
    return {one.group: one for one in of(config, Layout.resolve(config, NUM_GPUS))}


def test_heads_stay_within_a_machine_and_the_ring_is_short() -> None:
    """Llama-8B at 128K: a rank has 8 x 16,384 tokens and, with tp 2, 16 query heads and 4 key heads of width 128, in 32
    layers.

    Keys and values are 268 MB per layer.  A ring of 8 sends them 7 times; in backward, with their gradients, 14 times.
    """
    pairs = 131_072 * 2 * 4 * 128 * 2
    ring, two = traffic("llama31_8b_128k", *RING), traffic("llama31_8b_128k")
    keys = "cp, ring of keys and values"
    assert pairs == 268_435_456
    assert (ring[keys].num_bytes, ring[keys].link) == (32 * 21 * pairs, "InfiniBand")
    assert (two[keys].num_bytes, two[keys].link) == (32 * 3 * pairs, "InfiniBand")
    heads = two["cp, all-to-all of heads"]
    assert heads.num_bytes == 32 * 2 * (2 * 131_072 * 16 * 128 * 2 + pairs) * 3 / 4
    assert (heads.link, two["tp"].link) == ("NVLink", "NVLink")


def test_experts_stay_within_a_machine() -> None:
    found = traffic("qwen3_30b_a3b_64k")
    assert {name: one.link for name, one in found.items()} == {
        "cp, ring of keys and values": "NVLink",
        "ep, tokens to experts and back": "NVLink",
        "dp x cp, gradients and weights": "InfiniBand",
        "copies of experts, gradients and weights": "InfiniBand",
    }
    # 65,536 tokens go to 8 experts each: 2,048 elements there and back, and a weight, in forward and backward of 48
    # layers.
    sent = 48 * 2 * 65_536 * 8 * (2 * 2 * 2_048 + 4) * 7 / 8
    assert found["ep, tokens to experts and back"].num_bytes == pytest.approx(sent)


def test_windows_send_their_halos() -> None:
    """Qwen3-8B at 128K with windows of 128 in 18 of 36 layers: these layers use no ring.

    With tp 2 and cp 8, a rank holds 131,072 tokens with 268 MB of keys and values, sent in forward and backward, and
    their gradients in fp32: four times as much.  14 of 16 chunks have halos of 127 tokens each, in each of 8 packs.
    """
    windows = ["model.sliding_window=128", f"model.sliding_window_layers={list(range(1, 37, 2))}", "parallel.cp=8"]
    found = traffic("qwen3_8b_128k", *windows)
    pairs = 131_072 * 2 * 4 * 128 * 2
    assert not {"cp, ring of keys and values", "cp, all-to-all of heads"} & found.keys()
    assert found["cp, all-gather of keys and values"].num_bytes == 18 * 4 * 7 * pairs
    assert found["cp, halos of windows"].num_bytes == pytest.approx(18 * 4 * 8 * 14 / 8 * 127 * 2 * 4 * 128 * 2)
    assert found["cp, halos of windows"].link == "InfiniBand"


def test_linear_attention_sends_its_states() -> None:
    """Llama-8B at 128K with linear attention in 24 of 32 layers, tp 2 and cp 8: 8 packs of one document.

    With 16 value heads, a rank sends 7/8 of the maps [128, 128 + 128] of its two chunks and of as many states [128,
    128], in fp32, in forward, in the forward pass that selective repeats, and in backward.  14 of 16 chunks have halos
    of 3 tokens with 2 x 8 + 16 heads in bf16.
    """
    config = load_recipe(str(ROOT / "recipes" / "llama31_8b_128k.yaml"), RING).config
    linear = LinearAttentionConfig(
        layers=[i for i in range(1, 33) if i % 4], num_key_heads=16, num_value_heads=32, key_head_dim=128
    )
    config = config.model_copy(update={"model": config.model.model_copy(update={"linear_attention": linear})})
    found = {one.group: one for one in of(config, Layout.resolve(config, 16))}
    maps, halos = 7 / 8 * 2 * 16 * 128 * (128 + 2 * 128) * 4, 14 / 8 * 3 * (2 * 8 + 16) * 128 * 2
    assert found["cp, states of linear attention"].num_bytes == pytest.approx(24 * 8 * 3 * (maps + halos))
    assert found["cp, all-gather of keys and values"].num_bytes == 8 * 4 * 7 * 131_072 * 2 * 4 * 128 * 2


@pytest.mark.parametrize("name", RECIPES)
def test_cp_of_two_machines_has_two_levels(name: str) -> None:
    parallel = load_recipe(str(ROOT / "recipes" / f"{name}.yaml")).config.parallel
    if parallel.tp * parallel.cp > GPUS_PER_MACHINE:
        assert parallel.cp_comm == "a2a+p2p" and parallel.tp * (parallel.cp_a2a or 0) == GPUS_PER_MACHINE
