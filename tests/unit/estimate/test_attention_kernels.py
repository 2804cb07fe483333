"""Which kernel a prediction assumes for each kind of layer.  Expected kernels and rates from docs/numbers/h200.md."""

from typing import Any

import pytest

from sft.estimate.attention_kernels import Assumed, attention_kernels, describe, highest_tflops, relative
from sft.estimate.constants import assumed
from sft.estimate.gpus import gpu
from sft.layers.kernel_rates import FFPA, FLASH2, FLASH3, FLASH4, HOPPER, PLAIN, TRANSFORMER_ENGINE, rate
from tests.builders import LLAMA_8B, layout_config

WINDOWS = {"sliding_window": 1024, "sliding_window_layers": [1]}
WIDE = {"head_dim": 256, "rope": {"window_base": 10000.0}, "full_attention": {"head_dim": 512, "num_query_groups": 2}}
LATENT = {
    "latent_attention": {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    "num_query_groups": None,
    "head_dim": None,
}


def kernels(card: str, model: dict[str, Any], **sections: dict[str, Any]) -> list[str]:
    config = layout_config(model={**LLAMA_8B, **model}, **sections)
    return [kernel for kernel, _ in attention_kernels(config, card).values()]


@pytest.mark.parametrize(
    ("card", "model", "expected"),
    [
        ("h100", {}, [TRANSFORMER_ENGINE]),
        ("h200", WINDOWS, [FLASH4, FLASH4]),
        ("h200", {**WINDOWS, **WIDE}, [FLASH3, FFPA]),
        ("h200", {"attention_softcap": 50.0}, [FLASH4]),
        ("h200", LATENT, [FLASH4]),
        ("b200", WINDOWS, [FLASH4, FLASH4]),
        ("b200", {**WINDOWS, **WIDE}, [FLASH2, PLAIN]),  # nobody has compared wider heads there
        ("a100-80", {**WINDOWS, **WIDE}, [FLASH2, PLAIN]),
        ("a100-80", {"attention_softcap": 50.0}, [PLAIN]),
        ("mi300x", WINDOWS, [FLASH2, FLASH2]),
        ("cpu", WINDOWS, [PLAIN, PLAIN]),
    ],
    ids=str,
)
def test_the_fastest_kernel_of_each_kind(card: str, model: dict[str, Any], expected: list[str]) -> None:
    assert kernels(card, model) == expected


def test_what_the_recipe_asks_for() -> None:
    portable = {"backend": "portable"}
    assert kernels("h200", {}, attention=portable) == [FLASH4]
    assert kernels("h200", {}, attention={**portable, "kernels": ["fa2", "fa3"]}) == [FLASH3]
    assert kernels("h200", {}, attention={**portable, "kernels": ["torch"]}) == [PLAIN]
    assert kernels("h200", {}, run={"precision": "fp32"}) == [PLAIN]
    repeatable = {"run": {"deterministic": True}, "attention": portable}
    assert kernels("h200", {**WINDOWS, **WIDE}, **repeatable) == [FLASH4, PLAIN]


def test_rates_are_relative_to_the_kernel_of_the_constants() -> None:
    """The assumed constants are those of cuDNN, 602 / 530.  A CPU's constants hold for all kernels."""
    h100 = assumed(gpu("h100"), 40.0)
    assert h100.attention_kernel == TRANSFORMER_ENGINE
    assert (h100.attention_forward.at(1e6), h100.attention_backward.at(1e6)) == (602, 530)
    flash2 = Assumed(FLASH2, rate(FLASH2, HOPPER, 256, 256))
    assert relative(flash2, h100) == pytest.approx((287 / 602, 265 / 530))
    assert relative(Assumed(PLAIN, None), assumed(gpu("cpu"), 1.0)) == (1.0, 1.0)


def test_an_older_kernel_gains_little_on_a_new_gpu() -> None:
    """FlashAttention-2 reaches 357 TFLOP/s on an H200; on a B200 400 to 500 are assumed, not 2.3 times as much."""
    b200 = assumed(gpu("b200"), 40.0)
    factor, _ = relative(Assumed(FLASH2, rate(FLASH2, "blackwell", 128, 128)), b200)
    assert factor * b200.attention_forward.at(1e6) == pytest.approx(400)
    assert assumed(gpu("mi300x"), 40.0).attention_forward.at(1e6) == pytest.approx(357 * 1307 / 989.4)


def test_the_highest_rate_of_a_model() -> None:
    """3 x FLOPs of forward: one at 667, two that take the time of 2.5 at 592."""
    config = layout_config(model=LLAMA_8B, attention={"backend": "portable"})
    h100 = assumed(gpu("h100"), 40.0)
    assert highest_tflops(config, h100) == pytest.approx(3 / (1 / 667 + 2.5 / 592))


def test_the_line() -> None:
    wide = layout_config(model={**LLAMA_8B, **WINDOWS, **WIDE})
    assert describe(wide, "h100") == (
        "assumed kernels of attention: window attention by FlashAttention-3 (642 / 400 to 550 TFLOP/s, published: "
        "FlashAttention-3, figures 5 and 6; backward assumed: not published); full attention by ffpa-attn (603 / 221 "
        "TFLOP/s, measured on one H200 (docs/numbers/h200.md))"
    )
    linear = {"layers": list(range(1, 33)), "num_key_heads": 2, "num_value_heads": 2, "key_head_dim": 16}
    config = layout_config(model={**LLAMA_8B, "linear_attention": linear})
    assert describe(config, "h100") == "no attention with a softmax"
