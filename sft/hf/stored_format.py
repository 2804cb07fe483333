"""Describes the format of a folder's weights in low bits from its config.json, for estimates and checks of layouts."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from sft.config.weight_format import WeightFormat
from sft.hf.architecture import Architecture
from sft.hf.nested_config import text_part
from sft.hf.quantization import QUANTIZATION, Mxfp4, Quantised, Scheme
from sft.layers.weights import is_of_layer, weight_of

_PLAIN = ("modules_to_not_convert", "ignored_layers", "ignore")  # keys that name modules in the precision of the model
_SCALE_BYTES = {"pack-quantized": 2, "nvfp4-pack-quantized": 1, "mxfp4-pack-quantized": 1, "mxfp8-quantized": 1}


def stored_format(content: Mapping[str, Any], model: Architecture) -> WeightFormat | None:
    """The format of the quantised weights; None: the weights are not quantised.

    content: that of config.json.  Kimi-K2.5 -> INT4, 32 columns share a scale, experts only
    """
    if model.scheme is None:
        return None
    name, bits, rows, columns, scale_bytes = _numbers(model.scheme)
    return WeightFormat(
        name=name,
        bits=bits,
        rows=rows,
        columns=columns,
        scale_bytes=scale_bytes,
        shares=_shares(content, model),
    )


def _numbers(scheme: Quantised) -> tuple[str, int, int | None, int | None, float]:
    """The name of the format, bits of a number, rows and columns that share a scale, and bytes of a scale."""
    if isinstance(scheme, Mxfp4):
        return "MXFP4", 4, 1, 32, 1
    if isinstance(scheme, Scheme):
        rows, columns = scheme.block or (1, None)
        return "FP8", 8, rows, columns, 4
    zero_bytes = 0.0 if scheme.symmetric else scheme.num_bits / 8
    return scheme.number_format, scheme.num_bits, 1, scheme.group, _SCALE_BYTES[scheme.format] + zero_bytes


def _shares(content: Mapping[str, Any], model: Architecture) -> dict[str, float]:
    """For each matrix of a layer, by its name in the layer, the share of its numbers that are quantised."""
    config = content.get(QUANTIZATION) or text_part(content, model.family).get(QUANTIZATION) or {}
    plain = [str(name) for key in _PLAIN for name in config.get(key) or ()]
    only_experts = isinstance(model.scheme, Mxfp4)
    numbers, quantised = Counter[str](), Counter[str]()
    for mapping in model.family.mappings(model.model, model.vocab_size):
        if not is_of_layer(mapping.key) or mapping.expert or not weight_of(mapping.key).is_linear:
            continue  # one expert of a layer stands for all
        weight = weight_of(mapping.key)
        for view in mapping.sources:
            numbers[weight.key] += view.num_rows
            is_plain = not weight.is_of_expert if only_experts else _is_plain(view.name, plain)
            quantised[weight.key] += 0 if is_plain else view.num_rows
    return {key: quantised[key] / number for key, number in numbers.items() if quantised[key]}


def _is_plain(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns names the module of the tensor `name`, or a module around it.

    A pattern is a name, the end of a name, a pattern with *, or, after "re:", a regular expression.
    """
    module = name.rpartition(".")[0]
    parts = module.split(".")
    around = [".".join(parts[: count + 1]) for count in range(len(parts))]
    return any(
        (
            re.match(pattern[3:], module) is not None
            if pattern.startswith("re:")
            else any(fnmatchcase(other, pattern) or other.endswith(f".{pattern}") for other in around)
        )
        for pattern in patterns
    )
