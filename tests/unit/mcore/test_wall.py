"""The names of megatron-core on which sft/mcore relies, so that an upgrade fails here, with the name of the difference.

No function of megatron-core runs: names are imported, signatures are read, and, where only the body shows it, the
source.
"""

import ast
import dataclasses
import importlib
import importlib.metadata
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from sft.config import megatron_fields
from sft.mcore import fp8
from sft.mcore.device import CPU_TRANSFORMER_FIELDS

MCORE = Path(__file__).resolve().parents[3] / "sft" / "mcore"
CORE = "megatron.core"

# Name -> parameters that the function, or the constructor of the class, must have.
NAMES: dict[str, str] = {
    "dist_checkpointing.core.CheckpointingConfig": "sharded_backend",
    "dist_checkpointing.dict_utils.nested_values": "x",
    "dist_checkpointing.mapping.ShardedObject": "key data global_shape global_offset replica_id",
    "dist_checkpointing.mapping.ShardedTensor": (
        "key data dtype local_shape global_shape global_offset axis_fragmentations replica_id "
        "prepend_axis_num allow_shape_mismatch"
    ),
    "dist_checkpointing.mapping.ShardedTensorFactory.build": "self",
    "dist_checkpointing.mapping.is_main_replica": "replica_id",
    "dist_checkpointing.strategies.checkpointable.CheckpointableShardedTensor.from_sh_ten": "sh_ten",
    "dist_checkpointing.strategies.fully_parallel.distribute_main_replicas_with_precomputed_distribution": (
        "sharded_state_dict parallelization_group precomputed_distribution"
    ),
    "dist_checkpointing.strategies.torch.MCoreLoadPlanner": (
        "shapes_validation_sharded_tensors allow_shape_mismatch_sharded_tensors"
    ),
    "distributed.DistributedDataParallel": "config ddp_config module disable_bucketing pg_collection",
    "distributed.DistributedDataParallel.no_sync": "self",
    "distributed.DistributedDataParallel.scale_gradients": "self scaling_factor",
    "distributed.DistributedDataParallel.start_grad_sync": "self",
    "distributed.DistributedDataParallel.zero_grad_buffer": "self",
    "distributed.DistributedDataParallelConfig": (
        "grad_reduce_in_fp32 overlap_grad_reduce use_distributed_optimizer check_for_nan_in_grad"
    ),
    "distributed.finalize_model_grads": "model num_tokens",
    "extensions.transformer_engine.TENorm": "config hidden_size eps",
    "extensions.transformer_engine.te_checkpoint": (
        "forward_func distribute_saved_activations get_rng_state_tracker tp_group"
    ),
    "fp8_utils.get_fp8_recipe": "config",
    "fusions.fused_bias_swiglu.weighted_bias_swiglu_impl": "input bias weights",
    "models.gpt.GPTModel": (
        "config transformer_layer_spec vocab_size max_sequence_length pre_process post_process "
        "share_embeddings_and_output_weights position_embedding_type pg_collection vp_stage"
    ),
    "models.gpt.GPTModel.forward": "self input_ids position_ids attention_mask packed_seq_params padding_mask",
    "models.gpt.GPTModel._postprocess": "self hidden_states",
    "models.gpt.GPTModel.shared_embedding_or_output_weight": "self",
    "models.gpt.GPTModel.sharded_state_dict": "self metadata",
    "optimizer.MegatronOptimizer.get_grad_stats_parallel_group": "self",
    "optimizer.MegatronOptimizer.get_parameters": "self",
    "optimizer.MegatronOptimizer.prepare_grads": "self",
    "optimizer.MegatronOptimizer.reload_model_params": "self",
    "optimizer.MegatronOptimizer.scale_loss": "self loss",
    "optimizer.MegatronOptimizer.step_with_ready_grads": "self",
    "optimizer.MegatronOptimizer.zero_grad": "self",
    "optimizer.OptimizerConfig": (
        "optimizer lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad bf16 params_dtype "
        "use_distributed_optimizer optimizer_cpu_offload optimizer_offload_fraction "
        "overlap_cpu_optimizer_d2h_h2d use_precision_aware_optimizer"
    ),
    "optimizer.clip_grads.clip_grad_by_total_norm_fp32": "parameters max_norm total_norm use_decoupled_grad",
    "optimizer.cpu_offloading.HybridDeviceOptimizer": "offload_fraction cpu_optimizer_cls param_update_in_fp32",
    "optimizer.cpu_offloading.HybridDeviceOptimizer._get_sub_optimizer_param_groups": "self offload_fraction",
    "optimizer.distrib_optimizer.DistributedOptimizer._get_model_param_range_map": "param",
    "optimizer.get_megatron_optimizer": "config model_chunks config_overrides use_gloo_process_groups",
    "optimizer.get_standard_config_overrides": "config",
    "optimizer_param_scheduler.OptimizerParamScheduler": (
        "optimizer init_lr max_lr min_lr lr_warmup_steps lr_decay_steps lr_decay_style start_wd end_wd "
        "wd_incr_steps wd_incr_style wsd_decay_steps lr_wsd_decay_style"
    ),
    "optimizer_param_scheduler.OptimizerParamScheduler.step": "self increment",
    "optimizer_param_scheduler.OptimizerParamScheduler.state_dict": "self",
    "packed_seq_params.PackedSeqParams": (
        "qkv_format cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q "
        "max_seqlen_kv cp_group local_cp_size"
    ),
    "parallel_state.initialize_model_parallel": (
        "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
        "context_parallel_size hierarchical_context_parallel_sizes expert_model_parallel_size "
        "expert_tensor_parallel_size create_gloo_process_groups distributed_timeout_minutes"
    ),
    "pipeline_parallel.p2p_communication.P2PCommunicator": "pp_group config",
    "pipeline_parallel.p2p_communication.P2PCommunicator._communicate_shapes": (
        "self tensor_send_next tensor_send_prev recv_prev recv_next"
    ),
    "pipeline_parallel.schedules.forward_backward_pipelining_with_interleaving": "p2p_communicator pg_collection",
    "pipeline_parallel.schedules.forward_backward_pipelining_without_interleaving": "p2p_communicator pg_collection",
    "pipeline_parallel.schedules.get_schedule_table": (
        "num_microbatches num_model_chunks microbatch_group_size_per_vp_stage"
    ),
    "tensor_parallel.checkpoint": "function distribute_saved_activations",
    "tensor_parallel.copy_to_tensor_model_parallel_region": "input_ group",
    "tensor_parallel.gather_from_sequence_parallel_region": "input_ group",
    "tensor_parallel.mappings.all_to_all": "group input_ output_split_sizes_ input_split_sizes",
    "tensor_parallel.model_parallel_cuda_manual_seed": "seed",
    "tensor_parallel.random._set_cuda_rng_state": "new_state",
    "tensor_parallel.reduce_from_tensor_model_parallel_region": "input_ group",
    "tensor_parallel.vocab_parallel_cross_entropy": "vocab_parallel_logits target",
    "transformer.ModuleSpec": "module submodules",
    "transformer.moe.experts.SequentialMLP.forward": (
        "self permuted_local_hidden_states tokens_per_expert permuted_probs"
    ),
    "transformer.moe.moe_layer.MoELayer": "config submodules layer_number pg_collection",
    "transformer.moe.moe_layer.MoELayer.forward": "self hidden_states intermediate_tensors padding_mask",
    "transformer.moe.moe_layer.MoELayer.preprocess": "self hidden_states probs routing_map",
    "transformer.moe.moe_layer.MoELayer.dispatch": "self hidden_states probs",
    "transformer.moe.moe_layer.MoELayer.combine": "self output",
    "transformer.moe.moe_layer.MoELayer.postprocess": "self output shared_expert_output",
    "transformer.moe.moe_utils.apply_router_token_dropping": "routing_probs routing_map router_topk capacity_factor",
    "transformer.moe.moe_utils.topk_routing_with_score_function": "logits topk use_pre_softmax",
    "transformer.moe.router.TopKRouter": "config pg_collection",
    "transformer.moe.token_dispatcher.all_to_all": "group input_ output_split_sizes_ input_split_sizes",
    "transformer.transformer_block.TransformerBlockSubmodules": "layer_specs layer_norm",
    "transformer.transformer_block.get_num_layers_to_build": "config vp_stage pp_rank",
    "transformer.transformer_layer.TransformerLayer": "config submodules layer_number",
}

# Fields of TransformerConfig that are set outside of chunks.py.
FIELDS = {"moe_grouped_gemm", "finalize_model_grads_func", "grad_scale_func", "grad_sync_func", "no_sync_func"}
FIELDS |= {*CPU_TRANSFORMER_FIELDS, *(name for recipe in (None, *fp8._FIELDS) for name in fp8.fields(recipe))}


def find(name: str) -> Any:
    """megatron.core.`name`, of any kind; a name that a package exports has priority over a module of this name."""
    found, path = importlib.import_module(CORE), CORE
    for part in name.split("."):
        path = f"{path}.{part}"
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(path)
    return found


def text(name: str) -> str:
    """The source of megatron.core.`name` without white space, because line breaks do not matter."""
    return re.sub(r"\s+", "", inspect.getsource(find(name)))


# --- names -------------------------------------------------------------------------------------------------


def imported() -> dict[str, str]:
    """The imports of sft/mcore, and the name of each there: {"tensor_parallel.random": "core_random", ...}"""
    names = {}
    for path in MCORE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron"):
                assert node.module is not None
                for alias in node.names:
                    names[f"{node.module}.{alias.name}".removeprefix(f"{CORE}.")] = alias.asname or alias.name
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("megatron") for alias in node.names), path
    return names


def test_every_imported_name_is_there() -> None:
    """Also every `parallel_state.x` of an imported module."""
    modules = {local: name for name, local in imported().items() if inspect.ismodule(find(name))}
    assert {"parallel_state", "tensor_parallel", "core_random"} <= modules.keys()
    for path in MCORE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                find(f"{modules[node.value.id]}.{node.attr}")


@pytest.mark.parametrize("name", NAMES)
def test_name_and_parameters(name: str) -> None:
    parameters = inspect.signature(find(name)).parameters
    assert set(NAMES[name].split()) <= parameters.keys()


def test_transformer_config_has_every_field_that_is_set() -> None:
    """core_config.py gives the fields in calls of dict."""
    tree = ast.parse((MCORE / "model/core_config.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = {keyword.arg for call in calls if ast.unparse(call.func) == "dict" for keyword in call.keywords}
    found = (named | FIELDS) - {None}
    assert {"calculate_per_token_loss", "moe_router_topk", "recompute_method"} <= found and len(found) > 55
    assert found <= {field.name for field in dataclasses.fields(find("transformer.TransformerConfig"))}
    unsettled = (megatron_fields.UNUSED, megatron_fields.UNPROVEN)
    settled = {name for name, role in megatron_fields.ROLES.items() if role not in unsettled}
    # A recipe may not set these fields, except the last, whose value is a default.
    assert found <= {*settled, "moe_permute_fusion"}


def test_the_tables_of_model_megatron_are_those_of_the_installed_version() -> None:
    """A new version of core needs a table: its new fields, and the fields with which a step was trained."""
    version = importlib.metadata.version("megatron-core").rpartition(".")[0]
    fields = {field.name for field in dataclasses.fields(find("transformer.TransformerConfig"))}
    assert megatron_fields.fields_of(version) == fields


def test_the_second_half_of_a_layer_is_a_method_of_hidden_states() -> None:
    """`layer.py` calls it for some of the tokens; hidden states are its first argument."""
    layer = find("transformer.transformer_layer.TransformerLayer")
    assert list(inspect.signature(layer._forward_mlp).parameters)[:2] == ["self", "hidden_states"]
    assert "output=self._forward_mlp(hidden_states," in text("transformer.transformer_layer.TransformerLayer.forward")


def test_optimizers_keep_their_parameters_where_we_look() -> None:
    distributed = text("optimizer.distrib_optimizer.DistributedOptimizer")
    assert "self.model_param_group_index_map" in distributed
    assert 'param_range_map["param"]' in distributed or "param_range_map['param']" in distributed
    mixed = text("optimizer.optimizer.Float16OptimizerWithFloat16Params")
    assert {"float16_groups", "fp32_from_float16_groups", "fp32_from_fp32_groups"} <= set(
        re.findall(r"self\.(\w+_groups)=", mixed)
    )


def test_the_hybrid_optimizer_is_made_as_we_read_it() -> None:
    """`optimizer/offload.py` finds each Adam and fp32 copy in megatron-core's HybridDeviceOptimizer.  On a CPU,
    `device.py` makes parameters that this optimizer takes for those of a GPU."""
    hybrid = text("optimizer.cpu_offloading.HybridDeviceOptimizer")
    assert "self.param_to_inner_param[param]=inner_param" in hybrid
    assert "self.param_to_fp32_param,)=self._get_sub_optimizer_param_groups(self.offload_fraction)" in hybrid
    assert "param=param.detach().clone().cpu().pin_memory()" in hybrid
    assert "param=param.detach().clone().float()" in hybrid
    assert hybrid.count("is_cuda") == 3
    assert "fused=True" in text("optimizer._get_megatron_optimizer_based_on_param_groups")
    given = text("optimizer.distrib_optimizer.DistributedOptimizer._copy_model_grads_to_main_grads")
    assert "ifself.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:" in given
    assert "use_precision_aware_optimizer_no_fp8_or_ds_fp8" in text("optimizer.OptimizerConfig.__post_init__")


def test_tensors_of_the_optimizer_are_called_as_core_calls_them() -> None:
    """`optimizer_shards.py` writes these tensors itself, and megatron-core reads them."""
    distributed = text("optimizer.distrib_optimizer.DistributedOptimizer.sharded_param_state_fully_reshardable")
    assert "prefix='optimizer.state'" in distributed
    assert "key=f'{prefix}.{state_key}.{sharded_metadata.key}'" in distributed
    assert '"param"' in text("optimizer.distrib_optimizer.DistributedOptimizer.get_parameter_state_dp_zero")
    mixed = text("optimizer.optimizer.Float16OptimizerWithFloat16Params.sharded_state_dict")
    assert "optimizer.state.fp32_param" in mixed


# --- calls from megatron-core to sft -----------------------------------------------------------------------


def test_forward_ends_in_postprocess_and_names_the_hidden_states() -> None:
    """HiddenStatesGPT._postprocess gets them by keyword or as first argument, and returns them."""
    assert "returnself._postprocess(hidden_states=hidden_states," in text("models.gpt.GPTModel.forward")
    parameters = list(inspect.signature(find("models.gpt.GPTModel._postprocess")).parameters)
    assert parameters[:2] == ["self", "hidden_states"]


def test_core_asks_for_shapes_once_per_exchange() -> None:
    """`pipeline.PackCommunicator` relies on it.  Otherwise, the host waits only with batch_p2p_sync."""
    exchange = text("pipeline_parallel.p2p_communication.P2PCommunicator._communicate")
    arguments = "tensor_send_next,tensor_send_prev,recv_prev,recv_next"
    call = f"recv_prev_shape,recv_next_shape=self._communicate_shapes({arguments})"
    assert f"ifconfig.variable_seq_lengthsorconfig.mtp_standalone:{call}" in exchange
    assert "ifconfig.batch_p2p_commandconfig.batch_p2p_sync:" in exchange and exchange.count("synchronize()") == 1
    assert text("pipeline_parallel.p2p_communication.P2PCommunicator").count("self._communicate_shapes(") == 1


def test_rotary_embedding_is_asked_as_our_table_answers() -> None:
    preprocess = text("models.gpt.GPTModel._preprocess")
    arguments = "inference_context,self.decoder,decoder_input,self.config,packed_seq_params"
    assert f"self.rotary_pos_emb.get_rotary_seq_len({arguments})" in preprocess
    assert re.search(r"self\.rotary_pos_emb\(rotary_seq_len,packed_seq=.{1,80},cp_group=", preprocess)


def test_core_attention_is_built_and_called_as_portable_attention_is_written() -> None:
    source = text("transformer.attention.Attention")
    for name in ("config", "layer_number", "attn_mask_type", "attention_type", "cp_comm_type", "softmax_scale"):
        assert re.search(rf"submodules\.core_attention\([^)]*\b{name}=", source), name
    assert re.search(r"submodules\.core_attention\([^)]*pg_collection=self\.pg_collection", source)
    keywords = r"attn_mask_type=\w+,attention_bias=\w+,packed_seq_params="
    assert re.search(rf"core_attention\)?\(query,key,value,attention_mask,{keywords}", source)


def test_outputs_are_added_to_the_residual_stream_as_ours_are() -> None:
    layer = text("transformer.transformer_layer.TransformerLayer")
    for slot in ("self_attn_bda", "mlp_bda"):
        assert f"self.{slot}(self.training,self.config.bias_dropout_fusion)(" in layer


def test_gradients_of_norms_of_queries_and_keys_are_summed_over_tp() -> None:
    """megatron-core finds them by name, whether or not sequence parallelism splits tokens: each rank has gradients of
    its own heads only."""
    module = inspect.getmodule(find("distributed.finalize_model_grads"))
    assert module is not None
    source = re.sub(r"\s+", "", inspect.getsource(module))
    assert 'config.qk_layernormand("q_layernorm"innameor"k_layernorm"inname)' in source


def test_the_shared_expert_is_built_and_added_by_core() -> None:
    layer = text("transformer.moe.moe_layer")
    assert "gate=self.config.moe_shared_expert_gate" in layer and "output=output+shared_expert_output" in layer
    assert "'sequence_parallel',self.config.sequence_parallel" in text("transformer.moe.shared_experts")


def test_layers_of_experts_are_called_as_adapted_ones_are_written() -> None:
    """`experts/grouped.py` itself computes the part between the layers, if megatron-core has no grouped layers."""
    grouped = text("transformer.moe.experts.TEGroupedMLP.forward")
    assert re.search(r"self\.linear_fc1\)?\(permuted_local_hidden_states,tokens_per_expert", grouped)
    assert re.search(r"self\.linear_fc2\)?\(\w+,tokens_per_expert\)", grouped)
    between = text("transformer.mlp.MLP.forward")
    assert "weighted_bias_swiglu_impl(intermediate_parallel,bias_parallel,per_token_scale.unsqueeze(-1)," in between
    assert "intermediate_parallel=intermediate_parallel*per_token_scale.unsqueeze(-1)" in between


def test_norms_are_built_as_ours_is_written() -> None:
    layer = text("transformer.transformer_layer.TransformerLayer")
    attention = text("transformer.attention.SelfAttention")
    for slot, source in (("input_layernorm", layer), ("pre_mlp_layernorm", layer), ("q_layernorm", attention)):
        assert re.search(rf"self\.{slot}=.{{1,200}}?eps=self\.config\.layernorm_epsilon", source), slot


@pytest.mark.parametrize("kind", ["no_pipelining", "pipelining_without_interleaving", "pipelining_with_interleaving"])
def test_schedules_take_what_the_engine_passes(kind: str) -> None:
    schedule = find(f"pipeline_parallel.schedules.forward_backward_{kind}")
    ours = {"forward_step_func", "data_iterator", "model", "num_microbatches", "seq_length", "micro_batch_size"}
    parameters = inspect.signature(schedule).parameters
    assert ours | {"forward_only"} <= parameters.keys()
    required = {n for n, p in parameters.items() if p.default is inspect.Parameter.empty}
    assert required <= ours


def test_a_loss_of_three_is_summed_and_counted() -> None:
    """(loss sum, count, report): schedules divide nothing, and pass the count to finalize_model_grads."""
    schedules = text("pipeline_parallel.schedules")
    assert "output_tensor,num_tokens,loss_reduced=outputs" in schedules
    assert "ifnotconfig.calculate_per_token_loss:" in schedules
    assert schedules.count("total_num_tokensifconfig.calculate_per_token_losselseNone") == 3  # in every schedule
    finalize = text("distributed.finalize_model_grads")
    assert "ifnum_tokensisnotNone:" in finalize  # given None, it divides nothing: the engine divides
    assert "self.grad_data*=scaling_factor" in text("distributed.param_and_grad_buffer")


def test_a_gradient_may_be_added_to_main_grad_beforehand() -> None:
    """The fused loss head adds it, and marks the gradient as megatron-core's linear layers do."""
    hook = text("distributed.DistributedDataParallel._make_backward_post_hook")
    added = "notparam.grad_added_to_main_gradorgetattr(param,'zero_out_wgrad',False)"
    assert f"ifparam.gradisnotNoneand({added}):param.main_grad.add_(param.grad.data)param.grad=None" in hook
    assert "param.grad_added_to_main_grad=False" in text("distributed.DistributedDataParallel.zero_grad_buffer")
    module = text("models.common.language_module.language_module.LanguageModule")
    assert "self.shared_embedding_or_output_weight().zero_out_wgrad=True" in module


def test_rotation_restarts_at_every_document_unless_the_table_is_as_long_as_the_pack() -> None:
    """The table has the length of the longest document, which is the length of the pack only if the pack is one
    document."""
    rotate = text("models.common.embeddings.rope_utils._apply_rotary_pos_emb_thd")
    assert re.search(r"freqs\.size\(0\)==(cu_seqlens\[-1\]|total_seqlen)", rotate)
