"""optim.groups with Muon, LoRA and LoRA+; test_freeze.py compares AdamW's steps with those of torch's groups."""

from collections.abc import Sequence
from pathlib import Path

from sft.mcore.optimizer.inner import chained_optimizers
from tests.ranks import scenarios
from tests.ranks.layouts import MOE, SHARDED, TP
from tests.ranks.pool import Ranks

GROUPS = (
    "optim.groups=[{params: [layers.0.self_attn.*], lr_ratio: 0.5, weight_decay: 0.3}, "
    "{params: [embed_tokens], lr_ratio: 0.25}]"
)
MODEL = ["model.num_layers=2", "model.qkv_bias=false"]
MUON = ["optim.name=muon", "optim.muon.lr_ratio=4", *MODEL]
LORA = ["lora={rank: 4, targets: [q_proj, down_proj], lr_ratio: 16, train_embeddings: true}", *MODEL]


def settings(overrides: Sequence[str]) -> dict[str, tuple[float, float]]:
    """The learning rate and the weight decay of each parameter in the first step, and what the step reports."""
    with scenarios.running([*overrides, "optim.warmup_steps=null", "optim.schedule=constant"]) as engine:
        (result,) = scenarios.train_steps(engine, [0])
        names = {id(param): name for name, param in engine.chunks[0].module.named_parameters()}
        return {"reported": (result.learning_rate, 0.0)} | {
            names[id(param)]: (group["lr"], group["weight_decay"])
            for core in chained_optimizers(engine.optimizer)
            for group in core.optimizer.param_groups
            for param in group["params"]
        }


def check(found: dict[str, tuple[float, float]], expected: dict[str, tuple[float, float]]) -> None:
    """expected: ends of names -> rate and decay"""
    for end, values in expected.items():
        matches = {name: value for name, value in found.items() if name.endswith(end)}
        assert matches and set(matches.values()) == {values}, (end, matches)


def test_learning_rate_and_weight_decay_of_each_parameter(ranks: Ranks) -> None:
    (muon,) = ranks(1).run(settings, [*MUON, *MOE, GROUPS])
    check(
        muon,
        {
            "reported": (1e-3, 0.0),
            "word_embeddings.weight": (2.5e-4, 0.1),
            "output_layer.weight": (1e-3, 0.1),
            "layers.0.self_attention.linear_qkv.weight": (2e-3, 0.3),
            "layers.1.self_attention.linear_qkv.weight": (4e-3, 0.1),
            "layers.0.self_attention.q_layernorm.weight": (5e-4, 0.0),
            "final_layernorm.weight": (1e-3, 0.0),
        },
    )
    (lora,) = ranks(1).run(settings, [*LORA, GROUPS])
    check(
        lora,
        {
            "reported": (1e-3, 0.0),
            "word_embeddings.weight": (2.5e-4, 0.1),
            "layers.0.self_attention.linear_qkv.factors.0.a": (5e-4, 0.3),
            "layers.0.self_attention.linear_qkv.factors.0.b.0": (8e-3, 0.3),
            "layers.1.self_attention.linear_qkv.factors.0.b.0": (1.6e-2, 0.1),
            "layers.0.mlp.linear_fc2.factors.0.a": (1e-3, 0.1),
        },
    )


def test_a_resumed_run_is_equal_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    scenarios.check_bitwise(ranks(2), tmp_path, [*MUON, *TP, *SHARDED, GROUPS])
