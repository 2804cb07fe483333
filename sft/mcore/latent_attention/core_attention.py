"""Computes attention of a layer with latents: expands latents to keys and values, and decides what is sent over cp.

    SharedLatents   the portable backend.  A layer saves, and sends over cp, either the latents, or the keys and values
                    of the rank's heads, whichever has fewer elements (`LatentAttentionConfig.sends_latent`)
    ExpandedKeys    the te backend.  A layer computes keys and values of all heads of the rank; Transformer Engine's
                    attention saves them and sends them

The attention backend determines which of the two `MultiLatentAttention` uses.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from sft.config import ModelConfig
from sft.mcore.attention import rope
from sft.mcore.attention.packed_attention import packed_attention
from sft.mcore.backend import PackedDocuments
from sft.mcore.latent_attention.shared_latent import Setting, keys_and_values, latent_attention
from sft.mcore.lora.adapted import Adapted


class CoreAttention(Protocol):
    def __call__(
        self, query: Tensor, latent: Tensor, rotary_key: Tensor, up_projection: Any, documents: PackedDocuments
    ) -> Tensor:
        """Attention of this rank's heads: query [t, heads, d], rotated -> [t, heads, width of a value].

        latent [s, 1, rank], normed, and rotary_key [s, 1, r], not rotated.  s is t, or t / tp with sequence parallelism
        up_projection: computes keys and values from latents; a column-parallel linear layer of core, or `Adapted`
        """


# The arguments are config, model, pg_collection, and those that core passes to attention: layer_number, cp_comm_type
MakeCoreAttention = Callable[..., CoreAttention]


def rotation_of(model: ModelConfig, layer_number: int) -> Callable[[Tensor, PackedDocuments], Tensor]:
    """The function that rotates the rotary part of queries and keys in a layer.

    For a layer of model.rope.skip_layers (Kimi-Linear), the function returns its input unchanged.
    """

    def rotated(x: Tensor, documents: PackedDocuments) -> Tensor:
        assert documents.rotation is not None
        return documents.rotation.apply(x)

    return (lambda x, documents: x) if layer_number in model.rope.skip_layers else rotated


def _over_tp(x: Tensor, group: Any, sequence_parallel: bool) -> Tensor:
    """[s, 1, d] -> [t, 1, d], the tokens of all tp ranks; backward sums gradients over the heads of all tp ranks."""
    if group.size() == 1:
        return x
    over_tp = gather_from_sequence_parallel_region if sequence_parallel else copy_to_tensor_model_parallel_region
    result: Tensor = over_tp(x, group=group)
    return result


class SharedLatents:
    """Core attention of the portable backend, for one layer."""

    def __init__(
        self, *, config: TransformerConfig, model: ModelConfig, layer_number: int, pg_collection: Any, **unused: Any
    ) -> None:
        sizes, tp = model.latent_attention, pg_collection.tp
        assert sizes.kv_lora_rank is not None
        self._sizes, self._rank, self._rotated = sizes, sizes.kv_lora_rank, rotation_of(model, layer_number)
        self._scale = rope.softmax_scale(model)
        self._over_tp = partial(_over_tp, group=tp, sequence_parallel=config.sequence_parallel)
        num_heads = model.num_attention_heads // tp.size()
        self._heads, self._sends_latent = slice(0, num_heads), sizes.sends_latent(num_heads)

    def __call__(
        self, query: Tensor, latent: Tensor, rotary_key: Tensor, up_projection: Any, documents: PackedDocuments
    ) -> Tensor:
        widths = [self._rank, self._sizes.qk_rope_head_dim]
        latent, rotary_key = self._over_tp(torch.cat((latent, rotary_key), dim=-1)).split(widths, dim=-1)
        rotary_key = self._rotated(rotary_key, documents)
        attend = self._attend_to_latents if self._sends_latent else self._attend_to_keys
        return attend(query, latent, rotary_key, up_projection, documents)

    def _attend_to_latents(
        self, query: Tensor, latent: Tensor, rotary_key: Tensor, up_projection: Any, documents: PackedDocuments
    ) -> Tensor:
        assert documents.cp is not None
        setting = Setting(
            kernel=documents.kernels["latent attention"],
            scale=self._scale,
            cp_group=documents.cp.members,
            expand=lambda latents, heads: self._expand(latents, heads, up_projection),
            rank=self._rank,
            key_width=self._sizes.qk_nope_head_dim,
        )
        compressed = torch.cat((latent, rotary_key), dim=-1).squeeze(1)

        def attend(query: Tensor, compressed: Tensor, *weights: Tensor) -> Tensor:
            return latent_attention(query, compressed, setting, weights)

        return documents.attend(self, attend, (query, compressed), list(up_projection.parameters()))

    def _attend_to_keys(
        self, query: Tensor, latent: Tensor, rotary_key: Tensor, up_projection: Any, documents: PackedDocuments
    ) -> Tensor:
        assert documents.cp is not None
        expanded = self._expand(latent, self._heads, up_projection)
        key, value = keys_and_values(expanded, rotary_key, self._sizes.qk_nope_head_dim)
        kernel, cp_group = documents.kernels["latent attention"], documents.cp.members
        attend = partial(packed_attention, kernel=kernel, scale=self._scale, cp_group=cp_group)
        return documents.attend(self, attend, (query, key, value))

    def _expand(self, latents: Tensor, heads: slice, up_projection: Any) -> Tensor:
        """Latents [k, 1, rank] -> [k, heads, d]; d holds the part of a key that is not rotated, then the value."""
        width = self._sizes.qk_nope_head_dim + self._sizes.v_head_dim
        rows = slice(heads.start * width, heads.stop * width)
        if isinstance(up_projection, Adapted):
            expanded = up_projection.output_rows(latents, rows)
        else:
            expanded = torch.nn.functional.linear(latents, up_projection.weight[rows])
        return expanded.squeeze(1).unflatten(-1, (-1, width))


class ExpandedKeys(torch.nn.Module):
    """Core attention of the te backend: computes the keys and values of all heads before attention.

    attention: a class with core's CoreAttention protocol that takes keys and values of different widths
    """

    def __init__(
        self,
        *,
        attention: Any,
        config: TransformerConfig,
        model: ModelConfig,
        layer_number: int,
        pg_collection: Any,
        cp_comm_type: str | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self._sizes, self._rotated = model.latent_attention, rotation_of(model, layer_number)
        self._over_tp = partial(_over_tp, group=pg_collection.tp, sequence_parallel=config.sequence_parallel)
        self.attention = attention(
            config=config,
            layer_number=layer_number,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            softmax_scale=rope.softmax_scale(model),
            k_channels=self._sizes.qk_head_dim,
            v_channels=self._sizes.v_head_dim,
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
        )

    def forward(
        self, query: Tensor, latent: Tensor, rotary_key: Tensor, up_projection: Any, documents: PackedDocuments
    ) -> Tensor:
        expanded = up_projection(latent)[0]  # for all t tokens: a column-parallel layer gathers the latents itself
        expanded = expanded.squeeze(1).unflatten(-1, (query.shape[1], -1))
        rotary_key = self._rotated(self._over_tp(rotary_key), documents)
        key, value = keys_and_values(expanded, rotary_key, self._sizes.qk_nope_head_dim)
        # A view would keep the whole of `expanded` in memory.
        query, value = query.contiguous(), value.contiguous()
        attend = partial(
            self.attention, attention_mask=None, attn_mask_type=AttnMaskType.causal, packed_seq_params=documents
        )
        out = documents.attend(self, attend, (query, key, value))
        return out.view(len(query), query.shape[1], self._sizes.v_head_dim)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """The entries of the inner attention, under the key that Megatron-LM uses for it."""
        return self.attention.sharded_state_dict(prefix, sharded_offsets, metadata)
