"""Finds keys that exclude a frozen base in low bits (model.base_dtype)."""

from collections.abc import Iterator
from typing import Any

KEY = "model.base_dtype"


def conflicts_of_base(config: Any) -> Iterator[tuple[str, str]]:
    """Yields (key, reason) of each conflict of model.base_dtype.  config: the Config, whose base is in low bits"""
    value, model = config.model.base_dtype, config.model
    if not config.lora.is_used:
        yield KEY, (
            "needs lora.rank, because only frozen weights can be in low bits; set lora.rank, for example 16, or use "
            "bf16"
        )
    if config.parallel.shards_gradients:
        yield "parallel.shard", (
            f"does not fit {KEY} = {value}: sharding keeps all weights of a layer, also frozen ones, in flat buffers "
            f"in bf16; use optimizer, or {KEY} = bf16"
        )
    if config.run.fp8 is not None:
        yield "run.fp8", (
            f"does not fit {KEY} = {value}, because Transformer Engine would keep 8-bit copies of dequantised weights; "
            f"use null, or {KEY} = bf16"
        )
    if model.init_from not in (None, "random"):
        yield KEY, (
            "reads the files of model.hf, but model.init_from names a Megatron checkpoint; use model.init_from = null, "
            "or bf16"
        )
    elif value == "as_stored" and model.init_from is not None:
        yield KEY, "needs the files of model.hf, but model.init_from is random; use nf4 or bf16"
    if value == "nf4" and config.lora.export == "merged" and config.checkpoint.export_hf != "none":
        yield "lora.export", (
            f"adds adapters to the weights of model.hf, but with {KEY} = nf4 they are trained beside other weights, "
            "rounded to 4 bits; use adapter, or checkpoint.export_hf = none"
        )
