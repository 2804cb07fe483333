"""Layers whose norms are separate from projections, for Transformer Engine but without it; test_te.py builds the real
ones."""

import pytest
import torch
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp

from sft.mcore.backends import transformer_engine
from sft.mcore.modules.biases import submodules_of
from sft.mcore.modules.library import with_norms_apart
from tests.builders import parsed


class Fused:
    """Replaces a projection that computes the norm itself."""


@pytest.mark.parametrize("num_experts", [None, 4], ids=["dense", "experts"])
def test_the_norms_before_projections_are_modules(num_experts: int | None) -> None:
    spec = get_gpt_layer_local_spec(num_experts=num_experts)
    layer, keys = spec.submodules, dict(spec.submodules.sharded_state_dict_keys_map)
    layer.input_layernorm, layer.self_attention.submodules.linear_qkv = IdentityOp, Fused
    layer.sharded_state_dict_keys_map = {"mlp.0.weight": "mlp.linear_fc1.layer_norm_weight"}
    if num_experts is None:
        layer.pre_mlp_layernorm, submodules_of(layer.mlp).linear_fc1 = IdentityOp, Fused
    before = layer.pre_mlp_layernorm
    with_norms_apart(spec)
    assert layer.input_layernorm is TENorm and layer.self_attention.submodules.linear_qkv is TEColumnParallelLinear
    assert layer.sharded_state_dict_keys_map == keys, "the names of the norms in a checkpoint are those of core"
    if num_experts is None:
        assert layer.pre_mlp_layernorm is TENorm and submodules_of(layer.mlp).linear_fc1 is TEColumnParallelLinear
    else:
        assert layer.pre_mlp_layernorm is before


def test_adapters_are_no_reason_against_transformer_engine_and_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["run.device=cuda", "run.precision=bf16", "run.fp8=delayed", "lora.rank=2"]
    config = parsed(*overrides).config
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert config.run.fp8 == "delayed" and transformer_engine.unfit(config, "cuda") is None
