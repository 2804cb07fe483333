"""Our model config -> megatron-core's GPTModel.

`TransformerConfig` is built in one function and never leaves the wall.  The model returns hidden states, never
logits: the loss head (`loss.py`) projects them.  Random initial weights are a function of (seed, parameter name) and
so the same on every layout.
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor

from sft.config import Config, ModelConfig
from sft.errors import ConfigError
from sft.mcore import fp8
from sft.mcore.attention import rope
from sft.mcore.attention.portable import PortableAttention
from sft.mcore.device import CPU_TRANSFORMER_FIELDS
from sft.mcore.experts import ExpertLayer, Router
from sft.mcore.layer import Layer
from sft.mcore.norm import RMSNorm
from sft.mcore.process_groups import ProcessGroups
from sft.parallel.layout import Layout, padded_vocab_size


class HiddenStatesGPT(GPTModel):
    """GPTModel whose last stage returns hidden states [t, 1, h] instead of logits."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    def output_weight(self) -> Tensor:
        """[padded vocabulary / tp, h] of the last stage, the input embedding where tied."""
        if self.share_embeddings_and_output_weights:
            weight: Tensor = self.shared_embedding_or_output_weight()
            return weight
        return self.output_layer.weight


_READ_BY_CORE = ("moe_permute_fusion",)  # of core's fields about experts


def transformer_config(config: Config, layout: Layout, device_type: str, backend: str) -> TransformerConfig:
    """The one place where a TransformerConfig is made."""
    model, dtype = config.model, torch.bfloat16 if config.run.precision == "bf16" else torch.float32
    fields: dict[str, Any] = dict(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.resolved_query_groups,
        kv_channels=model.resolved_head_dim,
        softmax_scale=rope.softmax_scale(model.rope, model.resolved_head_dim),
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        qk_layernorm=model.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=device_type == "cpu",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.virtual_stages if layout.virtual_stages > 1 else None,
        # Batched exchange is ambiguous where the next stage is also the previous one (pp 2, interleaved).
        overlap_p2p_comm=layout.virtual_stages > 1,
        batch_p2p_comm=layout.virtual_stages == 1,
        sequence_parallel=layout.sequence_parallel,
        cp_comm_type=config.parallel.cp_comm,
        variable_seq_lengths=True,  # packs differ in length, and pipeline stages must be told
        moe_token_dispatcher_type="alltoall",  # core demands it with variable_seq_lengths, dense or not
        **_expert_fields(model, layout, backend),
        calculate_per_token_loss=True,  # gradients are divided once, by the global count of supervised tokens
        **fp8.fields(config.run.fp8),
        **(CPU_TRANSFORMER_FIELDS if device_type == "cpu" else _fused(backend)),
        **_recompute_fields(config.train.recompute),
    )
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    unknown = sorted(set(model.megatron) - known)
    if unknown:
        raise ConfigError(f"model.megatron names fields that TransformerConfig does not have: {', '.join(unknown)}.")
    unread = sorted(
        n for n in model.megatron if n.startswith(("moe_", "num_moe")) and n not in (*fields, *_READ_BY_CORE)
    )
    if unread:
        raise ConfigError(
            f"model.megatron sets {', '.join(unread)}, which this trainer's experts do not read; what they can do is "
            f"in model.moe.*, and parallel.ep."
        )
    clash = sorted(set(model.megatron) & set(fields))
    if clash:
        raise ConfigError(
            f"model.megatron sets {', '.join(clash)}, which the recipe decides by keys of its own; use those."
        )
    try:
        return TransformerConfig(**fields, **model.megatron)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"megatron-core refuses this model: {error}") from error


def _fused(backend: str) -> dict[str, bool]:
    """Compiled by torch, where not by Transformer Engine; TORCHDYNAMO_DISABLE=1 has them run as they are written."""
    return dict(
        bias_activation_fusion=True,
        apply_rope_fusion=backend == "te",
        gradient_accumulation_fusion=False,  # looks for a mark on the weight, which what hooks give lacks
    )


def _expert_fields(model: ModelConfig, layout: Layout, backend: str) -> dict[str, Any]:
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
        moe_grouped_gemm=backend == "te",
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )


def _recompute_fields(recompute: str) -> dict[str, Any]:
    """Of whole layers; of parts of them see `layer.py`."""
    if recompute == "full":
        return dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    return {}


def layer_spec(config: Config, backend: str) -> ModuleSpec:
    """The modules of one transformer layer; both backends store the same checkpoint keys."""
    experts, train = config.model.moe.num_experts, config.train
    spec = _te_spec(config.model) if backend == "te" else _portable_spec(config.model)
    again = train.recompute == "selective" or train.mlp_tile is not None
    spec.module, spec.params = Layer, {"again": again, "tile": train.mlp_tile}
    return _with_experts(spec) if experts else spec


def _te_spec(model: ModelConfig) -> ModuleSpec:
    experts = model.moe.num_experts
    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts, moe_grouped_gemm=experts is not None, qk_layernorm=model.qk_norm
    )


def _portable_spec(model: ModelConfig) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(num_experts=model.moe.num_experts, qk_layernorm=model.qk_norm)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PortableAttention
    if model.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def _with_experts(spec: ModuleSpec) -> ModuleSpec:
    mlp, keys = spec.submodules.mlp, spec.submodules.sharded_state_dict_keys_map
    # Transformer Engine's spec has this norm apart where experts follow; the local one tells so of dense layers only.
    spec.submodules.sharded_state_dict_keys_map = {k: v for k, v in keys.items() if not k.startswith("pre_mlp")}
    if isinstance(mlp, ModuleSpec):  # up to core 0.18
        mlp.submodules.router, mlp.module = Router, ExpertLayer
    else:
        mlp.keywords["submodules"].router = Router
        spec.submodules.mlp = partial(ExpertLayer, **mlp.keywords)
    return spec


def build(
    config: Config, layout: Layout, groups: ProcessGroups, vocab_size: int, backend: str
) -> list[DistributedDataParallel]:
    """The chunks of the model that live on this rank (one, or `virtual_stages`), wrapped for data parallelism."""
    core = transformer_config(config, layout, groups.device.type, backend)
    chunks = [_build_chunk(config, layout, groups, core, backend, vocab_size, i) for i in range(layout.virtual_stages)]
    for chunk in chunks:
        initialise(chunk, config.run.seed, config.model.init_std, config.model.num_layers)
    overlap = config.parallel.overlap and groups.device.type == "cuda" and layout.world_size > 1
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        use_distributed_optimizer=config.parallel.distributed_optimizer,
        check_for_nan_in_grad=False,  # the engine looks at the norm, on all ranks at once
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
    backend: str,
    vocab_size: int,
    stage: int,
) -> HiddenStatesGPT:
    model = config.model
    vp_stage = stage if layout.virtual_stages > 1 else None
    spec = layer_spec(config, backend)
    chunk = HiddenStatesGPT(
        config=core,
        transformer_layer_spec=spec if backend == "te" else _with_final_norm(spec, core, groups, vp_stage),
        vocab_size=padded_vocab_size(vocab_size, layout.tp),
        max_sequence_length=config.data.seq_length,
        pre_process=groups.pp_rank == 0 and stage == 0,
        post_process=groups.is_last_stage and stage == layout.virtual_stages - 1,
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type="rope" if backend == "te" else "none",  # portable attention rotates by itself
        pg_collection=groups.collection,
        vp_stage=vp_stage,
    )
    if backend == "te":
        inv_freq = rope.frequencies(model.rope, model.resolved_head_dim).to(groups.device)
        chunk.rotary_pos_emb = rope.RotaryTable(inv_freq)
    chunk.to(groups.device)
    if layout.tp != layout.etp:
        _reduce_experts_apart(chunk)
    return chunk.bfloat16() if core.bf16 else chunk


def _with_final_norm(spec: ModuleSpec, core: TransformerConfig, groups: ProcessGroups, vp_stage: int | None) -> Any:
    """The block of this stage.  Given only a layer, core would choose the final norm by what is installed."""
    count = get_num_layers_to_build(core, vp_stage=vp_stage, pp_rank=groups.pp_rank)
    return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=RMSNorm)


def _reduce_experts_apart(chunk: HiddenStatesGPT) -> None:
    """Core does so where ep is above 1.  Where it is 1 it takes experts for dense weights, which their tp ranks see
    the same tokens of; but those see different ones, and each would keep a part of the gradient."""
    for name, param in chunk.named_parameters():
        if ".experts." in name:
            param.allreduce = False


@torch.no_grad()
def initialise(chunk: HiddenStatesGPT, seed: int, std: float, num_layers: int) -> None:
    """Random weights, the same on every layout: each is drawn whole, seeded by its name, and this rank's part kept.

    Matrices are normal with `std`; those that write to the residual stream with std / sqrt(2 num_layers)
    (GPT-2).  Biases are 0, norms 1.  Experts differ.
    """
    for shard in sharded_tensors(chunk.sharded_state_dict()):
        part = shard.data
        if "bias" in shard.key:
            part.zero_()
        elif part.dim() == 1:
            part.fill_(1.0)
        else:
            writes_residual = "linear_proj" in shard.key or "linear_fc2" in shard.key
            part.copy_(_draw(shard, seed, std / math.sqrt(2 * num_layers) if writes_residual else std))


def sharded_tensors(state: Any) -> Iterator[ShardedTensor]:
    """Every tensor of this rank that a sharded state dict describes, factories built."""
    if isinstance(state, ShardedTensor):
        if state.data is not None:
            yield state
    elif isinstance(state, ShardedTensorFactory):
        yield from sharded_tensors(state.build())
    elif isinstance(state, dict):
        for value in state.values():
            yield from sharded_tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from sharded_tensors(value)


def _draw(shard: ShardedTensor, seed: int, std: float) -> Tensor:
    """This rank's part of the whole parameter.  Leading axes (layer number, gate or up) go into the seed."""
    leading = shard.prepend_axis_num
    name = f"{shard.key}{shard.global_offset[:leading]}"
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    whole = torch.randn(shard.global_shape[leading:], generator=generator) * std
    offsets = shard.global_offset[leading:]
    return whole[tuple(slice(o, o + n) for o, n in zip(offsets, shard.data.shape))]
