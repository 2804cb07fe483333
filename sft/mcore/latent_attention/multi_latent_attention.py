"""The layer's module that takes the place of attention: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    latent, rotary key = down projection of the token        keys, values = up projection of norm(latent)
    query = projection of the token, or up projection of the norm of a latent of its own
    output = projection of attention of query, (keys, rotary key) and values

Tensor-parallel ranks hold heads.  Every rank holds the down projections whole: under sequence parallelism it applies
them to its tokens and gathers the latents, which are narrower than hidden states.  In a checkpoint the weights have the
names and shapes that Megatron-LM gives them.

Between two ways to the same result, arithmetic decides: a layer saves, and sends over cp, either the latent or keys and
values of the rank's heads, whichever has fewer numbers (`LatentAttentionConfig.sends_latent`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import MegatronModule, ModuleSpec, TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, sharded_state_dict_default
from torch import Tensor

from sft.config import ModelConfig
from sft.mcore.attention import rope
from sft.mcore.attention.backend import PackedDocuments
from sft.mcore.attention.packed_attention import Kernel, packed_attention
from sft.mcore.latent_attention.duplicated_linear import DuplicatedLinear
from sft.mcore.latent_attention.shared_latent import Setting, keys_and_values, latent_attention
from sft.mcore.lora import Adapted

# Our names within the layer -> those of Megatron-LM, where the norm of a latent belongs to the projection after it.
_STORED = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}


def with_latent_attention(spec: ModuleSpec, model: ModelConfig) -> ModuleSpec:
    """The layer `spec` with a `MultiLatentAttention`, which has linear modules of the same classes as its attention."""
    layer = spec.submodules
    attention, keys = layer.self_attention.submodules, layer.sharded_state_dict_keys_map
    layer.self_attention = ModuleSpec(
        MultiLatentAttention,
        params={
            "model": model,
            "column_parallel": attention.linear_qkv,
            "row_parallel": attention.linear_proj,
            "norm": layer.input_layernorm,
        },
    )
    # The norm before attention is a module of its own in Megatron-LM's layer, too.
    kept = {name: stored for name, stored in keys.items() if not name.startswith("input_layernorm")}
    layer.sharded_state_dict_keys_map = kept | _STORED
    return spec


class MultiLatentAttention(MegatronModule):
    """column_parallel, row_parallel, norm: classes of the modules"""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        model: ModelConfig,
        column_parallel: Any,
        row_parallel: Any,
        norm: Any,
        pg_collection: Any,
        **unused: Any,
    ) -> None:
        super().__init__(config)
        latent, self._tp = model.latent_attention, pg_collection.tp
        assert latent.kv_lora_rank is not None
        self._sizes, self._rank, self._scale = latent, latent.kv_lora_rank, rope.softmax_scale(model)
        self._num_heads = model.num_attention_heads // self._tp.size()
        self._sends_latent = latent.sends_latent(self._num_heads)
        hidden, heads = model.hidden_size, model.num_attention_heads
        linear: dict[str, Any] = dict(config=config, bias=False, is_expert=False, tp_group=self._tp)
        column: dict[str, Any] = linear | dict(
            init_method=config.init_method, gather_output=False, skip_bias_add=False, tp_comm_buffer_name="qkv"
        )
        if latent.q_lora_rank is None:
            self.linear_q_proj = column_parallel(hidden, heads * latent.qk_head_dim, **column)
        else:
            self.linear_q_down_proj = DuplicatedLinear(config, hidden, latent.q_lora_rank, self._tp)
            self.q_layernorm = norm(config=config, hidden_size=latent.q_lora_rank, eps=latent.norm_epsilon)
            self.linear_q_up_proj = column_parallel(latent.q_lora_rank, heads * latent.qk_head_dim, **column)
        self.linear_kv_down_proj = DuplicatedLinear(config, hidden, latent.compressed_width, self._tp)
        self.kv_layernorm = norm(config=config, hidden_size=self._rank, eps=latent.norm_epsilon)
        self._key_and_value = latent.qk_nope_head_dim + latent.v_head_dim
        self.linear_kv_up_proj = column_parallel(self._rank, heads * self._key_and_value, **column)
        self.linear_proj = row_parallel(
            heads * latent.v_head_dim,
            hidden,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **linear,
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, packed_seq_params: PackedDocuments, **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[t, 1, h] -> [t, 1, h]; under sequence parallelism a rank has a part of the tokens."""
        documents = packed_seq_params
        assert attention_mask is None and documents.cp is not None
        query, compressed = self._query(hidden_states, documents), self._compressed(hidden_states, documents)
        attend = self._attend_to_latents if self._sends_latent else self._attend_to_keys
        out = attend(query, compressed, documents.kernels[None], documents.cp.members)
        result: tuple[Tensor, Tensor | None] = self.linear_proj(out.flatten(1).unsqueeze(1))
        return result

    def _query(self, hidden_states: Tensor, documents: PackedDocuments) -> Tensor:
        """[t, heads, d], rotated."""
        if self._sizes.q_lora_rank is None:
            query = self.linear_q_proj(hidden_states)[0]
        else:
            query = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)[0]))[0]
        query = query.squeeze(1).unflatten(-1, (self._num_heads, -1))
        assert documents.rotation is not None
        plain, rotary = query.split([self._sizes.qk_nope_head_dim, self._sizes.qk_rope_head_dim], dim=-1)
        return torch.cat((plain, documents.rotation.apply(rotary)), dim=-1)

    def _compressed(self, hidden_states: Tensor, documents: PackedDocuments) -> Tensor:
        """[t, rank + rotary width]: the normed latent and the rotated rotary key of all tokens."""
        assert documents.rotation is not None
        latent, rotary = self.linear_kv_down_proj(hidden_states)[0].split(
            [self._rank, self._sizes.qk_rope_head_dim], -1
        )
        compressed = torch.cat((self.kv_layernorm(latent), rotary), dim=-1)
        if self._tp.size() > 1:  # backward sums the gradients of all heads
            over_tp = (
                gather_from_sequence_parallel_region
                if self.config.sequence_parallel
                else copy_to_tensor_model_parallel_region
            )
            compressed = over_tp(compressed, group=self._tp)
        latent, rotary = compressed.split([self._rank, self._sizes.qk_rope_head_dim], dim=-1)
        return torch.cat((latent, documents.rotation.apply(rotary)), dim=-1).squeeze(1)

    def _attend_to_latents(self, query: Tensor, compressed: Tensor, kernel: Kernel, cp_group: Any) -> Tensor:
        setting = Setting(
            kernel=kernel,
            scale=self._scale,
            cp_group=cp_group,
            expand=self._expand,
            rank=self._rank,
            key_width=self._sizes.qk_nope_head_dim,
        )
        return latent_attention(query, compressed, setting, list(self.linear_kv_up_proj.parameters()))

    def _attend_to_keys(self, query: Tensor, compressed: Tensor, kernel: Kernel, cp_group: Any) -> Tensor:
        latent, rotary = compressed[:, None, : self._rank], compressed[:, None, self._rank :]
        expanded = self._expand(latent, slice(0, self._num_heads))
        key, value = keys_and_values(expanded, rotary, self._sizes.qk_nope_head_dim)
        return packed_attention(query, key, value, kernel, self._scale, cp_group)

    def _expand(self, latents: Tensor, heads: slice) -> Tensor:
        """[k, 1, rank] -> [k, heads, part of a key that is not rotated and value]"""
        rows = slice(heads.start * self._key_and_value, heads.stop * self._key_and_value)
        linear = self.linear_kv_up_proj
        if isinstance(linear, Adapted):
            expanded = linear.output_rows(latents, rows)
        else:
            expanded = torch.nn.functional.linear(latents, linear.weight[rows])
        return expanded.squeeze(1).unflatten(-1, (-1, self._key_and_value))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state: dict[str, Any] = {}
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self._tp
            )
        return state
