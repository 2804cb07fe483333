"""Builds megatron-core's TransformerConfig from the recipe."""

import importlib.util
import math
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from sft.config import Config, ModelConfig, ParallelConfig, TrainConfig
from sft.config.megatron_fields import PERMUTE_FUSION
from sft.errors import ConfigError
from sft.layers.mlps.limits import has_plain_swiglu
from sft.layers.weight import has_gate
from sft.mcore import fp8, pipeline
from sft.mcore.attention import rope
from sft.mcore.backend import AttentionBackend, params_dtype
from sft.mcore.device import CPU_TRANSFORMER_FIELDS
from sft.parallel.layout import Layout

# torch compiles the fused functions that Transformer Engine lacks.  With TORCHDYNAMO_DISABLE=1 they run uncompiled.
_CUDA_TRANSFORMER_FIELDS = dict(bias_activation_fusion=True)
# Fields for layers with our `Activation`.  Core passes gate and up together only to an activation of Transformer
# Engine.  With these fields core builds such an activation, and the layer spec names our class for it.
_OWN_ACTIVATION = dict(bias_activation_fusion=False, use_te_activation_func=True)
# Core recomputes whole layers.  `layer.py` recomputes only the second half of a layer.
_FULL_RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def transformer_config(
    config: Config, layout: Layout, device_type: str, backend: AttentionBackend
) -> TransformerConfig:
    """Build core's TransformerConfig; no other function builds one.  Raises ConfigError if core refuses the fields."""
    model, dtype = config.model, params_dtype(config)
    fuses = fuses_gradients(config.train)
    fields: dict[str, Any] = dict(
        **_dispatcher_fields(config.parallel, device_type),
        **_expert_fields(model, layout),
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.resolved_query_groups,
        kv_channels=model.resolved_head_dim,
        softmax_scale=rope.softmax_scale(model),
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        layernorm_zero_centered_gamma=model.norm_zero_centered,
        qk_layernorm=model.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        attention_output_gate=model.attention_output_gate,
        hetereogenous_dist_checkpoint=not model.stacks_layers,  # core then gives each layer its own tensors
        gated_linear_unit=has_gate(model),
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method=_leave_without_value,
        output_layer_init_method=_leave_without_value,
        embedding_init_method=_leave_without_value,
        use_cpu_initialization=device_type == "cpu",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        **pipeline.transformer_fields(layout),
        sequence_parallel=layout.sequence_parallel,
        cp_comm_type=config.parallel.cp_comm,
        deterministic_mode=config.run.deterministic,
        calculate_per_token_loss=True,  # gradients are divided once, by the global count of supervised tokens
        **fp8.fields(config.run.fp8),
        **{
            **backend.transformer_fields,
            **dict(gradient_accumulation_fusion=fuses),
            **(CPU_TRANSFORMER_FIELDS if device_type == "cpu" else _CUDA_TRANSFORMER_FIELDS),
            **(_OWN_ACTIVATION if not has_plain_swiglu(model) else {}),
        },
        **(_FULL_RECOMPUTE if config.train.repeats_layers else {}),
    )
    defaults = {PERMUTE_FUSION: backend.library.is_te and model.moe.num_experts is not None}
    try:
        return TransformerConfig(**fields, **{**defaults, **model.megatron})
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"megatron-core refuses this model: {error}") from error


def _leave_without_value(weight: Tensor) -> None:
    """Fill a matrix with NaN, until its values are loaded or drawn.  Core calls this function to initialise weights."""
    torch.nn.init.constant_(weight, math.nan)


def fuses_gradients(train: TrainConfig) -> bool:
    """Whether core's kernel for the product of a weight's gradient adds its result to the fp32 sum of gradients.

    Core needs an extension of Apex for this, also with Transformer Engine.  Core marks a weight whose gradient the
    kernel has added.  With saved-tensor hooks, backward gets another tensor object for the weight, so the mark would be
    lost.  Everything that recomputes or offloads has such hooks (`kept_calls.py`, `saved_tensors.py`), or adds
    gradients of tiles itself.
    """
    has_kernel = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    return has_kernel and not train.repeats_parts


def _dispatcher_fields(parallel: ParallelConfig, device_type: str) -> dict[str, Any]:
    """Fields for the dispatcher, which sends tokens to experts.  Raises ConfigError if deepep cannot run here.

    A model without experts needs the fields, too: core refuses its default dispatcher with variable_seq_lengths.
    """
    if parallel.ep_comm == "alltoall":
        return dict(moe_token_dispatcher_type="alltoall")
    if device_type != "cuda" or importlib.util.find_spec("deep_ep") is None:
        why = "runs on CUDA only, and this run is on the CPU" if device_type != "cuda" else "is not installed here"
        raise ConfigError(
            "parallel.ep_comm = deepep needs the package deep_ep (https://github.com/deepseek-ai/DeepEP), which "
            f"{why}.  parallel.ep_comm=alltoall runs everywhere."
        )
    return dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep")


def _expert_fields(model: ModelConfig, layout: Layout) -> dict[str, Any]:
    moe = model.moe
    if moe.num_experts is None:
        return {}
    return dict(
        num_moe_experts=moe.num_experts,
        moe_ffn_hidden_size=model.resolved_expert_ffn,
        moe_router_topk=moe.top_k,
        moe_router_pre_softmax=not moe.normalize_top_k,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=moe.aux_loss_coef,
        moe_z_loss_coeff=moe.z_loss_coef,
        moe_expert_capacity_factor=moe.capacity_factor,
        moe_shared_expert_intermediate_size=moe.shared_ffn_hidden_size,
        moe_shared_expert_gate=moe.shared_gate,
        moe_layer_freq=[int(model.has_experts(i + 1)) for i in range(model.num_layers)] if moe.is_mixed else 1,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
