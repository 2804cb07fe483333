"""The arguments of Megatron-LM that describe a model, as a checkpoint stores them."""

from typing import Any

from sft.config import ModelConfig


def model_arguments(model: ModelConfig, *, padded_vocab_size: int, positions: int, bf16: bool) -> dict[str, Any]:
    """The arguments of Megatron-LM that describe the model.  positions: the length of its longest sequence"""
    skipped = model.rope.skip_layers
    return dict(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.resolved_query_groups,
        group_query_attention=model.resolved_query_groups != model.num_attention_heads,
        kv_channels=model.resolved_head_dim,
        qk_layernorm=model.qk_norm or model.latent_attention.is_used,
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
        **_linear_attention_arguments(model),
        **_latent_attention_arguments(model),
        **expert_arguments(model),
    )


def _activation_arguments(model: ModelConfig) -> dict[str, Any]:
    """quick_geglu is gate * sigmoid(1.702 * gate) * (up + glu_linear_offset)."""
    if model.activation != "clamped_swiglu":
        return dict(swiglu=model.activation == "swiglu")
    return dict(
        swiglu=False,
        quick_geglu=True,
        glu_linear_offset=1.0,
        activation_func_clamp_value=model.activation_limit,
    )


def _window_arguments(model: ModelConfig) -> dict[str, Any]:
    if model.sliding_window is None:
        return {}
    has_window = [int(model.window_of(number + 1) is not None) for number in range(model.num_layers)]
    return dict(window_size=(model.sliding_window - 1, 0), window_attn_skip_freq=has_window)


def expert_arguments(model: ModelConfig) -> dict[str, Any]:
    """The arguments about experts."""
    moe = model.moe
    if moe.num_experts is None:
        return {"num_experts": None}
    return dict(
        num_experts=moe.num_experts,
        moe_layer_freq=[int(model.has_experts(i + 1)) for i in range(model.num_layers)] if moe.dense_layers else 1,
        moe_ffn_hidden_size=model.resolved_expert_ffn,
        moe_router_topk=moe.top_k,
        moe_router_pre_softmax=not moe.normalize_top_k,
        moe_shared_expert_intermediate_size=moe.shared_ffn_hidden_size,
        moe_shared_expert_gate=moe.shared_gate,
        moe_router_score_function=moe.score_function,
        moe_router_topk_scaling_factor=None if moe.scaling_factor == 1.0 else moe.scaling_factor,
        moe_router_num_groups=None if moe.num_groups == 1 else moe.num_groups,
        moe_router_group_topk=None if moe.num_groups == 1 else moe.top_groups,
        moe_router_enable_expert_bias=moe.correction_bias,
        moe_router_bias_update_rate=moe.bias_update_rate,
    )


def _latent_attention_arguments(model: ModelConfig) -> dict[str, Any]:
    """Megatron-LM always rotates neighbouring numbers here.  Its qk_layernorm are norms of latents."""
    latent, rope = model.latent_attention, model.rope
    if not latent.is_used:
        return {}
    sizes = dict(
        multi_latent_attention=True,
        q_lora_rank=latent.q_lora_rank,
        kv_lora_rank=latent.kv_lora_rank,
        qk_head_dim=latent.qk_nope_head_dim,
        qk_pos_emb_head_dim=latent.qk_rope_head_dim,
        v_head_dim=latent.v_head_dim,
    )
    if rope.scaling != "yarn":
        return dict(sizes, rope_type="rope")
    return dict(
        sizes,
        rope_type="yarn",
        rotary_scaling_factor=rope.factor,
        original_max_position_embeddings=rope.original_max_position,
        beta_fast=rope.beta_fast,
        beta_slow=rope.beta_slow,
        mscale=rope.mscale,
        mscale_all_dim=rope.mscale_all_dim or 0.0,
    )


def _linear_attention_arguments(model: ModelConfig) -> dict[str, Any]:
    linear = model.linear_attention
    if not linear.layers:
        return {}
    return dict(
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[int(number + 1 in linear.layers) for number in range(model.num_layers)],
        linear_num_key_heads=linear.num_key_heads,
        linear_num_value_heads=linear.num_value_heads,
        linear_key_head_dim=linear.key_head_dim,
        linear_value_head_dim=linear.value_head_dim,
        linear_conv_kernel_dim=linear.conv_kernel,
    )
