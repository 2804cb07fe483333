"""The plain values of a checkpoint that holds weights and nothing else, as Megatron-LM looks for them."""

from argparse import Namespace
from pathlib import Path

from sft.config import ModelConfig
from sft.mcore.shards import CHECKPOINT_VERSION, model_arguments, write_common

# What Megatron keeps beside each of these, by layer: scales of FP8.  None means that there are none.
_WITH_STATE = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def write_plain(folder: Path, model: ModelConfig, *, padded_vocab_size: int, positions: int, bf16: bool) -> None:
    """The files beside the tensors.  positions: the longest sequence that the model is meant for, in tokens"""
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


def extra_states(num_layers: int) -> list[str]:
    """Keys of the objects that Megatron-LM expects beside the tensors."""
    return [
        f"decoder.layers.{module}._extra_state/shard_{layer}_{num_layers}"
        for module in _WITH_STATE
        for layer in range(num_layers)
    ]
