"""Implements experts whose output is added to the output of a dense MLP, both between norms (Gemma 4).

    output = norm1(mlp(norm2(h))) + norm3(experts(norm4(h), router(h)))        h: the residual stream, not normed
    logit of an expert = its row of the router's weight . (input_scale * unscaled norm(h) / sqrt(width of h))
    weight of a chosen expert = softmax of the logits over the chosen experts, times the expert's expert_scale

The dense MLP is core's shared expert: every token goes to it, and tp splits it.  The transformer layer applies another
norm to the sum (`model/layer.py`).
"""

import math
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from sft.config import MoeConfig
from sft.mcore.experts.layer import ExpertLayer
from sft.mcore.experts.router import Router, Routing, TokenDocuments
from sft.mcore.modules.norm import UnscaledNorm
from sft.mcore.wide import wide


class NormedExperts(ExpertLayer):
    """Experts and a dense MLP between norms.  norm: class of the norms; the other arguments are those of ExpertLayer"""

    def __init__(self, *args: Any, norm: type[torch.nn.Module], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sizes = dict(config=self.config, hidden_size=self.config.hidden_size, eps=self.config.layernorm_epsilon)
        self.shared_norm, self.shared_output_norm = norm(**sizes), norm(**sizes)
        self.expert_norm, self.expert_output_norm = norm(**sizes), norm(**sizes)

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: TokenDocuments | None = None
    ) -> tuple[Tensor, None]:
        """The residual stream [t, 1, h] -> [t, 1, h], and None as bias."""
        assert padding_mask is not None and intermediate_tensors is None
        shared = self._compute_shared(self.shared_norm(hidden_states))
        routing = self.router(hidden_states, padding_mask)
        mixed = self._mixed(self.expert_norm(hidden_states), routing, shared=None)
        output: Tensor = self.shared_output_norm(shared) + self.expert_output_norm(mixed)
        return output, None


class NormedRouter(Router):
    """A router that norms and scales its input, and scales the weights of experts."""

    def __init__(self, config: TransformerConfig, *, moe: MoeConfig, **core: Any) -> None:
        super().__init__(config, moe=moe, **core)
        self.norm = UnscaledNorm(config.layernorm_epsilon)
        self.input_scale = torch.nn.Parameter(self.weight.new_ones(config.hidden_size))
        self.expert_scale = torch.nn.Parameter(self.weight.new_ones(self.num_experts))
        for scale in (self.input_scale, self.expert_scale):
            scale.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def _logits(self, tokens: Tensor, scale: Tensor | None = None) -> Tensor:
        """[t, h] -> [t, experts].  `scale` is not used: the factors of the norm's output are input_scale / sqrt(h)."""
        return super()._logits(self.norm(tokens), wide(self.input_scale) / math.sqrt(tokens.shape[-1]))

    def _scaled(self, routing: Routing) -> Routing:
        return Routing(routing.weights * self.expert_scale.to(routing.weights.dtype), routing.chosen)
