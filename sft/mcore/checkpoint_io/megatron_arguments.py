"""Lists the arguments of Megatron-LM that describe a model, as a checkpoint stores them."""

from typing import Any

from sft.config import ModelConfig
from sft.mcore.model.mixers import MIXER_MODULES


def model_arguments(model: ModelConfig, *, padded_vocab_size: int, positions: int, bf16: bool) -> dict[str, Any]:
    """The arguments of Megatron-LM that describe the model, by name.

    positions: largest number of tokens of a sequence; bf16: whether the weights are bf16
    """
    skipped = model.rope.skip_layers
    arguments: dict[str, Any] = dict(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.resolved_query_groups,
        group_query_attention=model.resolved_query_groups != model.num_attention_heads,
        kv_channels=model.resolved_head_dim,
        qk_layernorm=model.qk_norm,
        add_qkv_bias=model.qkv_bias,
        add_bias_linear=model.attention_output_bias and model.mlp_bias,  # Megatron-LM has one switch for both
        softmax_type="learnable" if model.attention_sinks else "vanilla",
        add_position_embedding=True,  # Megatron-LM's default, which it keeps with rotary positions
        position_embedding_type="rope",
        rotary_base=model.rope.base,
        rotary_percent=model.rope.fraction,
        norm_epsilon=model.norm_epsilon,
        normalization="RMSNorm",
        apply_layernorm_1p=model.norm_zero_centered,
        untie_embeddings_and_output_weights=not model.tie_embeddings,
        padded_vocab_size=padded_vocab_size,
        seq_length=positions,
        max_position_embeddings=positions,
        bf16=bf16,
        ckpt_format="torch_dist",
        no_rope_freq=[int(i in skipped) for i in range(1, model.num_layers + 1)] if skipped else None,
        attention_output_gate=model.attention_output_gate,
        mtp_num_layers=1 if model.has_mtp else None,
        **_activation_arguments(model),
        **_window_arguments(model),
        **expert_arguments(model),
    )
    for module in MIXER_MODULES.values():
        arguments |= module.arguments(model)
    return arguments


def _activation_arguments(model: ModelConfig) -> dict[str, Any]:
    """The arguments of the activation.  quick_geglu means gate * sigmoid(1.702 * gate) * (up + glu_linear_offset)."""
    if model.activation != "clamped_swiglu":
        return dict(swiglu=model.activation == "swiglu", squared_relu=model.activation == "relu2")
    return dict(
        swiglu=False,
        quick_geglu=True,
        glu_linear_offset=1.0,
        activation_func_clamp_value=model.activation_limit,
    )


def _window_arguments(model: ModelConfig) -> dict[str, Any]:
    if model.sliding_window is None:
        return {}
    has_window = [int(model.kind_of(number + 1) == "window attention") for number in range(model.num_layers)]
    return dict(window_size=(model.sliding_window - 1, 0), window_attn_skip_freq=has_window)


def expert_arguments(model: ModelConfig) -> dict[str, Any]:
    """The arguments about experts."""
    moe = model.moe
    if moe.num_experts is None:
        return {"num_experts": None}
    return dict(
        num_experts=moe.num_experts,
        moe_layer_freq=[int(model.has_experts(i + 1)) for i in range(model.num_layers)] if moe.is_mixed else 1,
        moe_ffn_hidden_size=model.resolved_expert_ffn,
        moe_router_topk=moe.top_k,
        moe_router_pre_softmax=not moe.normalize_top_k,
        moe_shared_expert_intermediate_size=moe.shared_ffn_hidden_size,
        moe_shared_expert_gate=moe.shared_gate,
        moe_latent_size=moe.latent_size,
        moe_router_score_function=moe.score_function,
        moe_router_topk_scaling_factor=None if moe.scaling_factor == 1.0 else moe.scaling_factor,
        moe_router_num_groups=None if moe.num_groups == 1 else moe.num_groups,
        moe_router_group_topk=None if moe.num_groups == 1 else moe.top_groups,
        moe_router_enable_expert_bias=moe.correction_bias,
        moe_router_bias_update_rate=moe.bias_update_rate,
    )
