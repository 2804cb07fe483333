"""Defines the base class of the modules that replace attention in a layer with a recurrence.

Such a module has an input projection, a convolution, the weights of the recurrence, and an output projection.  A
subclass gives the widths, and computes the part between the projections.

Tensor-parallel ranks divide heads among themselves.  A rank's rows of the input projection, and its channels of the
convolution, consist of a part of the queries, a part of the keys, and so on.  They are not consecutive rows of the
whole weight.  So a checkpoint has separate tensors for these parts, with the names that Megatron-LM gives them.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.extensions.transformer_engine import te_checkpoint
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import MegatronModule, ModuleSpec, TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

from sft.config import Config, ModelConfig
from sft.config.mixer_section import LayerKind
from sft.layers.kinds import model_of_kind
from sft.layers.mixers import MIXERS
from sft.layers.mixers.recurrent import RecurrentMixer
from sft.mcore.activations.recompute import recomputed
from sft.mcore.backend import AttentionBackend, PackedDocuments, params_dtype
from sft.mcore.linear_attention.documents import LinearDocuments
from sft.parallel.branches import Branches
from sft.parallel.cp_group import CpGroup


def install(
    mixer: "type[RecurrentLayer]", spec: ModuleSpec, config: Config, model: ModelConfig, backend: AttentionBackend
) -> ModuleSpec:
    """Replace the attention in the layer `spec` by this mixer, and return the spec.

    Its linear layers have the classes that the replaced attention had for its linear layers.
    """
    layer, recompute = spec.submodules, config.train.recompute == "selective"
    attention = layer.self_attention.submodules
    linears = {"in_proj": attention.linear_qkv, "out_proj": attention.linear_proj}
    layer.self_attention = ModuleSpec(mixer, params={"model": model, "recompute": recompute, **linears})
    layer.sharded_state_dict_keys_map = {
        name: stored.replace("linear_qkv", "in_proj") for name, stored in layer.sharded_state_dict_keys_map.items()
    }
    return spec


def documents(
    kind: LayerKind,
    backend: AttentionBackend,
    cu_seqlens: np.ndarray,
    cp: CpGroup,
    device: torch.device,
    branches: Branches | None = None,
) -> LinearDocuments:
    """The fragments of a microbatch on this rank.  cu_seqlens: int32 [n + 1], padded boundaries of the whole pack"""
    config = backend.config
    mixer = MIXERS[kind](model_of_kind(config.model, kind))
    assert isinstance(mixer, RecurrentMixer)
    sizes = mixer.head_sizes(config.parallel.tp, params_dtype(config).itemsize)
    return LinearDocuments.of(
        cu_seqlens,
        cp,
        device,
        backend.kernels[kind],
        heads=sizes.num_heads,
        num_taps=mixer.conv_kernel,
        max_short=sizes.max_short(cp.size),
        branches=branches,
    )


class RecurrentLayer(MegatronModule):
    """The mixer of a layer with a recurrence.

    in_proj, out_proj  classes of the column-parallel and the row-parallel projection
    recompute          True: the module saves only its input, and backward computes the forward pass again.  The time is
                       linear in the length.  So, unlike for softmax attention, this is cheap at any length

    kind     the kind of layer
    parts    for each weight that a checkpoint stores in parts, the names of the parts
    """

    kind: ClassVar[LayerKind]
    parts: ClassVar[Mapping[str, Sequence[str]]]

    def __init__(
        self,
        config: TransformerConfig,
        *,
        model: ModelConfig,
        recompute: bool,
        in_proj: Any,
        out_proj: Any,
        pg_collection: Any,
        **unused: Any,
    ) -> None:
        super().__init__(config)
        self._recompute, self._tp = recompute, pg_collection.tp
        widths, values = self.widths(model)
        self._widths = [width // self._tp.size() for width in widths]  # widths on this rank
        common: dict[str, Any] = dict(config=config, bias=False, is_expert=False, tp_group=self._tp)
        self.column_parallel = partial(
            in_proj,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **common,
        )
        self.in_proj = self.column_parallel(model.hidden_size, sum(widths))
        self.make_weights(model)
        self.out_proj = out_proj(
            values,
            model.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **common,
        )

    @abstractmethod
    def widths(self, model: ModelConfig) -> tuple[list[int], int]:
        """The rows of each part of the input projection, and the columns of the output projection."""

    @abstractmethod
    def make_weights(self, model: ModelConfig) -> None:
        """Make the weights between the projections.  `_widths` has the rows of this rank."""

    def projected(self, hidden_states: Tensor) -> Any:
        """The first argument of `mixed`: the output of the input projection, [t, rows]."""
        return self.in_proj(hidden_states)[0].squeeze(1)

    @abstractmethod
    def mixed(self, projected: Any, documents: LinearDocuments, packed: PackedDocuments) -> Tensor:
        """Computes the input of the output projection, [t, columns], from the result of `projected`."""

    @abstractmethod
    def split_weights(self) -> dict[str, Tensor]:
        """The weights between the projections whose rows are divided over tp, by name."""

    def split_weight(self, *shape: int) -> torch.nn.Parameter:
        """A weight without values.  tp ranks hold different rows of it."""
        weight = torch.nn.Parameter(torch.full(shape, torch.nan, dtype=self.config.params_dtype))
        set_tensor_model_parallel_attributes(weight, True, 0, 1)
        return weight

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, packed_seq_params: PackedDocuments, **unused: Any
    ) -> tuple[Tensor, None]:
        """The output of the mixer, and None as bias.

        hidden_states: [t, 1, h], or [t / tp, 1, h] with sequence parallelism; the output has the same shape
        """
        assert attention_mask is None
        if self._recompute and self.training and self.config.fp8:  # te_checkpoint restores the scales of the first pass
            tracker = tensor_parallel.random.get_cuda_rng_tracker
            return (
                te_checkpoint(partial(self._compute, packed_seq_params), False, tracker, self._tp, hidden_states),
                None,
            )
        if self._recompute and self.training:
            return recomputed(partial(self._compute, packed_seq_params), hidden_states, self.parameters()), None
        return self._compute(packed_seq_params, hidden_states), None

    def _compute(self, packed: PackedDocuments, hidden_states: Tensor) -> Tensor:
        mixed = self.mixed(self.projected(hidden_states), packed.own[self.kind], packed)
        output: Tensor
        output, bias = self.out_proj(mixed.unsqueeze(1))
        assert bias is None
        return output

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state: dict[str, Any] = {}
        own = self.split_weights()
        for name, module in self.named_children():
            if f"{name}.weight" not in own:
                state |= sharded_state_dict_default(
                    module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self._tp
                )
        state |= make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(own, 0),
            sharded_offsets,
            tp_group=self._tp,
            dp_cp_group=metadata["dp_cp_group"],
        )
        rows = dict(zip(self.parts["in_proj.weight"], self._widths))
        for name, parts in self.parts.items():
            state[prefix + name] = _by_part(state[prefix + name], {part: rows[part] for part in parts if rows[part]})
        return state


def _by_part(shard: ShardedTensor, rows: Mapping[str, int]) -> ShardedTensorFactory:
    """The entry of a sharded state dict for a weight that a checkpoint stores as several tensors.

    rows: number of rows of each of these tensors on this rank, by name
    """
    build = partial(_parts, shard.without_data(), rows)
    return ShardedTensorFactory(shard.key, shard.data, build, torch.cat, shard.replica_id)


@torch.no_grad()
def _parts(
    whole: ShardedTensor, widths: Mapping[str, int], key: str, data: Tensor, replica_id: Any, flattened_range: None
) -> list[ShardedTensor]:
    assert flattened_range is None
    axis, num_ranks = whole.prepend_axis_num, whole.global_shape[whole.prepend_axis_num] // data.shape[0]
    rank = whole.global_offset[axis] // data.shape[0]
    return [
        replace(
            whole,
            key=f"{key}.{name}",
            data=rows,
            local_shape=tuple(rows.shape),
            global_shape=(*whole.global_shape[:axis], len(rows) * num_ranks, *whole.global_shape[axis + 1 :]),
            global_offset=(*whole.global_offset[:axis], len(rows) * rank, *whole.global_offset[axis + 1 :]),
            replica_id=replica_id,
        )
        for name, rows in zip(widths, data.split([*widths.values()]))
    ]
