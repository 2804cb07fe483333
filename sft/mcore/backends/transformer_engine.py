"""Implements the `te` backend: Transformer Engine's attention and modules, on CUDA.

Core builds the layers, and applies the rotary embedding with Transformer Engine's fused kernel.  If the fused kernel
does not fit the run (`fused_rotary.why_not`), attention rotates queries and keys in plain torch.  Transformer Engine
exchanges keys or heads between context-parallel ranks, as `parallel.cp_comm` selects.
"""

import importlib.metadata
from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer import ModuleSpec
from torch import Tensor

from sft.config import Config, ModelConfig
from sft.errors import ConfigError
from sft.layers import fused_rotary
from sft.mcore.attention import rope
from sft.mcore.backend import AttentionBackend, PackedDocuments
from sft.mcore.latent_attention.core_attention import ExpandedKeys
from sft.mcore.modules import choice

# For each cp_comm, the first release of Transformer Engine that accepts packed documents with it, by its source code.
_PACKED_SINCE = {"a2a": (2, 10), "all_gather": (2, 18), "a2a+p2p": (2, 19)}
MOST_SCORES = 1 << 30  # SM90_DET_FUSED_THD_BWD_MAX_BHSS of Transformer Engine 2.20
REPEATABLE_SINCE = 91801  # 9.18.1, the first cuDNN with a deterministic backward on Blackwell
INSTALL, missing = choice.INSTALL, choice.missing


class TransformerEngine(AttentionBackend):
    name = "te"
    latent_attention = partial(ExpandedKeys, attention=TEDotProductAttention)

    def __init__(self, config: Config) -> None:
        problem = fused_rotary.why_not(config)
        reason = f"Transformer Engine; {problem}" if problem else "Transformer Engine"
        super().__init__(config, reason, choice.for_te_attention(config))
        self.attention_rotates = problem is not None

    def with_attention(self, spec: ModuleSpec) -> ModuleSpec:
        if self.config.model.latent_attention.is_used:  # `ExpandedKeys` keeps results and rotates itself
            return spec
        attention = spec.submodules.self_attention.submodules
        if self.config.train.recompute == "attention_kept":
            attention.core_attention = keeping(attention.core_attention)
        if self.attention_rotates:
            attention.core_attention = rotating(attention.core_attention, self.config.model)
        return spec


def keeping(attention: Any) -> Any:
    """A subclass of `attention`, core's class for Transformer Engine's attention, for train.recompute = attention_kept.

    Recomputation reuses the results of its calls.
    """

    class KeepingAttention(attention):
        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *args: Any,
            packed_seq_params: PackedDocuments,
            **core: Any,
        ) -> Any:
            def attend(query: Tensor, key: Tensor, value: Tensor) -> Any:
                return forward(query, key, value, *args, packed_seq_params=packed_seq_params, **core)

            forward = super().forward
            return packed_seq_params.attend(self, attend, (query, key, value))

    return KeepingAttention


def rotating(attention: Any, model: ModelConfig) -> Any:
    """A subclass of `attention`, core's class for Transformer Engine's attention, that rotates queries and keys.

    Layers without rotary positions rotate nothing and have another factor on query-key products (`rope.plain_scale`).
    """

    class RotatingAttention(attention):
        def __init__(self, *, layer_number: int, softmax_scale: float, **core: Any) -> None:
            rotates = layer_number not in model.rope.skip_layers
            scale = softmax_scale if rotates else rope.plain_scale(model)
            super().__init__(layer_number=layer_number, softmax_scale=scale, **core)
            self._rotates = rotates

        def forward(
            self, query: Tensor, key: Tensor, *args: Any, packed_seq_params: PackedDocuments, **core: Any
        ) -> Any:
            """query [t, heads, d], key [t, key heads, d]"""
            rotation = packed_seq_params.rotation
            assert rotation is not None
            if self._rotates:
                query, key = rotation.apply_to_query(query), rotation.apply(key)
            return super().forward(query, key, *args, packed_seq_params=packed_seq_params, **core)

    return RotatingAttention


def unfit(config: Config, device_type: str) -> str | None:
    """The reason why Transformer Engine cannot compute the recipe on this device; None if it can."""
    if device_type != "cuda":
        return "Transformer Engine needs CUDA, but this run is on the CPU"
    if config.run.precision == "fp32":
        return "Transformer Engine's attention computes in bf16, but run.precision is fp32"
    if config.run.modules == "local":
        return "its attention comes with its modules, and run.modules is local"
    if config.local_modules_only:
        return config.local_modules_only
    if config.model.portable_only:
        return f"only the portable backend has {config.model.portable_only}"
    if (
        config.model.latent_attention.is_used
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability() < (9, 0)
    ):
        return "its attention with latents needs a GPU of compute capability 9.0 or higher"
    if config.run.deterministic and torch.cuda.is_available() and (problem := _not_repeatable(config)):
        return f"run.deterministic is true, and Transformer Engine's attention over packed documents {problem}"
    return None


def _not_repeatable(config: Config) -> str | None:
    """The reason why attention over a pack of this recipe may have no deterministic backward on this GPU, or None.

    By the sources of Transformer Engine 2.20: `get_attention_backend`, and fused_attn.cpp.
    """
    gpu, cudnn = torch.cuda.get_device_capability(), torch.backends.cudnn.version() or 0
    heads = config.model.num_attention_heads // config.parallel.tp
    scores = heads * most_scores(config.data.seq_length, config.data.doc_multiple)
    if gpu[0] == 9 and scores >= MOST_SCORES:
        return (
            "has a deterministic backward on Hopper only if documents x heads x (length of the longest) ** 2 is below "
            f"2 ** {MOST_SCORES.bit_length() - 1}, but a pack of this recipe may have {scores:,}"
        )
    if gpu[0] == 9 or (gpu >= (10, 0) and cudnn >= REPEATABLE_SINCE):
        return None
    return (
        "is deterministic only on GPUs of compute capability 9.x, and from 10.0 on with cuDNN 9.18.1, but this GPU has "
        f"{gpu[0]}.{gpu[1]}"
    )


def most_scores(seq_length: int, doc_multiple: int) -> int:
    """The largest value of (number of documents) x (length of the longest document) ** 2 for a pack.

    128 tokens, doc_multiple 64 -> one document of 128: 16,384
    """
    lengths = range(doc_multiple, seq_length + 1, doc_multiple)
    return max((1 + (seq_length - length) // doc_multiple) * length**2 for length in lengths)


def check_release(config: Config) -> None:
    """Raise ConfigError if the installed release cannot do what the recipe asks for: its cp_comm or its FP8 recipe."""
    parallel = config.parallel
    needed = _PACKED_SINCE.get(parallel.cp_comm, (0, 0))
    if parallel.cp > 1 and choice.release() < needed:
        major, minor = needed
        installed = importlib.metadata.version("transformer-engine")
        raise ConfigError(
            f"parallel.cp_comm = {parallel.cp_comm} needs Transformer Engine {major}.{minor} or newer for packed "
            f"documents, but {installed} is installed.  parallel.cp_comm=p2p works."
        )
    choice.check_fp8(config)
