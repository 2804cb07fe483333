"""Builds the model chunks of a rank (megatron-core's GPTModel) from a recipe.

The model returns hidden states, never logits; the loss head (sft/mcore/loss) projects them.  The weights of a new model
have no values until `initial_weights.py` draws them, or `checkpoint_io` loads them.
"""

from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from sft.config import Config, ModelConfig
from sft.layers.adapters import Trained
from sft.mcore.backend import AttentionBackend
from sft.mcore.experts.layer import reduce_apart
from sft.mcore.lora import adapted, freeze
from sft.mcore.low_bits.frozen_base import FrozenBase
from sft.mcore.model.gpt import HiddenStatesGPT
from sft.mcore.model.layer import Layer
from sft.mcore.model.layer_spec import layer_spec
from sft.mcore.model.mtp import MultiTokenPrediction
from sft.mcore.modules.norm import UnscaledNorm
from sft.mcore.process_groups import ProcessGroups
from sft.mcore.sharding.model import ShardedModel
from sft.mcore.sharding.ranks import ShardRanks
from sft.parallel.layout import Layout, padded_vocab_size


def build(
    config: Config,
    layout: Layout,
    groups: ProcessGroups,
    core: TransformerConfig,
    vocab_size: int,
    backend: AttentionBackend,
    trained: Trained = Trained(),
    *,
    trains: bool = True,
) -> list[Any]:
    """The model chunks of this rank, one for each virtual stage, without values of weights.

    Each chunk is wrapped in a DistributedDataParallel, or with parallel.shard in a ShardedModel.

    core: the config of core's modules, from `core_config.transformer_config`
    vocab_size: rows of the embedding without padding
    trains: False freezes all weights, so core allocates no buffers for gradients
    """
    chunks = [_build_chunk(config, layout, groups, core, backend, vocab_size, i) for i in range(layout.virtual_stages)]
    keeps_graph = config.train.repeats_layers or config.run.fp8 is not None or layout.pp > 1
    for chunk in chunks:
        freeze.apply(chunk, trained, keeps_graph=keeps_graph)
        adapted.attach(chunk, trained.adapted, config.lora, groups)
        if not trains:
            chunk.requires_grad_(False)
        if config.model.base_dtype != "bf16":
            chunk.frozen_base = FrozenBase(chunk, [module for module in chunk.modules() if isinstance(module, Layer)])
    overlap = config.parallel.overlap and groups.device.type == "cuda" and layout.world_size > 1
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.optim.grad_dtype == "fp32",
        overlap_grad_reduce=overlap,
        use_distributed_optimizer=config.parallel.distributed_optimizer,
        check_for_nan_in_grad=False,  # the engine checks the norm, on all ranks at once
        # Makes the slices of the distributed optimizer begin at the first element of a block of moments.
        pad_buckets_for_high_nccl_busbw=config.optim.moments == "int8",
    )
    if config.parallel.shard == "weights" or config.parallel.shard == "gradients" and trains:
        ranks = {
            False: ShardRanks.of(groups.collection.dp_cp, layout.shard_ranks, timeout_s=groups.timeout_s),
            True: ShardRanks.of(groups.collection.expt_dp, layout.expert_shard_ranks, timeout_s=groups.timeout_s),
        }
        wrap = partial(ShardedModel, keeps_weights=config.parallel.shard == "gradients", overlap=overlap)
        return [wrap(core, ddp, chunk, ranks) for chunk in chunks]
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
    model, multiplier = config.model, _embedding_multiplier(config.model, core.params_dtype)
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
        embedding_norm=UnscaledNorm(model.norm_epsilon) if model.embedding_norm else None,
        embedding_multiplier=multiplier,
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
