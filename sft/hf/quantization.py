"""Reads from `quantization_config` of a config.json how the weights of a quantised model are dequantised.

Supported: `fp8` with one scale per block or per matrix (DeepSeek, Qwen3, Ministral 3), `compressed-tensors` in FP8 with
one scale per matrix, row or block, and `mxfp4` (gpt-oss).  Everything else is refused by name.  `dequantised.py` and
`mxfp4.py` dequantise the weights.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

QUANTIZATION = "quantization_config"
_SUPPORTED = "fp8 (one scale per block or matrix), compressed-tensors with FP8 weights, and mxfp4 are supported"
# Accepted keys of `fp8`: this module reads them, the files show their meaning, or they do not affect stored weights.
_FP8_KEYS = {
    *("quant_method", "weight_block_size", "fmt", "activation_scheme", "modules_to_not_convert", "ignored_layers"),
    *("dequantize", "scale_fmt"),
}
_MXFP4_KEYS = {"quant_method", "modules_to_not_convert", "dequantize"}
_SUFFIX = {"fp8": "_scale_inv", "compressed-tensors": "_scale"}
# Scales of activations, which are dropped, because only FP8 arithmetic needs them.
_ACTIVATION_SCALES = ("activation_scale", "input_scale", "output_scale")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How to dequantise tensors of type F8_E4M3: value = stored value * scale, in fp32, rounded to `dtype`."""

    suffix: str  # the scale of the tensor X is the tensor X + suffix
    block: tuple[int, int] | None  # rows and columns that share a scale; None: one scale per matrix or row
    dtype: str  # name in safetensors of the type that config.json gives the model

    def scale_of(self, name: str) -> str:
        return name + self.suffix

    def activation_scales_of(self, name: str) -> list[str]:
        """q_proj.weight -> q_proj.activation_scale, ..."""
        return [f"{name.rpartition('.')[0]}.{scale}" for scale in _ACTIVATION_SCALES]


@dataclass(frozen=True, kw_only=True)
class Mxfp4:
    """Experts in MXFP4.  dtype: name in safetensors of the type that config.json gives the model"""

    dtype: str


def scheme_of(content: Mapping[str, Any]) -> tuple[Scheme | Mxfp4 | None, list[str]]:
    """The scheme of a config.json, and a list of problems.  No scheme: the weights are not quantised.

    {"quant_method": "fp8", "weight_block_size": [128, 128]} -> Scheme(suffix="_scale_inv", block=(128, 128), ...), []
    """
    config = content.get(QUANTIZATION)
    if config is None:
        return None, []
    method = config.get("quant_method") if isinstance(config, dict) else None
    dtype = {"float16": "F16", "float32": "F32"}.get(str(content.get("dtype", content.get("torch_dtype"))), "BF16")
    if method == "mxfp4":
        problems = _unknown(config, _MXFP4_KEYS)
        return (None if problems else Mxfp4(dtype=dtype)), problems
    if method == "fp8":
        block = config.get("weight_block_size", [128, 128])  # transformers' default
        problems = _unknown(config, _FP8_KEYS)
        if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn", None):
            problems.append(f"{QUANTIZATION}.fmt = {json.dumps(config['fmt'])} is not supported, only e4m3")
    elif method == "compressed-tensors":
        block, problems = _compressed(config)
    else:
        return None, [f"{QUANTIZATION} has quant_method = {json.dumps(method)}, which is not supported; {_SUPPORTED}"]
    if block is not None and not _is_block(block):
        problems.append(f"{QUANTIZATION} has blocks of {json.dumps(block)}, which are not [rows, columns]")
    if problems:
        return None, problems
    return Scheme(suffix=_SUFFIX[method], block=None if block is None else (block[0], block[1]), dtype=dtype), []


def _unknown(config: Mapping[str, Any], known: Collection[str]) -> list[str]:
    return [
        f"{QUANTIZATION}.{key} = {json.dumps(value)} is not supported"
        for key, value in config.items()
        if key not in known and value is not None
    ]


def _compressed(config: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The block size that all groups of compressed-tensors share, and the problems of these groups."""
    problems = [
        f"{QUANTIZATION}.{key} = {json.dumps(config[key])} is not supported"
        for key in ("kv_cache_scheme", "sparsity_config", "transform_config")
        if config.get(key) not in (None, {}, {"format": "dense"})
    ]
    groups = config.get("config_groups")
    blocks = []
    for name, group in groups.items() if isinstance(groups, dict) else []:
        weights = group.get("weights") if isinstance(group, dict) else None
        weights = weights if isinstance(weights, dict) else {}
        form = group.get("format", config.get("format")) if isinstance(group, dict) else None
        kind = [weights.get(key) for key in ("num_bits", "type", "symmetric")]
        if kind != [8, "float", True] or weights.get("strategy") not in ("tensor", "channel", "block"):
            shown = ", ".join(f"{key} = {json.dumps(weights.get(key))}" for key in ("num_bits", "type", "strategy"))
            problems.append(
                f"{QUANTIZATION}.config_groups.{name} has weights of {shown}, which are not supported; {_SUPPORTED}"
            )
        elif form not in ("float-quantized", "naive-quantized"):
            problems.append(f"{QUANTIZATION}.format = {json.dumps(form)} is not supported, only float-quantized")
        blocks.append(weights.get("block_structure") if weights.get("strategy") == "block" else None)
    if not blocks:
        problems.append(f"{QUANTIZATION} names no group of weights")
    if any(block != blocks[0] for block in blocks):
        problems.append(f"{QUANTIZATION} has groups with different blocks, which is not supported")
    return (blocks or [None])[0], problems


def _is_block(block: Any) -> bool:
    return isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
