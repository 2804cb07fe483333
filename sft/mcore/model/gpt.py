"""A GPTModel that returns hidden states.  With multi-token prediction, it also returns those of the second head.

With multi-token prediction and pipeline parallelism, the last stage has a copy of the input embedding, as in a model
with tied embeddings.  Both copies get the sum of both gradients, so they stay equal.
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
from sft.mcore.model.mtp import MultiTokenPrediction, NextTokens


class Hidden(NamedTuple):
    """Hidden states [t, 1, h], or [t / tp, 1, h] with sequence parallelism, that predict following tokens."""

    first: Tensor  # predict the next token
    second: Tensor  # predict the token after the next one


class HiddenStatesGPT(GPTModel):
    """GPTModel whose last stage returns hidden states instead of logits.

    logits_scaling  divisor of the logits; the last stage divides its hidden states, with the same result
    mtp             makes the block for multi-token prediction; None: the model has no block
    mtp_mode        train.mtp
    """

    def __init__(
        self,
        *,
        embedding_multiplier: float = 1.0,
        logits_scaling: float = 1.0,
        mtp: Callable[[], MultiTokenPrediction] | None = None,
        mtp_mode: MtpMode = "off",
        **core: Any,
    ) -> None:
        super().__init__(**core)
        self._logits_scaling, self._embedding_multiplier = logits_scaling, embedding_multiplier
        self._mtp_mode = mtp_mode
        if self.pre_process and embedding_multiplier != 1.0:
            self.embedding.register_forward_hook(lambda module, args, output: output * embedding_multiplier)
        # Core would treat an attribute `mtp` as its own block.
        self.multi_token = mtp() if mtp is not None and self.post_process else None
        self._has_copies = False  # whether this stage and another one have the input embedding
        if mtp is not None and self.pre_process != self.post_process:
            self._share_embedding()

    def _share_embedding(self) -> None:
        """Give the last of several stages an embedding: the output weight of a tied model, or a new copy.

        Core puts weights with the attribute `shared_embedding` into separate buckets, which are the same on all
        stages.  It does not count weights with the attribute `shared` twice in the gradient norm.
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
            table.weight.zero_out_wgrad = True  # the head's gradient is already in the sum when autograd adds the other

    def _postprocess(
        self,
        hidden_states: Tensor,
        *args: Any,
        labels: NextTokens | None = None,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Tensor | Hidden:
        """Hidden states of the last stage.  labels: the block's input, which core passes on from `forward`"""
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
        """The embedding as the model computes it, without calling the hooks that observe the model's input."""
        is_joint, is_copy = self._mtp_mode == "joint", self._has_copies
        with torch.set_grad_enabled(torch.is_grad_enabled() and (is_joint or is_copy)):
            embedded: Tensor = self.embedding.forward(tokens, None)
        if self._embedding_multiplier != 1.0:
            embedded = embedded * self._embedding_multiplier
        return embedded if is_joint or not is_copy else _WithoutGradient.apply(embedded)

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
        """The input embedding, if another stage has a copy of it; None if there is no copy, or if the output is it."""
        return self.embedding.word_embeddings.weight if self._has_copies else None

    def output_weight(self) -> Tensor:
        """The output weight of the last stage, [padded vocabulary / tp, h]; if tied, the input embedding."""
        if self.share_embeddings_and_output_weights:
            weight: Tensor = self.shared_embedding_or_output_weight()
            return weight
        return self.output_layer.weight


class _WithoutGradient(torch.autograd.Function):
    """Returns its input and stops the gradient with zeros.  So the embedding's copy has a gradient, as core expects."""

    @staticmethod
    def forward(ctx: Any, through: Tensor) -> Tensor:
        return through.view_as(through)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)


def reduce_shared_embedding(chunks: Iterable[Any], group: dist.ProcessGroup | None) -> None:
    """Sum the gradients of both copies of the embedding.  Collective in `group`, the first and the last stage."""
    for chunk in chunks:
        weight = chunk.module.shared_embedding
        if weight is not None and weight.requires_grad:
            dist.all_reduce(weight.main_grad, group=group)
