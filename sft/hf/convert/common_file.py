"""What Megatron-LM reads beside the tensors of a checkpoint that holds weights only: common.pt, and extra states."""

from argparse import Namespace
from pathlib import Path

from sft.config import ModelConfig
from sft.mcore.checkpoint_io.engine_state import CHECKPOINT_VERSION, model_arguments, write_common

# Modules of a layer for which Megatron stores an extra state: FP8 scales, or None.  Norms have one under Transformer
# Engine only; Megatron ignores those that it does not ask for.
_ATTENTION = ("self_attention.linear_qkv", "self_attention.linear_proj")
_QK_NORM = ("self_attention.q_layernorm", "self_attention.k_layernorm")
_MLP = ("mlp.linear_fc1", "mlp.linear_fc2")
_BEFORE_EXPERTS = ("pre_mlp_layernorm",)
_EXPERT = ("mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2")


def write_common_file(folder: Path, model: ModelConfig, *, padded_vocab_size: int, positions: int, bf16: bool) -> None:
    """Write common.pt and metadata.json.  positions: the longest sequence that the model is meant for, in tokens"""
    args = Namespace(
        **model_arguments(model, padded_vocab_size=padded_vocab_size, positions=positions, bf16=bf16),
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        data_parallel_size=1,
        world_size=1,
        no_save_optim=True,
        no_save_rng=True,
        consumed_train_samples=0,
    )
    form = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    common = {"args": args, "checkpoint_version": CHECKPOINT_VERSION, "iteration": 0, "content_metadata": form}
    write_common(common, folder)


def extra_state_keys(model: ModelConfig) -> list[str]:
    """Keys of the objects that Megatron-LM expects beside the tensors."""
    layers, experts = range(model.num_layers), range(model.moe.num_experts or 0)
    modules = (*_ATTENTION, *(_QK_NORM if model.qk_norm else ()), *(_BEFORE_EXPERTS if experts else _MLP))
    return [
        "decoder.final_layernorm._extra_state/shard_0_1",
        *(_key(module, f"{layer}_{len(layers)}") for module in modules for layer in layers),
        *(
            _key(module, f"{layer}.{expert}_{len(layers)}.{len(experts)}")
            for module in _EXPERT
            for layer in layers
            for expert in experts
        ),
    ]


def _key(module: str, shard: str) -> str:
    return f"decoder.layers.{module}._extra_state/shard_{shard}"
