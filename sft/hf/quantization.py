"""Reads from `quantization_config` of a config.json how the weights of a quantised model are dequantised.

Supported values of quant_method:

    fp8                  one scale per block or per matrix (DeepSeek, Qwen3, Ministral 3)
    mxfp4                experts of gpt-oss
    compressed-tensors   FP8 with one scale per matrix, row or block; packed integers (Kimi-K2.5); NVFP4, MXFP4, MXFP8

An error names everything else.  `dequantised.py`, `mxfp4.py` and `packed.py` dequantise the weights.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

QUANTIZATION = "quantization_config"
_SUPPORTED = (
    "fp8 (one scale per block or matrix), mxfp4, and compressed-tensors with FP8 weights, integers of 4 or 8 bits "
    "(pack-quantized), NVFP4, MXFP4 or MXFP8 are supported"
)
# Accepted keys of `fp8`.  Those that this module does not read do not change how stored weights are dequantised.
_FP8_KEYS = {
    *("quant_method", "weight_block_size", "fmt", "activation_scheme", "modules_to_not_convert", "ignored_layers"),
    *("dequantize", "scale_fmt"),
}
_MXFP4_KEYS = {"quant_method", "modules_to_not_convert", "dequantize"}
# Formats of compressed-tensors -> num_bits, type, strategy and group_size of their weights.
_FLOATS = {
    "nvfp4-pack-quantized": (4, "float", "tensor_group", 16),
    "mxfp4-pack-quantized": (4, "float", "group", 32),
    "mxfp8-quantized": (8, "float", "group", 32),
}
_ORDERS = (None, False, "weight", "static")  # values of actorder with which columns are stored in their usual order
_RARE = ("group_size", "symmetric", "actorder", "block_structure")  # keys that errors show only if they are set
# Last parts of the names of scales of activations.  They are ignored, because only FP8 arithmetic needs them.
ACTIVATION_SCALES = ("activation_scale", "input_scale", "output_scale")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How to dequantise tensors of type F8_E4M3: value = stored value * scale, in fp32, rounded to `dtype`."""

    suffix: str  # the scale of the tensor X is the tensor X + suffix
    block: tuple[int, int] | None  # rows and columns that share a scale; None: one scale per matrix or row
    dtype: str  # name in safetensors of the type that config.json gives the model
    powers: bool = False  # whether scales are powers of 2; readers need not know

    def scale_of(self, name: str) -> str:
        return name + self.suffix

    def activation_scales_of(self, name: str) -> list[str]:
        """The names that scales of activations may have: q_proj.weight -> q_proj.activation_scale, ..."""
        return [f"{name.rpartition('.')[0]}.{scale}" for scale in ACTIVATION_SCALES]


@dataclass(frozen=True, kw_only=True)
class Mxfp4:
    """Experts in MXFP4.  dtype: name in safetensors of the type that config.json gives the model"""

    dtype: str


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Weights of compressed-tensors in which a group of numbers of a row shares a scale (`packed.py`)."""

    format: str  # name of the format in compressed-tensors
    num_bits: int
    group: int | None  # number of elements of a group; None: the whole row
    symmetric: bool  # whether the number 0 stands for the value 0; False: each group has a zero point
    dtype: str  # name in safetensors of the type that config.json gives the model

    @property
    def number_format(self) -> str:
        return {"pack": f"INT{self.num_bits}"}.get(name := self.format.partition("-")[0], name.upper())

    @property
    def data(self) -> str:
        """Last part of the name of the stored numbers."""
        return "weight" if self.format == "mxfp8-quantized" else "weight_packed"

    @property
    def beside(self) -> tuple[str, ...]:
        """Last parts of the names of the tensors that a weight has in addition to its numbers and scales."""
        if self.format == "pack-quantized":
            return ("weight_shape",) if self.symmetric else ("weight_shape", "weight_zero_point")
        return ("weight_global_scale",) if self.format == "nvfp4-pack-quantized" else ()


Quantised = Scheme | Mxfp4 | Packed


def scheme_of(content: Mapping[str, Any]) -> tuple[Quantised | None, list[str]]:
    """How to dequantise the weights, and a list of problems.  None and no problems: the weights are not quantised.

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
        if block is not None and not _is_block(block):
            problems.append(f"{QUANTIZATION} has blocks of {json.dumps(block)}, which are not [rows, columns]")
        if problems:
            return None, problems
        powers, block = config.get("scale_fmt") == "ue8m0", None if block is None else (block[0], block[1])
        return Scheme(suffix="_scale_inv", block=block, dtype=dtype, powers=powers), []
    if method == "compressed-tensors":
        return _compressed(config, dtype)
    return None, [f"{QUANTIZATION} has quant_method = {json.dumps(method)}, which is not supported; {_SUPPORTED}"]


def _unknown(config: Mapping[str, Any], known: Collection[str]) -> list[str]:
    return [
        f"{QUANTIZATION}.{key} = {json.dumps(value)} is not supported"
        for key, value in config.items()
        if key not in known and value is not None
    ]


def _compressed(config: Mapping[str, Any], dtype: str) -> tuple[Scheme | Packed | None, list[str]]:
    """How to dequantise weights of compressed-tensors, and a list of problems.  All groups must have one scheme."""
    problems = [
        f"{QUANTIZATION}.{key} = {json.dumps(config[key])} is not supported"
        for key in ("kv_cache_scheme", "sparsity_config", "transform_config")
        if config.get(key) not in (None, {}, {"format": "dense"})
    ]
    groups = config.get("config_groups")
    schemes = []
    for name, group in groups.items() if isinstance(groups, dict) else []:
        weights = group.get("weights") if isinstance(group, dict) else None
        weights = weights if isinstance(weights, dict) else {}
        form = (group.get("format") if isinstance(group, dict) else None) or config.get("format")
        scheme = _scheme_of_group(weights, form, dtype)
        if scheme is None:
            keys = ("num_bits", "type", "strategy", *(key for key in _RARE if weights.get(key) is not None))
            shown = ", ".join(f"{key} = {json.dumps(weights.get(key))}" for key in keys)
            problems.append(
                f"{QUANTIZATION}.config_groups.{name} has weights of {shown} in format = {json.dumps(form)}, which are "
                f"not supported; {_SUPPORTED}"
            )
        schemes.append(scheme)
    if not schemes:
        problems.append(f"{QUANTIZATION} names no group of weights")
    if not problems and any(scheme != schemes[0] for scheme in schemes):
        problems.append(f"{QUANTIZATION} has groups of different formats, blocks or sizes, which is not supported")
    return (None if problems else schemes[0]), problems


def _scheme_of_group(weights: Mapping[str, Any], form: Any, dtype: str) -> Scheme | Packed | None:
    """The scheme of one group of compressed-tensors; None if it is not supported.  form: the value of `format`"""
    strategy, symmetric, size = (weights.get(key) for key in ("strategy", "symmetric", "group_size"))
    kind = weights.get("num_bits"), weights.get("type"), strategy
    if (
        not isinstance(form, str)
        or type(kind[0]) is not int
        or not isinstance(symmetric, bool)
        or weights.get("actorder") not in _ORDERS
    ):
        return None
    if form in ("float-quantized", "naive-quantized"):
        block = weights.get("block_structure") if strategy == "block" else None
        is_fp8 = kind[:2] == (8, "float") and symmetric and strategy in ("tensor", "channel", "block")
        is_whole = strategy != "block" or _is_block(block)
        return (
            Scheme(suffix="_scale", block=tuple(block) if block else None, dtype=dtype) if is_fp8 and is_whole else None
        )
    if form == "pack-quantized":
        has_size = type(size) is int and size > 0 if strategy == "group" else size in (None, -1)
        if kind not in [(bits, "int", grouped) for bits in (4, 8) for grouped in ("group", "channel")] or not has_size:
            return None
        group = size if strategy == "group" else None
        return Packed(format=form, num_bits=kind[0], group=group, symmetric=symmetric, dtype=dtype)
    if form not in _FLOATS or (*kind, size) != _FLOATS[form] or not symmetric:
        return None
    return Packed(format=form, num_bits=kind[0], group=size, symmetric=True, dtype=dtype)


def _is_block(block: Any) -> bool:
    return isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
