"""Implements multi-token prediction: a block predicts the token after the next one (DeepSeek-V3, arXiv:2412.19437).

    block(t) = norm(layer(eh_proj([enorm(embedding of token t + 1), hnorm(hidden state of token t)])))

    document        a  b  c  d
    block reads     ha hb hc -      hidden states of the tokens after the model's last norm
                    b  c  d  -      embeddings of these tokens
    block predicts  c  d  -  -

The layer has the kind of the model's last layer.  The block shares embedding and output weight with the model; its
other weights have the keys of Megatron-LM's block.

This module replaces megatron-core's block (multi_token_prediction.py).  In core's block, each rank shifts its tokens
document by document, and gets missing tokens from neighbouring ranks.  Core divides the loss by the number of tokens of
a microbatch on a rank, so the loss depends on the layout (Megatron-LM#2417, #3943).  In this trainer, `Pack` determines
the next two tokens of each token before context parallelism divides the pack, and the loss is divided by the number of
predicted tokens of the global batch (loss/mtp.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from sft.mcore.modules.duplicated_linear import DuplicatedLinear


@dataclass(frozen=True, kw_only=True)
class NextTokens:
    """The inputs of the block besides hidden states.

    tokens     int64 [1, t], the token after each token of this rank; after the last token of a document, any token
    documents  int32 [1, t], or [1, t / tp] with sequence parallelism: the number of each token's document; -1 for
               padding and for the last token of a document.  Only experts read it
    """

    tokens: Tensor
    documents: Tensor


class MultiTokenPrediction(MegatronModule):
    """The block for multi-token prediction.

    layer_spec    makes the spec of the block's transformer layer
    norm          class of the block's norms
    layer_number  number of the block's layer on this stage; core adds the number of layers before the stage
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_spec: Callable[[], ModuleSpec],
        norm: type[torch.nn.Module],
        *,
        layer_number: int,
        pg_collection: Any,
        vp_stage: int | None,
    ) -> None:
        super().__init__(config=config)
        hidden = config.hidden_size
        sizes = dict(config=config, hidden_size=hidden, eps=config.layernorm_epsilon)
        self.enorm, self.hnorm, self.final_layernorm = norm(**sizes), norm(**sizes), norm(**sizes)
        self.eh_proj = DuplicatedLinear(config, 2 * hidden, hidden, pg_collection.tp)
        self.transformer_layer = build_module(
            layer_spec(), config=config, layer_number=layer_number, pg_collection=pg_collection, vp_stage=vp_stage
        )

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        *,
        documents: Tensor,
        rotary_pos_emb: Tensor | None,
        packed_seq_params: Any,
    ) -> Tensor:
        """The block's hidden states, [t, 1, h].

        hidden: [t, 1, h], the model's hidden states; embedded: [t, 1, h], embeddings of the tokens after each token
        documents: [1, t], the number of each token's document or -1 (`NextTokens.documents`)
        With sequence parallelism, every t is t / tp.
        """

        def layer(hidden: Tensor, embedded: Tensor) -> Tensor:
            joined = torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1)
            output, _ = self.transformer_layer(
                self.eh_proj(joined)[0],
                attention_mask=None,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                padding_mask=documents,
            )
            return output

        output: Tensor
        if self.training and torch.is_grad_enabled() and self.config.recompute_granularity == "full":
            # Core recomputes a function only if one of its inputs requires a gradient.
            hidden = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
            output = tensor_parallel.checkpoint(layer, False, hidden, embedded)
        else:
            output = layer(hidden, embedded)
        normed: Tensor = self.final_layernorm(output)
        return normed

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        return super().sharded_state_dict("mtp.layers.0.", sharded_offsets, metadata)
