"""Implements multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), which replaces attention in a layer.

    latent, rotary key = down projection(hidden state)       keys, values = up projection(norm(latent))
    query = projection(hidden state), or up projection(norm(down projection(hidden state)))
    output = projection(attention(query, (keys, rotary key), values)), with a sigmoid gate for each head in Ling 3.0

Tensor-parallel ranks divide the heads among themselves.  Every rank holds the whole down projections.  Under sequence
parallelism a rank applies them to its tokens, and ranks gather the latents, which are narrower than hidden states.  In
a checkpoint the weights have the names and shapes that Megatron-LM gives them.

core_attention.py computes keys and values from the latents, and decides what is sent over cp.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer import MegatronModule, ModuleSpec, TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, sharded_state_dict_default
from torch import Tensor

from sft.config import Config, ModelConfig
from sft.mcore.backend import AttentionBackend, PackedDocuments
from sft.mcore.latent_attention.core_attention import MakeCoreAttention, rotation_of
from sft.mcore.modules.duplicated_linear import DuplicatedLinear

# Our names within the layer -> names of Megatron-LM, where the norm of a latent belongs to the projection after it.
_STORED = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}


def install(spec: ModuleSpec, config: Config, model: ModelConfig, backend: AttentionBackend) -> ModuleSpec:
    """Replace the attention in the layer `spec` by a `MultiLatentAttention`, and return the spec.

    Its linear layers have the classes that the replaced attention had for its linear layers.
    """
    layer = spec.submodules
    attention, keys = layer.self_attention.submodules, layer.sharded_state_dict_keys_map
    layer.self_attention = ModuleSpec(
        MultiLatentAttention,
        params={
            "model": model,
            "core_attention": backend.latent_attention,
            "column_parallel": attention.linear_qkv,
            "row_parallel": attention.linear_proj,
            "norm": layer.input_layernorm,
        },
    )
    # In Megatron-LM's layer, too, the norm before latent attention is a separate module.
    kept = {name: stored for name, stored in keys.items() if not name.startswith("input_layernorm")}
    layer.sharded_state_dict_keys_map = kept | _STORED
    return spec


def megatron_arguments(model: ModelConfig) -> dict[str, Any]:
    """The arguments of Megatron-LM that describe latent attention; {} if the model has none.

    No argument describes interleaved rotary positions, because Megatron-LM's latent attention always has them.  With
    latent attention, qk_layernorm means norms of the latents.
    """
    latent, rope = model.latent_attention, model.rope
    if not latent.is_used:
        return {}
    sizes = dict(
        multi_latent_attention=True,
        qk_layernorm=True,
        q_lora_rank=latent.q_lora_rank,
        kv_lora_rank=latent.kv_lora_rank,
        qk_head_dim=latent.qk_nope_head_dim,
        qk_pos_emb_head_dim=latent.qk_rope_head_dim,
        v_head_dim=latent.v_head_dim,
    )
    if rope.scaling != "yarn":
        return dict(sizes, rope_type="rope")
    return dict(
        sizes,
        rope_type="yarn",
        rotary_scaling_factor=rope.factor,
        original_max_position_embeddings=rope.original_max_position,
        beta_fast=rope.beta_fast,
        beta_slow=rope.beta_slow,
        mscale=rope.mscale,
        mscale_all_dim=rope.mscale_all_dim or 0.0,
    )


class MultiLatentAttention(MegatronModule):
    """The attention module of a layer with latent attention: projections and norms around `core_attention`.

    column_parallel, row_parallel, norm: classes of the linear layers and norms
    core_arguments: further arguments from megatron-core, passed on to `core_attention`
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        model: ModelConfig,
        core_attention: MakeCoreAttention,
        column_parallel: Any,
        row_parallel: Any,
        norm: Any,
        layer_number: int,
        pg_collection: Any,
        **core_arguments: Any,
    ) -> None:
        super().__init__(config)
        self._rotated = rotation_of(model, layer_number)
        latent, self._tp = model.latent_attention, pg_collection.tp
        assert latent.kv_lora_rank is not None
        self._sizes, self._rank = latent, latent.kv_lora_rank
        self._num_heads = model.num_attention_heads // self._tp.size()
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
        key_and_value = latent.qk_nope_head_dim + latent.v_head_dim
        self.linear_kv_up_proj = column_parallel(self._rank, heads * key_and_value, **column)
        self.core_attention = core_attention(
            config=config, model=model, layer_number=layer_number, pg_collection=pg_collection, **core_arguments
        )
        if latent.head_gate:
            self.linear_gate_proj = column_parallel(hidden, heads, **column)
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
        """[t, 1, h] -> [t, 1, h], and None as bias; with sequence parallelism, both are [t / tp, 1, h]."""
        documents = packed_seq_params
        assert attention_mask is None
        query, (latent, rotary_key) = self._query(hidden_states, documents), self._latent(hidden_states)
        out = self.core_attention(query, latent, rotary_key, self.linear_kv_up_proj, documents)
        if self._sizes.head_gate:
            gate = self.linear_gate_proj(hidden_states)[0].squeeze(1)
            gate = gate.float().sigmoid().to(out.dtype)
            out = out * gate[..., None]
        result: tuple[Tensor, Tensor | None] = self.linear_proj(out.flatten(1).unsqueeze(1))
        return result

    def _query(self, hidden_states: Tensor, documents: PackedDocuments) -> Tensor:
        """The queries of this rank's heads, [t, heads, d], rotated, and times their factor by position."""
        if self._sizes.q_lora_rank is None:
            query = self.linear_q_proj(hidden_states)[0]
        else:
            query = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)[0]))[0]
        query = query.squeeze(1).unflatten(-1, (self._num_heads, -1))
        plain, rotary = query.split([self._sizes.qk_nope_head_dim, self._sizes.qk_rope_head_dim], dim=-1)
        query = torch.cat((plain, self._rotated(rotary, documents)), dim=-1)
        scale = None if documents.rotation is None else documents.rotation.query_scale
        return query if scale is None else query * scale

    def _latent(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The normed latent [s, 1, rank] and the rotary key [s, 1, r], not rotated, of this rank's tokens."""
        widths = [self._rank, self._sizes.qk_rope_head_dim]
        latent, rotary_key = self.linear_kv_down_proj(hidden_states)[0].split(widths, dim=-1)
        return self.kv_layernorm(latent), rotary_key

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
