"""Decides which fields of megatron-core's TransformerConfig `model.megatron` may set, and why it may not set others.

The tables name every field of every supported version of core, so a recipe is checked without an import of megatron.
tests/ranks/test_megatron_fields.py compares them with the installed core, and trains a step with each allowed field.
"""

import importlib.metadata
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """A field that a recipe may set.  meaning: for docs/reference/config.md"""

    values: tuple[bool, ...]
    meaning: str


REDUCED_MATMUL = "disable_bf16_reduced_precision_matmul"
PERMUTE_FUSION = "moe_permute_fusion"
# Both fields choose kernels of a GPU.  On a CPU, the test shows that core or torch gets the value, and that losses stay
# equal.
ALLOWED = {
    REDUCED_MATMUL: Allowed(
        values=(True, False),
        meaning="true: cuBLAS adds the partial sums of a bf16 matrix product in fp32.  Only a GPU shows it.",
    ),
    PERMUTE_FUSION: Allowed(
        values=(False,),
        meaning="false: plain torch sorts tokens by expert, not a kernel of Transformer Engine.  Only a GPU shows it.",
    ),
}
VERSIONS = ("0.16", "0.19")  # of core, with which a test trained a step with each field of ALLOWED

# Each key of a recipe, and the fields that it sets or replaces.  "@0.19": only this version of core has the field.
_OWN_KEYS = {
    "run.device": "use_cpu_initialization",
    "run.precision": "autocast_dtype bf16 enable_autocast fp16 params_dtype pipeline_dtype",
    "run.fp8": "fp8 fp8_amax_compute_algo fp8_amax_history_len fp8_dot_product_attention fp8_margin"
    " fp8_multi_head_attention fp8_param fp8_recipe",
    "run.deterministic": "deterministic_mode",
    "model.num_layers": "num_layers",
    "model.hidden_size": "hidden_size",
    "model.ffn_hidden_size": "ffn_hidden_size",
    "model.activation": "activation_func activation_func_clamp_value gated_linear_unit glu_linear_offset"
    " use_fused_weighted_squared_relu use_te_activation_func",
    "model.num_attention_heads": "num_attention_heads",
    "model.num_query_groups": "num_query_groups",
    "model.head_dim": "kv_channels",
    "model.norm_epsilon": "layernorm_epsilon",
    "model.norm_zero_centered": "layernorm_zero_centered_gamma",
    "model.qk_norm": "qk_layernorm",
    "model.qkv_bias": "add_qkv_bias",
    "model.mlp_bias": "add_bias_linear",
    "model.attention_sinks": "softmax_type",
    "model.attention_multiplier": "softmax_scale",
    "model.attention_output_gate": "attention_output_gate",
    "model.init_std": "embedding_init_method_std init_method_std",
    "model.init_from": "embedding_init_method init_method output_layer_init_method perform_initialization",
    "model.sliding_window": "window_size",
    "model.sliding_window_layers": "window_attn_skip_freq",
    "model.linear_attention.layers": "experimental_attention_variant linear_attention_freq",
    "model.linear_attention.num_key_heads": "linear_num_key_heads",
    "model.linear_attention.num_value_heads": "linear_num_value_heads",
    "model.linear_attention.key_head_dim": "linear_key_head_dim",
    "model.linear_attention.value_head_dim": "linear_value_head_dim",
    "model.linear_attention.conv_kernel": "linear_conv_kernel_dim",
    "model.mamba.num_heads": "mamba_num_heads",
    "model.mamba.head_dim": "mamba_head_dim",
    "model.mamba.num_groups": "mamba_num_groups",
    "model.mamba.state_dim": "mamba_state_dim",
    "model.latent_attention.kv_lora_rank": "multi_latent_attention",
    "model.rope.skip_layers": "no_rope_freq",
    "model.rope.interleaved": "rotary_interleaved",
    "model.moe.num_experts": "num_moe_experts",
    "model.moe.dense_layers": "moe_layer_freq",
    "model.moe.top_k": "moe_router_topk",
    "model.moe.ffn_hidden_size": "moe_ffn_hidden_size",
    "model.moe.shared_ffn_hidden_size": "moe_shared_expert_intermediate_size",
    "model.moe.latent_size": "moe_latent_size",
    "model.moe.shared_gate": "moe_shared_expert_gate",
    "model.moe.normalize_top_k": "moe_router_pre_softmax",
    "model.moe.score_function": "moe_router_score_function",
    "model.moe.scaling_factor": "moe_router_topk_scaling_factor",
    "model.moe.num_groups": "moe_router_num_groups",
    "model.moe.top_groups": "moe_router_group_topk",
    "model.moe.correction_bias": "moe_router_enable_expert_bias",
    "model.moe.bias_update_rate": "moe_router_bias_update_rate",
    "model.moe.aux_loss_coef": "moe_aux_loss_coeff moe_router_load_balancing_type",
    "model.moe.z_loss_coef": "moe_z_loss_coeff",
    "model.moe.capacity_factor": "moe_expert_capacity_factor moe_token_dropping",
    "parallel.tp": "tensor_model_parallel_size",
    "parallel.cp": "context_parallel_size",
    "parallel.pp": "pipeline_model_parallel_size",
    "parallel.ep": "expert_model_parallel_size",
    "parallel.etp": "expert_tensor_parallel_size",
    "parallel.virtual_stages": "virtual_pipeline_model_parallel_size",
    "parallel.sequence_parallel": "sequence_parallel",
    "parallel.cp_comm": "cp_comm_type",
    "parallel.cp_a2a": "hierarchical_context_parallel_sizes",
    "parallel.dynamic_cp": "hybrid_context_parallel max_seqlen_per_dp_cp_rank",
    "parallel.ep_comm": "moe_enable_deepep moe_flex_dispatcher_backend moe_token_dispatcher_type",
    "attention.backend": "apply_rope_fusion attention_backend moe_grouped_gemm transformer_impl",
    "loss.impl": "cross_entropy_fusion_impl cross_entropy_loss_fusion",
    "train.recompute": "moe_layer_recompute recompute_granularity recompute_method recompute_modules"
    " recompute_num_layers",
    "train.mlp_tile": "mlp_chunks_for_training@0.19",
    "train.offload_fraction": "activation_offload_fraction@0.19 cpu_offloading cpu_offloading_activations"
    " cpu_offloading_double_buffering cpu_offloading_num_layers cpu_offloading_retain_pinned_cpu_buffers@0.19"
    " cpu_offloading_weights fine_grained_activation_offloading fine_grained_offloading_max_inflight_offloads@0.19"
    " min_offloaded_tensor_size offload_modules",
    "train.mtp": "mtp_num_layers",
    "train.mtp_loss_weight": "mtp_loss_scaling_factor",
}
DECIDED = "is decided by the trainer, and no key changes it"
UNUSED = "has no effect in this trainer"
UNPROVEN = "is not proven: no test has trained a step with it"
# Why no key sets the other fields.
_REASONS = {
    # Fields that the trainer sets for every recipe, or by several keys.
    DECIDED: """
        attention_dropout batch_p2p_comm batch_p2p_sync bias_activation_fusion bias_dropout_fusion
        calculate_per_token_loss deallocate_pipeline_outputs finalize_model_grads_func grad_scale_func grad_sync_func
        gradient_accumulation_fusion hetereogenous_dist_checkpoint hidden_dropout masked_softmax_fusion
        moe_router_dtype no_sync_func normalization overlap_p2p_comm persist_layer_norm variable_seq_lengths
    """,
    # Fields that only parts of core read that this trainer does not use: inference, other layers, core's own router.
    UNUSED: """
        dsa_indexer_head_dim dsa_indexer_k_norm_epsilon@0.19 dsa_indexer_k_norm_fp32@0.19 dsa_indexer_loss_coeff
        dsa_indexer_n_heads dsa_indexer_rope_interleaved@0.19 dsa_indexer_rotate_activation@0.19
        dsa_indexer_scoring_relu@0.19 dsa_indexer_skip_topk_offset@0.19 dsa_indexer_topk dsa_indexer_topk_freq@0.19
        dsa_indexer_use_sparse_loss dsa_kernel_backend@0.19 inference_cuda_graph_scope@0.19
        inference_disable_triton_nvls_kernels@0.19 inference_grouped_gemm_backend@0.19
        inference_moe_disable_fused_quant_kernels@0.19 inference_moe_token_dispatcher_type@0.19
        inference_sampling_seed is_hybrid_model
        mamba_training_ssm_states_dtype@0.19 moe_input_jitter_eps moe_pad_experts_for_cuda_graph_inference@0.19
        moe_per_layer_logging moe_router_force_biased@0.19 moe_router_force_load_balancing moe_router_fusion
        moe_router_quantile_balancing_ema@0.19 moe_router_topk_limited_devices moe_token_drop_policy mrope_section
        nccl_all_reduce_for_prefill@0.19 symmetric_ar_type use_mamba_mem_eff_path
    """,
    # Fields that some path of core reads, or may read on a GPU, and with which no test trained a step.
    UNPROVEN: """
        _cpu_offloading_context account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        activation_func_fp8_input_store apply_query_key_layer_scaling apply_residual_connection_post_layernorm
        async_tensor_model_parallel_allreduce@0.16 attention_softmax_in_fp32 barrier_with_L1_time
        batch_invariant_mode clone_scatter_output_in_embedding config_logger_dir cuda_graph_impl
        cuda_graph_modules@0.19 cuda_graph_retain_backward_graph cuda_graph_scope cuda_graph_use_single_mempool
        cuda_graph_warmup_steps defer_embedding_wgrad_compute delay_offload_until_cuda_graph@0.19 delay_wgrad_compute
        delta_offload_bytes_across_pp_ranks@0.19 disable_parameter_transpose_cache distribute_saved_activations
        enable_cuda_graph ep_overlap_early_attn_memory_release experimental_attention_variant_loss_scale_func@0.19
        expert_gtp_weight_remat_size@0.19 expert_tensor_parallel_num_weight_shards@0.19 external_cuda_graph
        first_last_layers_bf16 flash_attention_version@0.19 flash_decode fp32_residual_connection fp4
        fp4_param fp4_quantizer_factory fp4_recipe fp8_interval fp8_output_proj@0.19 fp8_quantizer_factory
        fp8_wgrad fused_residual_rmsnorm@0.19 fused_single_qkv_rope gtp_weight_remat_size@0.19
        heterogeneous_block_specs high_priority_a2a_comm_stream@0.19 inference_fuse_tp_communication
        inference_rng_tracker init_model_with_meta_device kitchen_attention_backend log_max_attention_logit
        memory_efficient_layer_norm microbatch_group_size_per_vp_stage mlp_chunks_for_prefill moe_apply_probs_on_input
        moe_deepep_num_sms moe_enable_routing_replay moe_expert_rank_capacity_factor@0.19 moe_extended_tp@0.16
        moe_flex_dispatcher_num_sms@0.19 moe_grad_scale_func@0.19 moe_hybridep_num_blocks_permute@0.19
        moe_hybridep_num_blocks_unpermute@0.19 moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing@0.19
        moe_hybridep_pad_uneven_dispatch_inputs@0.19 moe_mlp_glu_interleave_size@0.19
        moe_ncclep_static_shape@0.19 moe_ncclep_zero_copy@0.19 moe_pad_expert_input_to_capacity moe_paged_stash@0.19
        moe_paged_stash_buffer_size_factor_cpu@0.19 moe_paged_stash_buffer_size_factor_cuda@0.19
        moe_paged_stash_page_size@0.19 moe_permute_fusion_into_hybridep@0.19 moe_router_padding_for_fp8
        moe_router_padding_for_quantization moe_shared_expert_glu_interleave_size@0.19 moe_shared_expert_overlap
        moe_single_grouped_bias@0.19 moe_single_grouped_weight@0.19 moe_use_legacy_grouped_gemm@0.16
        mtp_detach_heads@0.19 mtp_grad_scale_func@0.19 mtp_hybrid_override_pattern@0.19 mtp_standalone
        mtp_use_repeated_layer@0.19 mup_attn_scale_power@0.19 mup_base_head_dim@0.19 mup_base_hidden_size@0.19
        mup_embedding_mult@0.19 mup_output_mult@0.19 mup_width_mult@0.19 num_layers_at_end_in_bf16
        num_layers_at_start_in_bf16 num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
        num_microbatches_with_partial_activation_checkpoints overlap_dispatch_backward_with_experts_wgrad@0.19
        overlap_moe_expert_parallel_comm overlap_p2p_comm_warmup_flush param_sync_func
        pipeline_model_parallel_comm_backend pipeline_model_parallel_layout qk_clip qk_clip_alpha
        qk_clip_threshold qk_l2_norm quant_recipe tensor_parallel_num_weight_shards@0.19 test_mode timers
        tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad
        tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv tp_comm_overlap_rs
        tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs tp_only_amax_red use_grouped_gemm_for_dense_mlp@0.19
        use_grouped_gemm_for_shared_expert@0.19 use_inference_optimized_layers use_kitchen use_kitchen_attention
        use_mup@0.19 use_ring_exchange_p2p use_te_rng_tracker use_transformer_engine_op_fuser@0.19 wgrad_deferral_limit
    """,
}
_WORDS = {word: role for table in (_OWN_KEYS, _REASONS) for role, words in table.items() for word in words.split()}
# {field: the recipe key that sets it, or why no key does}, and {field: its version, if only one has it}
ROLES = {word.partition("@")[0]: role for word, role in _WORDS.items()}
_ONLY_IN = {name: version for name, _, version in (word.partition("@") for word in _WORDS) if version}


def fields_of(version: str) -> set[str]:
    """All fields of TransformerConfig in a version of core, such as 0.16."""
    return {*ALLOWED, *(name for name in ROLES if _ONLY_IN.get(name, version) == version)}


def installed() -> str | None:
    """The release of megatron-core on this machine, such as 0.16.1; None: there is none, so nothing trains here."""
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None


def why_not(name: str, value: object, release: str | None) -> str | None:
    """The reason why model.megatron may not set the field `name` to `value` with a release of core; None: it may.

    release: the result of `installed`; None counts as the newest supported version

    num_layers, 3, 0.16.1 -> has its own key; use model.num_layers
    """
    version = ".".join(release.split(".")[:2]) if release else max(VERSIONS)
    if version not in VERSIONS:
        supported = " or ".join(VERSIONS)
        return f"was never tried with megatron-core {release}, which is installed; leave it out, or use {supported}"
    if name in ALLOWED:
        is_listed = any(value is listed for listed in ALLOWED[name].values)  # `==` would accept 1 for True
        return None if is_listed else f"; expected {in_words(ALLOWED[name])}"
    settable = ", ".join(f"{field} ({in_words(entry)})" for field, entry in ALLOWED.items())
    instead = f"leave it out.  Fields that can be set: {settable}"
    if name not in ROLES:
        return f"is not a field of megatron-core's TransformerConfig; {instead}"
    role, home = ROLES[name], _ONLY_IN.get(name, version)
    refusal = f"has its own key; use {role}" if role in _OWN_KEYS else f"{role}; {instead}"
    if home == version:
        return refusal
    return f"is a field of megatron-core {home}, but {release} is installed.  Also with {home}, it {refusal}"


def in_words(entry: Allowed) -> str:
    """The values of a field, as YAML: true or false"""
    return " or ".join(str(value).lower() for value in entry.values)
