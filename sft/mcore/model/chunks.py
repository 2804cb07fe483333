"""Builds the model chunks of a rank (megatron-core's GPTModel) and their TransformerConfig from a recipe.

The model returns hidden states, never logits; the loss head (sft/mcore/loss) projects them.  The weights of a new model
have no values until `initial_weights.py` draws them, or `checkpoint_io` loads them.
"""

import importlib.util
import math
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from sft.config import Config, ModelConfig, ParallelConfig, TrainConfig
from sft.config.megatron_fields import PERMUTE_FUSION
from sft.errors import ConfigError
from sft.layers.adapters import Trained
from sft.mcore import fp8, pipeline
from sft.mcore.attention import rope
from sft.mcore.backend import AttentionBackend, params_dtype
from sft.mcore.device import CPU_TRANSFORMER_FIELDS
from sft.mcore.experts.layer import reduce_apart
from sft.mcore.lora import adapted, freeze
from sft.mcore.model.gpt import HiddenStatesGPT
from sft.mcore.model.layer_spec import layer_spec
from sft.mcore.model.mtp import MultiTokenPrediction
from sft.mcore.modules.gated_activation import GatedActivation
from sft.mcore.process_groups import ProcessGroups
from sft.parallel.layout import Layout, padded_vocab_size

# torch compiles the fused functions that Transformer Engine lacks.  With TORCHDYNAMO_DISABLE=1 they run uncompiled.
_CUDA_TRANSFORMER_FIELDS = dict(bias_activation_fusion=True)
# Core recomputes whole layers.  `layer.py` recomputes only the second half of a layer.
_FULL_RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def transformer_config(
    config: Config, layout: Layout, device_type: str, backend: AttentionBackend
) -> TransformerConfig:
    """Build core's TransformerConfig; no other function builds one.  Raises ConfigError if core refuses the fields."""
    model, dtype = config.model, params_dtype(config)
    fields: dict[str, Any] = dict(
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
        gated_linear_unit=True,
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
        **_dispatcher_fields(config.parallel, device_type),
        **_expert_fields(model, layout),
        deterministic_mode=config.run.deterministic,
        calculate_per_token_loss=True,  # gradients are divided once, by the global count of supervised tokens
        **fp8.fields(config.run.fp8),
        **{
            **backend.transformer_fields,
            **dict(gradient_accumulation_fusion=fuses_gradients(config.train, backend)),
            **(CPU_TRANSFORMER_FIELDS if device_type == "cpu" else _CUDA_TRANSFORMER_FIELDS),
            **_activation_fields(model),
        },
        **(_FULL_RECOMPUTE if config.train.recompute == "full" else {}),
    )
    defaults = {PERMUTE_FUSION: backend.library.is_te and model.moe.num_experts is not None}
    try:
        return TransformerConfig(**fields, **{**defaults, **model.megatron})
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"megatron-core refuses this model: {error}") from error


def _leave_without_value(weight: Tensor) -> None:
    """Fill a matrix with NaN, which stays until the matrix is loaded or drawn.  Core calls this to initialise it."""
    torch.nn.init.constant_(weight, math.nan)


def fuses_gradients(train: TrainConfig, backend: AttentionBackend) -> bool:
    """Whether core's kernel for the product of a weight's gradient adds its result to the fp32 sum of gradients.

    Core needs an extension of Apex for this, also with Transformer Engine.  Core marks a weight whose gradient the
    kernel has added.  With saved-tensor hooks, backward gets another tensor object for the weight, so the mark would be
    lost.  With train.mlp_tile, `recompute.py` adds the gradients of tiles.
    """
    has_hooks = train.offload_fraction > 0 or (train.recompute == "selective" and not backend.library.is_te)
    has_kernel = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    return has_kernel and not has_hooks and train.mlp_tile is None


def _dispatcher_fields(parallel: ParallelConfig, device_type: str) -> dict[str, Any]:
    """Fields for the dispatcher, which sends tokens to experts; also needed without experts, because core refuses its
    default dispatcher with variable_seq_lengths.  Raises ConfigError if deepep cannot run here."""
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
        moe_layer_freq=[int(model.has_experts(i + 1)) for i in range(model.num_layers)] if moe.dense_layers else 1,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )


def _activation_fields(model: ModelConfig) -> dict[str, Any]:
    """Fields for a GatedActivation; {} with core's SwiGLU.

    Core passes gate and up together only to an activation of Transformer Engine.  With these fields core builds one,
    and the layer spec names our class for it.
    """
    return dict(bias_activation_fusion=False, use_te_activation_func=True) if GatedActivation.fields(model) else {}


def build(
    config: Config,
    layout: Layout,
    groups: ProcessGroups,
    vocab_size: int,
    backend: AttentionBackend,
    *,
    trained: Trained = Trained(),
    trains: bool = True,
) -> list[DistributedDataParallel]:
    """The model chunks of this rank, wrapped for data parallelism; their weights have no values.

    There is one chunk per virtual stage.  trains: False freezes all weights, so core allocates no buffers for gradients
    """
    core = transformer_config(config, layout, groups.device.type, backend)
    chunks = [_build_chunk(config, layout, groups, core, backend, vocab_size, i) for i in range(layout.virtual_stages)]
    keeps_graph = config.train.recompute == "full" or config.run.fp8 is not None or layout.pp > 1
    for chunk in chunks:
        freeze.apply(chunk, trained, keeps_graph=keeps_graph)
        adapted.attach(chunk, trained.adapted, config.lora, groups)
        if not trains:
            chunk.requires_grad_(False)
    overlap = config.parallel.overlap and groups.device.type == "cuda" and layout.world_size > 1
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        use_distributed_optimizer=config.parallel.distributed_optimizer,
        check_for_nan_in_grad=False,  # the engine checks the norm, on all ranks at once
    )
    wrapped = [
        DistributedDataParallel(core, ddp, chunk, disable_bucketing=i > 0, pg_collection=groups.collection)
        for i, chunk in enumerate(chunks)
    ]
    core.no_sync_func = [c.no_sync for c in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    if overlap:
        core.grad_sync_func = [c.start_grad_sync for c in wrapped] if len(wrapped) > 1 else wrapped[0].start_grad_sync
    return wrapped


def _build_chunk(
    config: Config,
    layout: Layout,
    groups: ProcessGroups,
    core: TransformerConfig,
    backend: AttentionBackend,
    vocab_size: int,
    stage: int,
) -> HiddenStatesGPT:
    model = config.model
    vp_stage = stage if layout.virtual_stages > 1 else None
    num_layers = get_num_layers_to_build(core, vp_stage=vp_stage, pp_rank=groups.pp_rank)
    first = get_transformer_layer_offset(core, vp_stage=vp_stage, pp_rank=groups.pp_rank)
    layers = [layer_spec(config, backend, groups.collection.tp, first + number + 1) for number in range(num_layers)]
    rotary_table = backend.rotary_table(groups.device)
    mtp = partial(
        MultiTokenPrediction,
        core,
        partial(layer_spec, config, backend, groups.collection.tp, model.num_layers + 1),
        backend.library.final_norm,
        layer_number=model.num_layers + 1 - first,  # core adds `first`
        pg_collection=groups.collection,
        vp_stage=vp_stage,
    )
    chunk = HiddenStatesGPT(
        config=core,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=backend.library.final_norm),
        vocab_size=padded_vocab_size(vocab_size, layout.tp),
        max_sequence_length=config.data.seq_length,
        pre_process=groups.pp_rank == 0 and stage == 0,
        post_process=groups.is_last_stage and stage == layout.virtual_stages - 1,
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type="none" if rotary_table is None else "rope",
        pg_collection=groups.collection,
        vp_stage=vp_stage,
        embedding_multiplier=_embedding_multiplier(model, core.params_dtype),
        logits_scaling=model.logits_scaling,
        mtp=mtp if model.has_mtp else None,
        mtp_mode=config.train.mtp,
    )
    if rotary_table is not None:
        chunk.rotary_pos_emb = rotary_table
    chunk.to(groups.device)
    if layout.tp != layout.etp:
        reduce_apart(chunk)
    return chunk.bfloat16() if core.bf16 else chunk


def _embedding_multiplier(model: ModelConfig, dtype: torch.dtype) -> float:
    """The factor on embeddings.  For Gemma it is rounded to the dtype of the weights, as transformers rounds it."""
    rounded = torch.tensor(model.embedding_multiplier, dtype=torch.float32).to(dtype)
    return rounded.item() if model.round_embedding_multiplier else model.embedding_multiplier
