"""Gated DeltaNet (Yang et al., 2024, arXiv:2412.06464): the module that replaces attention in a layer.

    q, k, v, z, b, a = projections of the hidden state      q, k, v = silu(causal convolution of q, k, v)
    g = -exp(A_log) * softplus(a + dt_bias)                 beta = beta_factor * sigmoid(b)
    output = projection of (norm(gated delta rule of q, k, v, g, beta) * silu(z))

Tensor-parallel ranks divide key heads among them; a rank also has the value heads that its key heads serve.  So a
rank's rows of the projection, and its channels of the convolution, consist of a part of the queries, a part of the
keys, and so on.  They are not consecutive rows of the whole weight.  So a checkpoint has separate tensors for queries,
keys and so on, with the names that Megatron-LM gives them.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

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
from sft.layers.mixers.delta import HeadSizes
from sft.mcore.activations.recompute import recomputed
from sft.mcore.backend import AttentionBackend, PackedDocuments, params_dtype
from sft.mcore.linear_attention.delta_rule import Inputs
from sft.mcore.linear_attention.documents import LinearDocuments, linear_attention
from sft.mcore.linear_attention.gated_norm import GatedNorm
from sft.parallel.branches import Branches
from sft.parallel.cp_group import CpGroup

_PROJECTIONS = ("query", "key", "value", "z", "beta", "alpha")  # Megatron-LM's names of the parts of in_proj


def install(spec: ModuleSpec, config: Config, model: ModelConfig, backend: AttentionBackend) -> ModuleSpec:
    """Replace the attention in the layer `spec` by a `GatedDeltaNet`, and return the spec.

    Its linear layers have the classes that the replaced attention had for its linear layers.
    """
    layer, recompute = spec.submodules, config.train.recompute == "selective"
    attention = layer.self_attention.submodules
    linears = {"in_proj": attention.linear_qkv, "out_proj": attention.linear_proj}
    layer.self_attention = ModuleSpec(
        GatedDeltaNet,
        params={"model": model, "recompute": recompute, **linears},
    )
    layer.sharded_state_dict_keys_map = {
        name: stored.replace("linear_qkv", "in_proj") for name, stored in layer.sharded_state_dict_keys_map.items()
    }
    return spec


def documents(
    backend: AttentionBackend,
    cu_seqlens: np.ndarray,
    cp: CpGroup,
    device: torch.device,
    branches: Branches | None = None,
) -> LinearDocuments:
    """The fragments of a microbatch on this rank.  cu_seqlens: int32 [n + 1], padded boundaries of the whole pack"""
    config, linear = backend.config, backend.config.model.linear_attention
    sizes = HeadSizes.of(linear, config.parallel.tp, params_dtype(config).itemsize)
    return LinearDocuments.of(
        cu_seqlens,
        cp,
        device,
        backend.kernels["linear attention"],
        heads=sizes.value_heads,
        num_taps=linear.conv_kernel,
        max_short=sizes.max_short(cp.size),
        branches=branches,
    )


def megatron_arguments(model: ModelConfig) -> dict[str, Any]:
    linear = model.linear_attention
    if not linear.layers:
        return {}
    return dict(
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[int(number + 1 in linear.layers) for number in range(model.num_layers)],
        linear_num_key_heads=linear.num_key_heads,
        linear_num_value_heads=linear.num_value_heads,
        linear_key_head_dim=linear.key_head_dim,
        linear_value_head_dim=linear.value_head_dim,
        linear_conv_kernel_dim=linear.conv_kernel,
    )


class GatedDeltaNet(MegatronModule):
    """The mixer of a layer with linear attention.

    in_proj, out_proj  classes of the column-parallel and the row-parallel projection
    recompute          True: the module saves only its input, and backward computes its forward pass again.  Its time is
                       linear in the length, so this is cheap at any length, unlike for softmax attention
    """

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
        self._recompute = recompute
        linear, self._tp = model.linear_attention, pg_collection.tp
        assert linear.num_key_heads is not None and linear.num_value_heads is not None
        self._key_dim, self._value_dim = linear.key_head_dim, linear.value_head_dim
        self._beta_factor = linear.beta_factor
        keys, values, heads = linear.key_width, linear.value_width, linear.num_value_heads
        widths = [keys, keys, values, values, heads, heads]
        self._widths = [width // self._tp.size() for width in widths]  # widths on this rank
        common: dict[str, Any] = dict(config=config, bias=False, is_expert=False, tp_group=self._tp)
        self.in_proj = in_proj(
            model.hidden_size,
            sum(widths),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **common,
        )
        self.conv1d = torch.nn.ParameterDict(
            {"weight": self._split_weight(sum(self._widths[:3]), 1, linear.conv_kernel)}
        )
        self.A_log, self.dt_bias = self._split_weight(self._widths[4]), self._split_weight(self._widths[4])
        epsilon = linear.norm_epsilon or model.norm_epsilon
        self.out_norm = GatedNorm(linear.value_head_dim, epsilon, config.params_dtype, self._tp)
        self.out_proj = out_proj(
            values,
            model.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **common,
        )

    def _split_weight(self, *shape: int) -> torch.nn.Parameter:
        """A weight without values.  tp ranks hold different rows of it."""
        weight = torch.nn.Parameter(torch.full(shape, torch.nan, dtype=self.config.params_dtype))
        set_tensor_model_parallel_attributes(weight, True, 0, 1)
        return weight

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, packed_seq_params: PackedDocuments, **unused: Any
    ) -> tuple[Tensor, None]:
        """Hidden states [t, 1, h], or [t / tp, 1, h] with sequence parallelism -> the same shape, and None as bias."""
        assert attention_mask is None
        if self._recompute and self.training and self.config.fp8:  # restores the first pass's scales
            tracker = tensor_parallel.random.get_cuda_rng_tracker
            return (
                te_checkpoint(partial(self._compute, packed_seq_params), False, tracker, self._tp, hidden_states),
                None,
            )
        if self._recompute and self.training:
            return recomputed(partial(self._compute, packed_seq_params), hidden_states, self.parameters()), None
        return self._compute(packed_seq_params, hidden_states), None

    def _compute(self, packed: PackedDocuments, hidden_states: Tensor) -> Tensor:
        documents: LinearDocuments = packed.own["linear attention"]
        kernel, projected = documents.kernel, self.in_proj(hidden_states)[0].squeeze(1)
        z, b, a = projected.split([sum(self._widths[:3]), *self._widths[3:]], -1)[1:]
        channels, weight = projected[:, : sum(self._widths[:3])], self.conv1d["weight"].squeeze(1)
        mixed = kernel.convolution(channels, weight, documents.convolution, documents.cp.members)
        q, k, v = mixed.split(self._widths[:3], -1)
        inputs = Inputs(
            q=q.unflatten(-1, (-1, self._key_dim)),
            k=k.unflatten(-1, (-1, self._key_dim)),
            v=v.unflatten(-1, (-1, self._value_dim)),
            g=kernel.log_decay(a, self.A_log, self.dt_bias),
            beta=b.sigmoid() if self._beta_factor == 1.0 else self._beta_factor * b.sigmoid(),
        )
        out = linear_attention(inputs, documents, partial(packed.attend, self))
        normed = self.out_norm(out, z.unflatten(-1, (-1, self._value_dim)), kernel)
        output: Tensor
        output, bias = self.out_proj(normed.flatten(1).unsqueeze(1))
        assert bias is None
        return output

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state: dict[str, Any] = {}
        for name in ("in_proj", "out_norm", "out_proj"):
            module = getattr(self, name)
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self._tp
            )
        own = {"A_log": self.A_log, "dt_bias": self.dt_bias, "conv1d.weight": self.conv1d["weight"]}
        state |= make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(own, 0),
            sharded_offsets,
            tp_group=self._tp,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, count in (("in_proj.weight", 6), ("conv1d.weight", 3)):
            state[prefix + name] = _by_part(state[prefix + name], self._widths[:count])
        return state


def _by_part(shard: ShardedTensor, widths: Sequence[int]) -> ShardedTensorFactory:
    """The entry of a sharded state dict for a weight that a checkpoint stores as several tensors.

    widths: number of rows of each of these tensors on this rank
    """
    build = partial(_parts, shard.without_data(), widths)
    return ShardedTensorFactory(shard.key, shard.data, build, torch.cat, shard.replica_id)


@torch.no_grad()
def _parts(
    whole: ShardedTensor, widths: Sequence[int], key: str, data: Tensor, replica_id: Any, flattened_range: None
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
        for name, rows in zip(_PROJECTIONS, data.split(list(widths)))
    ]
