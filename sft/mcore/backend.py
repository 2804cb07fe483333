"""The interface between an attention backend and the rest of the model.

A backend combines a library, from whose modules each layer is built (`modules/library.py`), with kernels for the
attention of each kind of layer (`backends/kernels.py`).  `selection.choose` makes one backend object per run.  A new
kind of layer gets an entry in model/mixers.py.

Two facts about backends are needed before torch is imported, so other packages hold them.  sft/config/attention.py
defines how a backend affects the keys of a recipe, and the files of sft/layers/mixers count the bytes that a backend
saves.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import ModuleSpec
from torch import Tensor

from sft.config import Config
from sft.config.mixer_section import LayerKind
from sft.layers.kinds import model_of_kind
from sft.mcore.activations.kept_calls import KeptCalls
from sft.mcore.attention import rope
from sft.mcore.attention.packed_attention import AttentionKernel
from sft.mcore.attention.rope import RotaryTable, Rotation
from sft.mcore.device import send
from sft.mcore.modules.library import ModuleLibrary
from sft.parallel.branches import Branches
from sft.parallel.cp_group import CpGroup


@dataclass
class PackedDocuments(PackedSeqParams):
    """The inputs of attention that describe a microbatch.  The engine makes this object on every pipeline stage."""

    cp: CpGroup | None = None  # the ranks that share the pack
    num_parts: int = 0  # for routers: documents of the whole pack with filler documents, or with trees, parts of texts
    in_text: Tensor | None = None  # which texts contain which parts (`TokenDocuments`); None: the pack has no trees
    kernels: Mapping[LayerKind, AttentionKernel] = field(default_factory=dict)  # softmax attention; portable only
    rotation: Rotation | None = None  # for this rank's tokens, if attention itself rotates queries and keys
    window_rotation: Rotation | None = None  # like `rotation`, for layers with model.rope.window_base
    own: Mapping[LayerKind, Any] = field(default_factory=dict)  # other inputs of the mixer of each kind of layer
    kept: KeptCalls | None = None  # calls that recomputation does not repeat; None: nothing is recomputed

    def attend(
        self, caller: Any, function: Callable[..., Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor] = ()
    ) -> Tensor:
        """The result of `function(*inputs, *weights)`.  If attention is kept, recomputation reuses this result.

        caller: the module that calls, once for each pass of its layer
        """
        if self.kept is None or not self.kept.keeps_attention:
            return function(*inputs, *weights)
        # Copies, because a view would keep the whole output of a projection in memory.
        return self.kept(caller, function, [x.contiguous() for x in inputs], weights)


class AttentionBackend(ABC):
    """One implementation of attention.

    reason   why this run uses this implementation, for the log
    library  the library that has the modules of the layers
    kernels  the kernel of each kind of layer; empty if the backend's library has its own kernels
    """

    name: ClassVar[str]  # the value of attention.backend in the recipe
    latent_attention: Callable[..., Any]  # makes a `CoreAttention` of latent_attention/core_attention.py
    computes_branches: ClassVar[bool] = False  # whether attention computes documents that continue others
    attention_rotates: bool  # attention rotates queries and keys in plain torch; False: core does, in a fused kernel

    def __init__(
        self, config: Config, reason: str, library: ModuleLibrary, kernels: Mapping[LayerKind, Any] | None = None
    ) -> None:
        self.config, self.reason, self.library, self.kernels = config, reason, library, kernels or {}
        self._ropes = {"all": config.model.rope, "windows": config.model.rope.window_rope}
        self._models = {
            "all": model_of_kind(config.model, "full attention"),
            "windows": model_of_kind(config.model, "window attention"),
        }
        self._frequencies = {
            layers: rope.frequencies(positions, self._models[layers].rotary_dim)
            for layers, positions in self._ropes.items()
            if positions is not None
        }

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"

    @property
    def transformer_fields(self) -> dict[str, bool]:
        """Fields of TransformerConfig that the backend decides."""
        return {"apply_rope_fusion": not self.attention_rotates, **self.library.transformer_fields}

    @abstractmethod
    def with_attention(self, spec: ModuleSpec) -> ModuleSpec:
        """Put this backend's attention into the layer `spec` of the library, and return the spec."""

    def rotary_table(self, device: torch.device) -> RotaryTable | None:
        """The table of angles for core, which then rotates queries and keys; None: attention itself rotates them."""
        frequencies = None if self.attention_rotates else self.frequencies(device)
        return None if frequencies is None else RotaryTable(frequencies)

    def documents(
        self,
        cu_seqlens: Tensor,
        max_seqlen: int,
        positions: Tensor,
        cp: CpGroup,
        branches: Branches | None = None,
    ) -> PackedDocuments:
        """The inputs of attention that describe a microbatch on this rank.

        cu_seqlens  int32 [documents + 1], padded boundaries of the documents of the whole pack
        max_seqlen  number of tokens of the longest document of the pack, padded, with the tokens before a branch
        positions   int64 [1, t], the positions of this rank's tokens within their texts, on the device
        cp          the ranks that share the pack
        branches    the parents of the documents; None: no document continues another one

        The padded boundaries also stand for the unpadded ones: causal attention never attends to padding at the end of
        a document.  Some releases of Transformer Engine drop keys if the two kinds of boundaries differ.
        """
        assert branches is None or self.computes_branches, f"attention of {self.name} has no branches"
        boundaries = send(cu_seqlens, positions.device)
        is_dynamic = self.config.parallel.dynamic_cp
        return PackedDocuments(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            cu_seqlens_q_padded=boundaries,
            cu_seqlens_kv_padded=boundaries,
            max_seqlen_q=max_seqlen,
            max_seqlen_kv=max_seqlen,
            cp_group=cp.members if is_dynamic else None,  # core: size 1 without a group turns CP off
            local_cp_size=cp.size if is_dynamic else None,  # core: None keeps the group of the run
            cp=cp,
            num_parts=len(cu_seqlens) - 1,
            kernels=self.microbatch_kernels(cu_seqlens, cp, positions.device, branches),
            rotation=self._rotation("all", positions),
            window_rotation=self._rotation("windows", positions),
        )

    def microbatch_kernels(
        self, cu_seqlens: Tensor, cp: CpGroup, device: torch.device, branches: Branches | None
    ) -> Mapping[LayerKind, AttentionKernel]:
        """The kernels of softmax attention for a microbatch; empty if the library of the backend has kernels itself."""
        return {}

    def _rotation(self, layers: str, positions: Tensor) -> Rotation | None:
        positions_config = self._ropes[layers]
        if not self.attention_rotates or positions_config is None:
            return None
        frequencies = self.frequencies(positions.device, layers)
        whole_heads = rope.rotates_whole_heads(self._models[layers])
        dtype = params_dtype(self.config)
        return Rotation.of(positions.flatten(), frequencies, dtype, positions_config, whole_heads=whole_heads)

    def frequencies(self, device: torch.device, layers: str = "all") -> Tensor:
        """The frequencies of the rotary embedding, float32 [rotary_dim / 2], on the device.

        layers: "windows" for layers with model.rope.window_base, "all" for the others
        """
        self._frequencies[layers] = self._frequencies[layers].to(device)  # copied the first time only
        return self._frequencies[layers]


def params_dtype(config: Config) -> torch.dtype:
    return torch.bfloat16 if config.run.precision == "bf16" else torch.float32
