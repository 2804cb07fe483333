"""Writes the error message for families that are not supported: what they need, and the nearest supported family."""

import json
from collections.abc import Mapping
from typing import Any

from sft.hf.families import FAMILIES

_BIASED = "LayerNorm with biases, and an MLP without a gate"
_MAMBA = "Mamba layers"
_INTERLEAVED = "rotary positions on neighbouring numbers of a head"
_TABLE = "a table of its tensors beside a router with sigmoid scores"

# model_type -> what a model of the family needs, and the supported family with the most in common
_MISSING: dict[str, tuple[str, str]] = {
    "apertus": ("the xIELU activation in an MLP without a gate", "qwen3"),
    "arcee": ("a squared ReLU in an MLP without a gate", "llama"),
    "bloom": (f"{_BIASED}, and ALiBi", "llama"),
    "chatglm": ("code of the model's own repository", "llama"),
    "cohere": (f"LayerNorm, attention and MLP side by side, {_INTERLEAVED}, and scaled logits", "llama"),
    "cohere2": (f"LayerNorm, attention and MLP side by side, {_INTERLEAVED}, and scaled logits", "llama"),
    "dbrx": ("LayerNorm, clamped queries, keys and values, and experts fused by rows", "mixtral"),
    "deepseek_v2": ("a router with softmax scores and expert groups", "deepseek_v3"),
    "deepseek_v32": ("sparse attention", "deepseek_v3"),
    "dots1": (f"{_TABLE}, and windows in some layers", "glm4_moe"),
    "falcon": (f"{_BIASED}, and attention and MLP side by side", "llama"),
    "falcon_h1": (_MAMBA, "llama"),
    "gemma3n": ("embeddings for each layer, and several residual streams", "gemma3_text"),
    "glm": (f"{_INTERLEAVED}, on a part of each head", "llama"),
    "glm4": (f"{_INTERLEAVED}, on a part of each head, and norms before and after each block", "llama"),
    "gpt2": (f"{_BIASED}, and learned positions", "llama"),
    "gpt_neox": (f"{_BIASED}, and rotary positions on a part of each head", "llama"),
    "granitemoehybrid": (_MAMBA, "mixtral"),
    "helium": (_INTERLEAVED, "llama"),
    "internlm2": ("code of the model's own repository", "llama"),
    "internlm3": ("dynamic rotary positions, with which its models were released", "llama"),
    "jamba": (_MAMBA, "mixtral"),
    "kimi_linear": ("Kimi Delta Attention layers", "qwen3_moe"),
    "lfm2": ("convolution layers", "qwen3"),
    "llama4": (f"chunked attention, and {_INTERLEAVED}", "mixtral"),
    "llama4_text": (f"chunked attention, and {_INTERLEAVED}", "mixtral"),
    "mimo": ("code of the model's own repository", "qwen2"),
    "minicpm3": ("a table of its tensors beside latent attention", "deepseek_v3"),
    "mllama": ("layers with cross-attention to images", "llama"),
    "mpt": (f"{_BIASED}, and ALiBi", "llama"),
    "nanochat": ("a squared ReLU in an MLP without a gate, norms without weights, and soft-capped logits", "llama"),
    "nemotron": ("LayerNorm whose weights are offsets from 1, and a squared ReLU in an MLP without a gate", "llama"),
    "nemotron_h": (_MAMBA, "llama"),
    "olmo": ("norms without weights", "llama"),
    "opt": (f"{_BIASED}, and learned positions", "llama"),
    "phi": (f"{_BIASED}, and attention and MLP side by side", "phi3"),
    "phimoe": ("LayerNorm with biases, and a router of its own kind (sparsemixer)", "mixtral"),
    "solar_open": (_TABLE, "glm4_moe"),
    "stablelm": ("LayerNorm, and rotary positions on a part of each head", "llama"),
    "starcoder2": (_BIASED, "llama"),
}


def unsupported(content: Mapping[str, Any]) -> str:
    """The error message for a config.json of a family that is not supported.

    {"model_type": "jamba"} -> model_type = "jamba" is not supported: it needs Mamba layers, ...
    """
    named = content.get("model_type")
    needs, nearest = _MISSING.get(str(named), ("", ""))
    why = f": it needs {needs}, which this trainer does not have.  The nearest family is {nearest}" if needs else ""
    return (
        f"model_type = {json.dumps(named)} is not supported{why}.  Supported: {', '.join(FAMILIES)}.  "
        "docs/reference/models.md says how to add one."
    )
