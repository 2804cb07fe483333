"""Settings that exclude a frozen base in low bits, and parallel sizes that would divide numbers with one scale."""

import pytest

from sft.errors import ConfigError
from sft.parallel.layout import Layout
from tests.builders import RECIPE, layout_config, parsed, refusal_lines

LORA = "lora.rank=4"


@pytest.mark.parametrize(
    "overrides, key, message",
    [
        (["model.base_dtype=nf4"], "model.base_dtype", "needs lora.rank, because only frozen weights can be in low"),
        (
            ["model.base_dtype=nf4", LORA, "parallel.distributed_optimizer=true", "parallel.shard=weights"],
            *("parallel.shard", "does not fit model.base_dtype = nf4: sharding keeps all weights of a layer"),
        ),
        (["model.base_dtype=nf4", LORA, "run.fp8=mxfp8"], "run.fp8", "does not fit model.base_dtype = nf4"),
        (["model.base_dtype=as_stored", LORA], "model.base_dtype", "needs the files of model.hf, but"),
        (
            ["model.base_dtype=nf4", LORA, "model.init_from=/models/qwen"],
            *("model.base_dtype", "reads the files of model.hf, but model.init_from names a Megatron checkpoint"),
        ),
        (
            ["model.base_dtype=nf4", LORA, "lora.export=merged", "checkpoint.export_hf=last"],
            *("lora.export", "adds adapters to the weights of model.hf, but with model.base_dtype = nf4"),
        ),
    ],
)
def test_settings_that_do_not_fit(overrides: list[str], key: str, message: str) -> None:
    assert any(key in line and message in line for line in refusal_lines(RECIPE, *overrides))


def test_experts_in_low_bits_need_our_modules() -> None:
    moe = ["model.moe.num_experts=4", "model.moe.top_k=2"]
    config = parsed("model.base_dtype=nf4", LORA, *moe).config
    assert config.local_modules_only == (
        "model.base_dtype = nf4 dequantises experts by groups, and its experts need the matrices of a whole layer"
    )
    assert parsed("model.base_dtype=nf4", LORA).config.local_modules_only is None


@pytest.mark.parametrize("tp, fits", [(1, True), (2, True), (4, True), (8, False)])
def test_tp_divides_no_numbers_with_one_scale(tp: int, fits: bool) -> None:
    """NF4 has a scale for 64 columns.  With tp 8, a rank would have 768 / 8 = 96 columns."""
    model = {"ffn_hidden_size": 512, "head_dim": 32, "base_dtype": "nf4"}
    config = layout_config(model=model, lora={"rank": 4}, parallel={"tp": tp})
    if fits:
        assert Layout.resolve(config, tp).tp == tp
        return
    with pytest.raises(ConfigError) as caught:
        Layout.resolve(config, tp)
    assert str(caught.value) == (
        "parallel.tp = 8 would divide columns that share a scale: with model.base_dtype = nf4, 64 columns share a "
        "scale (NF4), and self_attention.linear_proj.weight has 768 columns.  Sizes that fit: 1, 2, 4."
    )
