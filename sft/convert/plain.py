"""The plain values of a checkpoint that holds weights and nothing else, as Megatron-LM looks for them."""

import io
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from sft.config import ModelConfig
from sft.mcore.shards import CHECKPOINT_VERSION, COMMON

_METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# What Megatron keeps beside each of these, by layer: scales of FP8.  None means that there are none.
_WITH_STATE = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def write_plain(folder: Path, model: ModelConfig, *, padded_vocab_size: int, positions: int, bf16: bool) -> None:
    """The files beside the tensors.  positions: the longest sequence that the model is meant for, in tokens"""
    stream = io.BytesIO()  # torch makes something else than an OSError of a full disk
    torch.save(_common(model, padded_vocab_size, positions, bf16), stream)
    (folder / COMMON).write_bytes(stream.getvalue())
    (folder / "metadata.json").write_text(json.dumps(_METADATA), encoding="ascii")


def extra_states(num_layers: int) -> list[str]:
    """Keys of the objects that Megatron-LM expects beside the tensors."""
    return [
        f"decoder.layers.{module}._extra_state/shard_{layer}_{num_layers}"
        for module in _WITH_STATE
        for layer in range(num_layers)
    ]


def _common(model: ModelConfig, padded_vocab_size: int, positions: int, bf16: bool) -> dict[str, Any]:
    groups, heads = model.resolved_query_groups, model.num_attention_heads
    args = Namespace(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=heads,
        num_query_groups=groups,
        group_query_attention=groups != heads,
        kv_channels=model.resolved_head_dim,
        qk_layernorm=model.qk_norm,
        add_qkv_bias=model.qkv_bias,
        add_bias_linear=False,
        add_position_embedding=True,  # Megatron-LM's default, which it leaves as it is for rotary positions
        position_embedding_type="rope",
        rotary_base=model.rope.base,
        norm_epsilon=model.norm_epsilon,
        swiglu=True,
        normalization="RMSNorm",
        untie_embeddings_and_output_weights=not model.tie_embeddings,
        padded_vocab_size=padded_vocab_size,
        seq_length=positions,
        max_position_embeddings=positions,
        bf16=bf16,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        data_parallel_size=1,
        world_size=1,
        ckpt_format="torch_dist",
        no_save_optim=True,
        no_save_rng=True,
        consumed_train_samples=0,
    )
    form = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    return {"args": args, "checkpoint_version": CHECKPOINT_VERSION, "iteration": 0, "content_metadata": form}
