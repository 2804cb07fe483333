"""Implements a GPTModel that returns hidden states, with multi-token prediction also the hidden states of the block.

With multi-token prediction and pipeline parallelism, the last stage needs the input embedding.  In a model with tied
embeddings this is its output weight; otherwise the stage has a copy.  Both copies get the sum of their gradients, so
they stay equal.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.multi_token_prediction import tie_word_embeddings_state_dict
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor

from sft.config.train import MtpMode
from sft.mcore.low_bits.frozen_base import FrozenBase
from sft.mcore.model.mtp import MultiTokenPrediction, NextTokens
from sft.mcore.sharding.model import gradient_of


class Hidden(NamedTuple):
    """Hidden states of the last stage, [t, 1, h], or [t / tp, 1, h] with sequence parallelism."""

    first: Tensor  # hidden states that predict the next token
    second: Tensor  # hidden states that predict the token after the next one


class HiddenStatesGPT(GPTModel):
    """GPTModel whose last stage returns hidden states instead of logits.

    embedding_norm  norm on the output of the embedding; None: no norm
    embedding_multiplier  factor on this output
    logits_scaling  divisor of the logits; the last stage divides its hidden states instead, which gives equal logits
    mtp             makes the block for multi-token prediction; None: the model has no block
    mtp_mode        the value of train.mtp
    """

    frozen_base: FrozenBase | None = None  # the frozen weights in low bits; None: there are none

    def __init__(
        self,
        *,
        embedding_norm: torch.nn.Module | None = None,
        embedding_multiplier: float = 1.0,
        logits_scaling: float = 1.0,
        mtp: Callable[[], MultiTokenPrediction] | None = None,
        mtp_mode: MtpMode = "off",
        **core: Any,
    ) -> None:
        super().__init__(**core)
        self._logits_scaling, self._embedding_multiplier = logits_scaling, embedding_multiplier
        self._mtp_mode, self._embedding_norm = mtp_mode, embedding_norm
        if self.pre_process and (embedding_multiplier != 1.0 or embedding_norm is not None):
            self.embedding.register_forward_hook(lambda module, args, output: self._changed(output))
        # Core would treat an attribute `mtp` as its own block.
        self.multi_token = mtp() if mtp is not None and self.post_process else None
        self._has_copies = False  # whether this stage and another one hold copies of the input embedding
        if mtp is not None and self.pre_process != self.post_process:
            self._share_embedding()

    def _share_embedding(self) -> None:
        """Prepare the first and the last of several stages for sharing the input embedding.

        The last stage gets an embedding: the output weight of a tied model, or a new copy.  Core puts weights with the
        attribute `shared_embedding` into separate buckets, which are equal on all stages.  Core leaves weights with the
        attribute `shared` out of the gradient norm, so that only the first stage's copy counts.
        """
        if self.post_process:
            self.embedding = LanguageModelEmbedding(
                config=self.config,
                vocab_size=self.vocab_size,
                max_sequence_length=self.max_sequence_length,
                position_embedding_type=self.position_embedding_type,
                tp_group=self.pg_collection.tp,
            )
        table = self.embedding.word_embeddings
        if not self.share_embeddings_and_output_weights:
            self._has_copies = True
            table.weight.shared, table.weight.shared_embedding = self.post_process, True
        elif self.post_process:
            table.weight = self.output_layer.weight
            table.weight.zero_out_wgrad = True  # the loss head adds its gradient itself, so autograd must add zeros

    def _postprocess(
        self,
        hidden_states: Tensor,
        *args: Any,
        labels: NextTokens | None = None,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Tensor | Hidden:
        """The hidden states of this stage, scaled on the last stage; with multi-token prediction, a `Hidden`.

        labels: the inputs of the block, which core passes on from `forward`
        """
        self.decoder.set_input_tensor(None)  # otherwise core keeps the tensor that a stage received, and its gradient
        if self.multi_token is None or labels is None:
            return self._scaled(hidden_states)
        is_joint = self._mtp_mode == "joint"
        second = self.multi_token(
            hidden_states if is_joint else hidden_states.detach(),
            self._embed(labels.tokens),
            documents=labels.documents,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
        )
        return Hidden(self._scaled(hidden_states), self._scaled(second))

    def _scaled(self, hidden_states: Tensor) -> Tensor:
        scales = self.post_process and self._logits_scaling != 1.0
        return hidden_states / self._logits_scaling if scales else hidden_states

    def _embed(self, tokens: Tensor) -> Tensor:
        """The embedding of `tokens` with the norm and factor.  Forward hooks on the embedding aren't called."""
        is_joint, is_copy = self._mtp_mode == "joint", self._has_copies
        with torch.set_grad_enabled(torch.is_grad_enabled() and (is_joint or is_copy)):
            embedded: Tensor = self._changed(self.embedding.forward(tokens, None))
        return embedded if is_joint or not is_copy else _WithoutGradient.apply(embedded)

    def _changed(self, embedded: Tensor) -> Tensor:
        """The output of the embedding after its norm, if the model has one, and times its factor."""
        embedded = embedded if self._embedding_norm is None else self._embedding_norm(embedded)
        return embedded if self._embedding_multiplier == 1.0 else embedded * self._embedding_multiplier

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.multi_token is None or self.pre_process:
            return state
        key = f"{prefix}embedding.word_embeddings.weight"
        if self.shared_embedding is None:
            del state[key]  # the output has the same tensor
        else:
            groups = dict(tp_group=self.pg_collection.tp, dp_cp_group=metadata["dp_cp_group"])
            tie_word_embeddings_state_dict(state, self.shared_embedding, key, **groups)
        return state

    @property
    def shared_embedding(self) -> Tensor | None:
        """The input embedding, if another stage has a copy of it; None if there is no copy or the model is tied."""
        return self.embedding.word_embeddings.weight if self._has_copies else None

    def output_weight(self) -> Tensor:
        """The output weight of the last stage, [padded vocabulary / tp, h].  If tied, it is the input embedding."""
        if self.share_embeddings_and_output_weights:
            weight: Tensor = self.shared_embedding_or_output_weight()
            return weight
        return self.output_layer.weight


class _WithoutGradient(torch.autograd.Function):
    """Returns its input.  Backward returns zeros, so that the copy of the embedding has a gradient, as core expects."""

    @staticmethod
    def forward(ctx: Any, through: Tensor) -> Tensor:
        return through.view_as(through)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)


def reduce_shared_embedding(chunks: Iterable[Any], group: dist.ProcessGroup | None) -> None:
    """Sum the gradients of both copies of the embedding.  Collective over `group`: the first and the last stage."""
    for chunk in chunks:
        weight = chunk.module.shared_embedding
        if weight is not None and weight.requires_grad and (gradient := gradient_of(chunk, weight)) is not None:
            dist.all_reduce(gradient, group=group)
