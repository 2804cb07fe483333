"""What a frozen base in low bits takes, by hand."""

from sft.estimate.low_bits import LowBitBase
from sft.estimate.memory import estimate
from sft.estimate.model_bytes import state
from sft.estimate.parameters import stage_parameters
from sft.estimate.stage import Stage
from sft.parallel.layout import Layout
from sft.weights.trained import trained_weights
from tests.builders import layout_config

VOCAB = 100
# 2 layers: 256 x 128 of queries, keys and values in a matrix of 512 rows; 128 x 256; MLP 512 x 128 and 128 x 256.
MODEL = {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 4, "num_query_groups": 2}
SIZES = {**MODEL, "head_dim": 64, "base_dtype": "nf4"}
EXPERTS = {"moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 64}}
ATTENTION, MLP, EXPERT = 512 * 128 + 128 * 256, 512 * 128 + 128 * 256, 128 * 128 + 128 * 64


def stage(world_size: int = 1, **sections: dict[str, object]) -> Stage:
    model = {**SIZES, **sections.pop("model", {})}
    run = {"dir": "runs/a", "precision": "bf16"}
    config = layout_config(model=model, run=run, lora={"rank": 4}, **sections)
    layout = Layout.resolve(config, world_size)
    return Stage.of(config, layout, VOCAB, 0, trained_weights(config, VOCAB))


def test_numbers_and_bytes_of_a_dense_model() -> None:
    """36 bytes for 64 numbers."""
    base = LowBitBase.of(stage())
    assert base is not None
    assert base.numbers == 2 * (ATTENTION + MLP)
    assert base.num_bytes == base.numbers * 36 / 64
    assert (base.layer, base.experts, base.expert_numbers) == (2 * (ATTENTION + MLP), 0, 0)
    assert base.temporary == 10 * 512 * 128


def test_tp_ep_and_pp_divide_the_base() -> None:
    base = LowBitBase.of(stage(4, model=EXPERTS, parallel={"tp": 2, "ep": 2, "pp": 2}))
    assert base is not None
    assert base.numbers == ATTENTION / 2 + 4 * EXPERT
    assert base.num_bytes == base.numbers * 36 / 64
    assert base.expert_numbers == 4 * EXPERT
    assert (base.layer, base.experts) == (2 * ATTENTION / 2, 2 * 4 * 128 * 128)


def test_weights_take_the_stored_bytes() -> None:
    low, plain = stage(), stage(model={"base_dtype": "bf16"})
    own = stage_parameters(low)
    numbers = 2 * (ATTENTION + MLP)
    expected = 2 * (own.all.total - numbers) + numbers * 36 / 64
    assert state(low, own, None)["weights"] == expected
    assert state(plain, stage_parameters(plain), None)["weights"] == 2 * own.all.total


def test_a_layer_is_dequantised_in_backward() -> None:
    low = stage()
    found = estimate(low.config, low.layout, VOCAB, 1024, low.trained)
    held = {working.by_name.get("dequantised weights", 0) for working in found.sets}
    assert held == {0, 2 * (ATTENTION + MLP) + 10 * 512 * 128}  # 0: the loss head


def test_bytes_that_are_moved() -> None:
    """Experts are dequantised for each product, and once more if backward repeats the products."""
    base = LowBitBase.of(stage(model=EXPERTS))
    assert base is not None
    dense, experts = 2 * ATTENTION, 2 * 8 * EXPERT
    assert base.moved(repeats_layers=False, repeats_experts=False) == 26 * (2 * dense + 2 * experts)
    assert base.moved(repeats_layers=True, repeats_experts=False) == 26 * (2 * dense + 3 * experts)
