"""Chooses what an export in a quantised format quantises, and describes it in config.json as servers read it.

    fp8_block   quant_method fp8, blocks of 128 x 128            mxfp4   experts of gpt-oss in its own layout;
    nvfp4       compressed-tensors, groups of 16                         elsewhere compressed-tensors, groups of 32
    int4        compressed-tensors, groups of 128, or of 32 if the columns of some matrix are no multiple of 128

Every Linear of a layer is quantised, experts included, except routers.  Activations stay in bf16, except with
fp8_block, whose readers quantise them while they compute.  A matrix that does not fit the blocks of the format keeps
its type, together with the matrices with which servers fuse it.  `ignore` or `modules_to_not_convert` lists each module
whose weight keeps its type.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sft.config.checkpoint import ExportFormat
from sft.errors import ConfigError, first_few
from sft.hf.family import Family, HfTensor, TensorMapping
from sft.hf.quantization import Mxfp4, Packed, Quantised, Scheme
from sft.hf.tensor_check import fold_by_layer
from sft.layers.weights import is_of_layer, weight_of

QuantisedFormat = Literal["fp8_block", "mxfp4", "nvfp4", "int4"]
FP8_BLOCK = 128
_WEIGHT = ".weight"
# Last parts of the names of modules that vLLM and SGLang compute as one Linear, so all or none must be quantised.
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
_GROUP_OF = {part: "+".join(parts) for parts in _FUSED for part in parts}
# The modules that files of gpt-oss list, whose attention, embedding, router and head are in bf16.
_GPT_OSS_IN_BF16 = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
_WITH_STACKED_EXPERTS = (
    "stores the experts of a layer as one tensor, which no released reader expects in this format.  Use export_format "
    "= {others}."
)


@dataclass(frozen=True, kw_only=True)
class QuantisedTensors:
    """The tensors that an export in a quantised format quantises.

    names: the tensors that are quantised; left: Linears of layers that keep their type, because they do not fit
    """

    scheme: Quantised
    names: frozenset[str]
    left: tuple[str, ...]

    @property
    def left_out(self) -> str:
        """A text such as "2 Linears keep their type, because ...: model.layers.*.mlp..."; "" if all are quantised."""
        if not self.left:
            return ""
        return (
            f"{len(self.left):,} Linears keep their type, because {_needs(self.scheme)}, also of Linears that servers "
            f"fuse with them: {', '.join(first_few(fold_by_layer(self.left)))}"
        )


def choose(
    format: ExportFormat,
    views: Mapping[HfTensor, list[tuple[TensorMapping, int]]],
    family: Family,
    dtype: str,
) -> QuantisedTensors:
    """The tensors that an export of a model in this format quantises.

    format: neither bf16 nor as_source; views: the tensors of the model, as `views_by_tensor` gives them
    dtype: name in safetensors of the type of the model
    Raises ConfigError if no reader reads the format for this model, or if no matrix fits it.
    """
    linears = [tensor for tensor, parts in views.items() if _is_linear(parts)]
    stacked = [tensor for tensor in linears if len(tensor.shape) > 2]
    if format == "mxfp4" and family.model_type == "gpt_oss":
        scheme: Quantised = Mxfp4(dtype=dtype)
        linears = stacked
    elif stacked:
        others = "mxfp4, as_source or bf16" if family.model_type == "gpt_oss" else "as_source or bf16"
        raise ConfigError(
            f"checkpoint.export_format = {format} does not fit {family.model_type}: {stacked[0].name} "
            f"{_WITH_STACKED_EXPERTS.format(others=others)}"
        )
    else:
        scheme = _scheme(format, linears, dtype)
    misfits = {fused(tensor.name) for tensor in linears if not _fits(scheme, tensor.shape)}
    names = frozenset(tensor.name for tensor in linears if fused(tensor.name) not in misfits)
    left = tuple(tensor.name for tensor in linears if tensor.name not in names)
    if not names:
        raise ConfigError(
            f"checkpoint.export_format = {format} would quantise nothing, because {_needs(scheme)}: "
            f"{', '.join(first_few(fold_by_layer(left))) or 'the model has no such matrix'}.  Use bf16."
        )
    return QuantisedTensors(scheme=scheme, names=names, left=left)


def quantization_config(scheme: Quantised, in_type: Iterable[str]) -> dict[str, Any]:
    """The value of quantization_config.  in_type: the tensors that are not quantised"""
    if isinstance(scheme, Mxfp4):
        return {"quant_method": "mxfp4", "modules_to_not_convert": _GPT_OSS_IN_BF16}
    modules = sorted({name.removesuffix(_WEIGHT) for name in in_type if name.endswith(_WEIGHT)} | {"lm_head"})
    if isinstance(scheme, Scheme):
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": modules,
        }
    types = {"nvfp4-pack-quantized": "torch.float8_e4m3fn", "mxfp4-pack-quantized": "torch.uint8"}
    weights = {
        "num_bits": scheme.num_bits,
        "type": "int" if scheme.format == "pack-quantized" else "float",
        "strategy": "tensor_group" if scheme.format == "nvfp4-pack-quantized" else "group",
        "group_size": scheme.group,
        "symmetric": True,
        "dynamic": False,
        **({"scale_dtype": types[scheme.format]} if scheme.format in types else {}),
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": scheme.format}},
        "ignore": modules,
        "kv_cache_scheme": None,
    }


def _is_linear(parts: list[tuple[TensorMapping, int]]) -> bool:
    """Whether a tensor is the weight of Linears of a layer, without the gates of routers and of shared experts."""
    return all(
        is_of_layer(mapping.key)
        and weight_of(mapping.key).is_linear
        and weight_of(mapping.key).part != "shared gate"
        and len(mapping.sources[number].shape) == 2
        for mapping, number in parts
    )


def _scheme(format: ExportFormat, linears: Iterable[HfTensor], dtype: str) -> Quantised:
    if format == "fp8_block":
        return Scheme(suffix="_scale_inv", block=(FP8_BLOCK, FP8_BLOCK), dtype=dtype)
    if format == "int4":
        group = 128 if all(tensor.shape[1] % 128 == 0 for tensor in linears) else 32
        return Packed(format="pack-quantized", num_bits=4, group=group, symmetric=True, dtype=dtype)
    group = {"nvfp4": 16, "mxfp4": 32}[format]
    return Packed(format=f"{format}-pack-quantized", num_bits=4, group=group, symmetric=True, dtype=dtype)


def _fits(scheme: Quantised, shape: tuple[int, ...]) -> bool:
    if isinstance(scheme, Scheme):
        return all(size % FP8_BLOCK == 0 for size in shape)
    # gpt-oss stores matrices transposed, [experts, columns, rows]
    return shape[-2] % 32 == 0 if isinstance(scheme, Mxfp4) else shape[1] % (scheme.group or 1) == 0


def _needs(scheme: Quantised) -> str:
    if isinstance(scheme, Scheme):
        return f"rows and columns must be multiples of {FP8_BLOCK}"
    return f"columns must be multiples of {32 if isinstance(scheme, Mxfp4) else scheme.group}"


def fused(name: str) -> str:
    """A text that is equal for tensors that servers fuse, which must have one global scale with NVFP4.

    model.layers.0.self_attn.k_proj.weight -> model.layers.0.self_attn.q_proj+k_proj+v_proj
    """
    module, _, last = name.removesuffix(_WEIGHT).rpartition(".")
    return f"{module}.{_GROUP_OF.get(last, last)}"
