"""Lists for each kind of layer how its mixer is put into the layer, and which inputs the mixer needs.

sft/layers/mixers describes the kinds without torch.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.transformer import ModuleSpec
from torch import Tensor

from sft.config import Config, ModelConfig
from sft.config.mixer_section import LayerKind
from sft.layers.kinds import layer_groups, model_of_kind
from sft.mcore.backend import AttentionBackend, PackedDocuments
from sft.mcore.latent_attention import multi_latent_attention
from sft.mcore.model import gated_delta_net, mamba, recurrent_layer
from sft.mcore.model.halves import without_mixer
from sft.mcore.model.head_chunks import with_head_chunks
from sft.mcore.model.own_heads import needs_own_heads, with_own_heads
from sft.mcore.modules.biases import with_bias
from sft.parallel.branches import Branches
from sft.parallel.cp_group import CpGroup

# (backend, cu_seqlens of the whole pack as int32 array, ranks that share the pack, device, branches of the pack)
# -> the mixer's input
MakeDocuments = Callable[[AttentionBackend, np.ndarray, CpGroup, torch.device, Branches | None], Any]


class MixerModule(NamedTuple):
    """The functions of one kind of mixer.

    install    (spec, config, model, backend) -> the layer `spec` with this mixer.  `model` has only layers of this kind
               (`model_of_kind`)
    documents  makes the entry of `PackedDocuments.own` for a microbatch; None: the mixer needs no further input
    arguments  makes the Megatron-LM arguments that describe the mixer in a checkpoint.  Its argument is the whole model
    """

    install: Callable[[ModuleSpec, Config, ModelConfig, AttentionBackend], ModuleSpec]
    documents: MakeDocuments | None = None
    arguments: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}


def _softmax(spec: ModuleSpec, config: Config, model: ModelConfig, backend: AttentionBackend) -> ModuleSpec:
    has_own_heads = config.model.full_attention.is_used or needs_own_heads(model)
    spec = with_own_heads(spec, model) if has_own_heads else spec
    if model.attention_output_bias:
        attention = spec.submodules.self_attention.submodules
        attention.linear_proj = with_bias(attention.linear_proj)
    chunks = config.train.head_chunks
    return spec if chunks is None else with_head_chunks(spec, chunks)


def _recurrent(
    layer: type[recurrent_layer.RecurrentLayer], arguments: Callable[[ModelConfig], dict[str, Any]]
) -> MixerModule:
    return MixerModule(
        partial(recurrent_layer.install, layer), partial(recurrent_layer.documents, layer.kind), arguments
    )


MIXER_MODULES: Mapping[LayerKind, MixerModule] = {
    "full attention": MixerModule(_softmax),
    "window attention": MixerModule(_softmax),
    "linear attention": _recurrent(gated_delta_net.GatedDeltaNet, gated_delta_net.megatron_arguments),
    "Mamba-2": _recurrent(mamba.Mamba2, mamba.megatron_arguments),
    "latent attention": MixerModule(
        multi_latent_attention.install, arguments=multi_latent_attention.megatron_arguments
    ),
    "no mixer": MixerModule(lambda spec, config, model, backend: without_mixer(spec)),
}


def with_mixer(spec: ModuleSpec, config: Config, backend: AttentionBackend, layer_number: int) -> ModuleSpec:
    """Put the mixer of this layer into the layer `spec`, and return the spec.  layer_number: from 1"""
    kind = config.model.kind_of(layer_number)
    return MIXER_MODULES[kind].install(spec, config, model_of_kind(config.model, kind), backend)


def packed_documents(
    backend: AttentionBackend,
    cu_seqlens: Tensor,
    max_seqlen: int,
    positions: Tensor,
    cp: CpGroup,
    branches: Branches | None = None,
) -> PackedDocuments:
    """The inputs of attention that describe a microbatch, for all mixers of the model.

    The arguments are those of `AttentionBackend.documents`.
    """
    packed = backend.documents(cu_seqlens, max_seqlen, positions, cp, branches)
    kinds = {group.mixer.kind for group in layer_groups(backend.config.model)}
    makers = {kind: make for kind, (_, make, _) in MIXER_MODULES.items() if make is not None and kind in kinds}
    boundaries = cu_seqlens.cpu().numpy()
    packed.own = {kind: make(backend, boundaries, cp, positions.device, branches) for kind, make in makers.items()}
    return packed
