"""Implements the `portable` backend: attention over packed documents without Transformer Engine, on any device.

kernels.py chooses the kernel: a flash kernel on CUDA in bf16, or plain torch on any device.  Attention itself rotates
queries and keys, so core does not.  Attention gets keys and values of other ranks over the context-parallel group
(packed_attention.py).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import ModuleSpec, TransformerConfig
from torch import Tensor

from sft.config import Config, ModelConfig
from sft.config.mixer_section import LayerKind
from sft.layers.kinds import all_layer_groups, model_of_kind
from sft.mcore.attention import rope
from sft.mcore.attention.packed_attention import AttentionKernel, AttentionSetting, packed_attention, rotated
from sft.mcore.backend import AttentionBackend, PackedDocuments
from sft.mcore.backends.kernels import Chosen
from sft.mcore.latent_attention.core_attention import SharedLatents
from sft.mcore.modules.library import LocalLibrary, ModuleLibrary
from sft.mcore.modules.stored import OwnWeights
from sft.parallel.branches import Branches
from sft.parallel.cp_group import CpGroup


class Portable(AttentionBackend):
    """The backend without Transformer Engine's attention.

    chosen   the kernel of each kind of layer that the model has
    library  the library of modules; None: `LocalLibrary`
    """

    name = "portable"
    latent_attention = SharedLatents
    attention_rotates = True
    computes_branches = True

    def __init__(
        self, config: Config, reason: str, chosen: Mapping[LayerKind, Chosen], library: ModuleLibrary | None = None
    ) -> None:
        kernels = {kind: kernel.kernel for kind, kernel in chosen.items()}
        super().__init__(config, reason, library or LocalLibrary(config), kernels)
        self.chosen = chosen
        groups = all_layer_groups(config.model)
        self._windows = {group.mixer.kind: group.mixer.window for group in groups if group.mixer.pair_width}

    def with_attention(self, spec: ModuleSpec) -> ModuleSpec:
        attention = spec.submodules.self_attention.submodules
        attention.core_attention = partial(PortableAttention, model=self.config.model)
        return spec

    def microbatch_kernels(
        self, cu_seqlens: Tensor, cp: CpGroup, device: torch.device, branches: Branches | None
    ) -> Mapping[LayerKind, AttentionKernel]:
        boundaries = cu_seqlens.cpu().numpy()
        return {
            kind: self.kernels[kind](boundaries, cp.size, cp.rank, device, window=window, branches=branches)
            for kind, window in self._windows.items()
        }


class PortableAttention(OwnWeights):
    """Implements core's CoreAttention protocol with `packed_attention`, for one layer."""

    split_axes = {"softmax_offset": 0}

    def __init__(
        self,
        *,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: Any,
        softmax_scale: float,
        model: ModelConfig,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.kind = model.kind_of(layer_number)
        own = model_of_kind(model, self.kind)
        self.rotates = layer_number not in model.rope.skip_layers
        self.has_own_base = self.kind == "window attention" and model.rope.window_base is not None
        is_scaled = self.rotates and not self.has_own_base
        self.scale = softmax_scale if is_scaled else rope.plain_scale(own)
        self.tp_group = pg_collection.tp
        # Applies norms to rotated queries and keys.  None: norms, if there are any, come before the rotation.
        self.norm_rotated: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
        self.softmax_offset = None  # core's name for the scores of sinks
        if own.attention_sinks:
            num_heads = own.num_attention_heads // self.tp_group.size()
            self.softmax_offset = torch.nn.Parameter(torch.empty(num_heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: Tensor,  # [t, heads, d]
        key: Tensor,  # [t, key heads, d]
        value: Tensor,  # [t, key heads, d]
        attention_mask: Tensor | None,
        /,
        *,
        packed_seq_params: PackedDocuments | None = None,
        attention_bias: Tensor | None = None,
        **unused: Any,
    ) -> Tensor:
        documents = packed_seq_params
        assert documents is not None and attention_mask is None and attention_bias is None
        setting = self.setting(documents)
        if self.norm_rotated is not None:
            if setting.rotation is not None:
                query, key = rotated(query, key, setting.rotation)
            (query, key), setting = self.norm_rotated(query, key), setting._replace(rotation=None)

        def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
            return packed_attention(query, key, value, *setting, sinks)

        sinks = [] if self.softmax_offset is None else [self.softmax_offset]
        return documents.attend(self, attend, (query, key, value), sinks).flatten(1)

    def setting(self, documents: PackedDocuments) -> AttentionSetting:
        """The arguments of attention that have no gradient, for one microbatch."""
        assert documents.cp is not None
        rotation = None
        if self.rotates:
            rotation = documents.window_rotation if self.has_own_base else documents.rotation
            assert rotation is not None
        return AttentionSetting(documents.kernels[self.kind], self.scale, documents.cp.members, rotation)
