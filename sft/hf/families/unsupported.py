"""Writes the error message for families that are not supported: what they need, and the nearest supported family."""

import json
from collections.abc import Mapping
from typing import Any

from sft.hf.families import FAMILIES

_BIASED = "LayerNorm with biases, and an MLP without a gate"
_MAMBA = "layers of the first Mamba"
_OWN_MAMBA = "a table of its tensors: layers of Mamba-2"
_TOWER = "a table of its tensors beside a vision tower"
_SPARSE = "sparse attention, for which an indexer chooses keys"
_STREAMS = "several residual streams (hyper-connections)"
_DRAFT = "the hidden states of another model, for which it drafts tokens"
_CONVOLUTION = "layers with a short convolution in place of attention"
_INKLING = "short convolutions beside attention, and relative positions"
_COHERE = "LayerNorm, and attention and MLP side by side"

# model_type -> what a model of the family needs, and the supported family with the most in common
_MISSING: dict[str, tuple[str, str]] = {
    "apertus": ("the xIELU activation in an MLP without a gate", "qwen3"),
    "aria": (_TOWER, "mixtral"),
    "aria_text": ("a table of its tensors: experts of a layer in one tensor beside shared experts", "mixtral"),
    "axk1": ("a table of its tensors beside latent attention, and a norm after experts", "deepseek_v3"),
    "axk2": (f"{_SPARSE}, and norms with gates", "deepseek_v3"),
    "aya_vision": (f"{_COHERE}, and scaled logits", "llama"),
    "bamba": (_OWN_MAMBA, "granitemoehybrid"),
    "bitnet": ("ternary weights, and a squared ReLU with a norm inside of the MLP", "llama"),
    "bloom": (f"{_BIASED}, and ALiBi", "llama"),
    "chatglm": ("code of the model's own repository", "llama"),
    "cohere": (f"{_COHERE}, and scaled logits", "llama"),
    "cohere2": (f"{_COHERE}, and scaled logits", "llama"),
    "cohere2_moe": (f"{_COHERE}, and experts", "mixtral"),
    "cohere2_vision": (f"{_COHERE}, and scaled logits", "llama"),
    "cohere_compass": (f"{_COHERE}, and scaled logits", "llama"),
    "cohere_compass_text": (f"{_COHERE}, and scaled logits", "llama"),
    "dbrx": ("LayerNorm, clamped queries, keys and values, and experts fused by rows", "mixtral"),
    "deepseek_v2": ("a router with softmax scores and expert groups", "deepseek_v3"),
    "deepseek_v32": (_SPARSE, "deepseek_v3"),
    "deepseek_v4": (
        f"compressed and sparse attention, {_STREAMS}, and experts chosen by a hash of the token",
        "deepseek_v3",
    ),
    "diffllama": ("differential attention", "llama"),
    "doge": ("attention with a learned mask", "llama"),
    "dots3_note": (_SPARSE, "deepseek_v3"),
    "dots3_note_text": (_SPARSE, "deepseek_v3"),
    "falcon": (f"{_BIASED}, and attention and MLP side by side", "llama"),
    "falcon_h1": ("attention and Mamba-2 side by side in a layer", "granitemoehybrid"),
    "falcon_mamba": (_MAMBA, "llama"),
    "flex_olmo": ("a table of its tensors: norms as in Olmo 2, experts as in OLMoE", "olmoe"),
    "gemma3n": ("embeddings for each layer, and several residual streams", "gemma3_text"),
    "gemma3n_text": ("embeddings for each layer, and several residual streams", "gemma3_text"),
    "gemma4_assistant": (_DRAFT, "gemma4_text"),
    "gemma4_unified_assistant": (_DRAFT, "gemma4_unified_text"),
    "glm": ("a table of its tensors: neighbouring numbers of a part of each head rotate together", "phi3"),
    "glm4": ("a table of its tensors: layers of GLM with norms before and after each half", "phi3"),
    "glm46v": (f"{_TOWER}, and of layers with norms before and after each half", "phi3"),
    "glm4v": (f"{_TOWER}, and of layers with norms before and after each half", "phi3"),
    "glm4v_moe": (_TOWER, "glm4_moe"),
    "glm5_next": (f"{_SPARSE}, and {_STREAMS}", "bailing_hybrid"),
    "glm_moe_dsa": (_SPARSE, "glm4_moe_lite"),
    "gpt2": (f"{_BIASED}, and learned positions", "llama"),
    "gpt_bigcode": (f"{_BIASED}, and learned positions", "llama"),
    "gpt_neo": (f"{_BIASED}, and learned positions", "llama"),
    "gpt_neox": (f"{_BIASED}, and rotary positions on a part of each head", "llama"),
    "gptj": (f"{_BIASED}, and attention and MLP side by side", "llama"),
    "granitemoeshared": ("a table of its tensors: layers of Granite with a shared expert", "granitemoe"),
    "helium": ("a table of its tensors: layers of Llama that rotate neighbouring numbers of a head", "llama"),
    "hy_v4": (f"{_SPARSE}, and {_STREAMS}", "deepseek_v3"),
    "hyperclovax": ("a table of its tensors: layers of Granite with norms on outputs", "granite"),
    "inkling2": (f"{_INKLING}, and attention over the outputs of earlier layers", "mixtral"),
    "inkling2_text": (f"{_INKLING}, and attention over the outputs of earlier layers", "mixtral"),
    "inkling_mm_model": (_INKLING, "mixtral"),
    "inkling_text": (_INKLING, "mixtral"),
    "internlm2": ("code of the model's own repository", "llama"),
    "internlm3": ("dynamic rotary positions, with which its models were released", "llama"),
    "internvl": (_TOWER, "qwen3"),
    "iquestcoder": ("a table of its tensors, which are those of Llama", "llama"),
    "jais2": ("LayerNorm, and a squared ReLU in an MLP without a gate", "llama"),
    "jamba": (_MAMBA, "mixtral"),
    "jetmoe": ("experts in attention", "mixtral"),
    "lfm2": (_CONVOLUTION, "qwen3"),
    "lfm2_moe": (_CONVOLUTION, "qwen3_moe"),
    "lfm2_vl": (_CONVOLUTION, "qwen3"),
    "lfm3": (_CONVOLUTION, "qwen3"),
    "lfm3_vl": (_CONVOLUTION, "qwen3"),
    "llama4": ("chunked attention", "mixtral"),
    "llama4_text": ("chunked attention", "mixtral"),
    "llava": (_TOWER, "llama"),
    "llava_next": (_TOWER, "llama"),
    "llava_onevision": (_TOWER, "qwen2"),
    "longcat_flash": ("layers with two attentions, and experts that return their input", "deepseek_v3"),
    "mamba": (_MAMBA, "llama"),
    "mamba2": (_OWN_MAMBA, "nemotron_h"),
    "mellum": ("a table of its tensors: experts beside windows with rotary positions of their own", "qwen3_moe"),
    "mimo": ("code of the model's own repository", "qwen2"),
    "minicpm3": ("a table of its tensors beside latent attention", "deepseek_v3"),
    "minimax": ("lightning attention", "minimax_m2"),
    "minimax_m3_vl": ("sparse attention, for which an indexer chooses blocks of keys", "minimax_m2"),
    "minimax_m3_vl_text": ("sparse attention, for which an indexer chooses blocks of keys", "minimax_m2"),
    "mistral_large4": (f"{_SPARSE}, and layers with the keys of other layers", "mistral4"),
    "mllama": ("layers with cross-attention to images", "llama"),
    "mpt": (f"{_BIASED}, and ALiBi", "llama"),
    "muse_glimmer_assistant": (_DRAFT, "muse_glimmer"),
    "muse_spark": ("gates on the residual stream, and experts that are narrower than it", "muse_glimmer"),
    "nanochat": ("norms without weights, also on queries and keys after the rotary positions", "arcee"),
    "nemotron": ("LayerNorm with biases", "arcee"),
    "nemotron_h_omni": (_TOWER, "nemotron_h"),
    "olmo": ("norms without weights", "llama"),
    "opt": (f"{_BIASED}, and learned positions", "llama"),
    "paligemma": ("attention in both directions within a prompt", "gemma"),
    "persimmon": (f"{_BIASED}, and norms with biases on queries and keys", "llama"),
    "phi": (f"{_BIASED}, and attention and MLP side by side", "phi3"),
    "phi4_multimodal": ("longrope positions, and adapters for images and sound", "phi3"),
    "phimoe": ("LayerNorm with biases, and a router of its own kind (sparsemixer)", "mixtral"),
    "qwen4_exp": (f"{_SPARSE}, gates on several residual streams, and embeddings of n-grams", "qwen3_5_moe"),
    "qwen4_exp_text": (f"{_SPARSE}, gates on several residual streams, and embeddings of n-grams", "qwen3_5_moe_text"),
    "recurrent_gemma": ("recurrent layers of its own kind (RG-LRU)", "gemma2"),
    "rwkv": ("recurrent layers of its own kind", "llama"),
    "smolvlm": (_TOWER, "llama"),
    "stablelm": ("LayerNorm, and rotary positions on a part of each head", "llama"),
    "starcoder2": (_BIASED, "llama"),
    "xlstm": ("recurrent layers of its own kind", "llama"),
    "youtu": ("a table of its tensors: latent attention without experts", "deepseek_v3"),
    "zamba": (_MAMBA, "llama"),
    "zamba2": ("one block of attention for several layers, beside Mamba-2", "granitemoehybrid"),
    "zaya": ("convolutions in attention, and a router that is an MLP", "qwen3_moe"),
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
