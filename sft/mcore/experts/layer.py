"""Implements the layer of experts: sends tokens to the experts that the router chose, and computes the outputs.

megatron-core sends tokens to experts and back, and computes the experts.  `router.py` chooses the experts.  This module
passes the document of each token to the router, and decides what backward recomputes.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.extensions.transformer_engine import te_checkpoint
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoEFlexTokenDispatcher
from torch import Tensor

from sft.mcore.activations.recompute import recomputed
from sft.mcore.experts.dispatch import Dispatcher
from sft.mcore.experts.grouped import computes_at_once, layer_by_layer
from sft.mcore.experts.router import TokenDocuments
from sft.mcore.modules.activation import Activation


class ExpertLayer(MoELayer):
    """Core's layer of experts, which passes the document of each token to its router.

    The argument `padding_mask` holds the `TokenDocuments` that `model/layer.py` makes.  Core's layer passes no other
    argument about tokens to experts.  Core's own `forward` would convert it to booleans.

    recompute: whether backward recomputes the experts from the tokens that they have received.  The tokens are not sent
    again, and the host does not wait again for the number of tokens of each expert.
    activation: arguments of Activation; empty: core's SwiGLU
    in_low_bits: whether frozen experts may be in low bits, which only `layer_by_layer` computes
    """

    experts: Any

    def __init__(
        self,
        *args: Any,
        pg_collection: Any = None,
        recompute: bool = False,
        activation: Mapping[str, Any] = MappingProxyType({}),
        in_low_bits: bool = False,
        **core: Any,
    ) -> None:
        pg_collection = pg_collection or get_default_pg_collection()  # core up to 0.18 passes none to this class
        super().__init__(*args, pg_collection=pg_collection, **core)
        self._recompute = recompute
        if activation or in_low_bits or computes_at_once(self.config):
            self.experts = layer_by_layer(self.experts, Activation(**activation) if activation else None)
        if self.config.moe_token_dispatcher_type == "alltoall" and not self.config.moe_permute_fusion:
            own = self.local_expert_indices
            self.token_dispatcher = Dispatcher(len(own), own, config=self.config, pg_collection=pg_collection)

    @property
    def _recomputes(self) -> bool:
        return self._recompute and self.training

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: TokenDocuments | None = None
    ) -> tuple[Tensor, None]:
        """[t, 1, h] -> [t, 1, h], and None as bias."""
        assert padding_mask is not None and intermediate_tensors is None
        shared = None if self.shared_experts is None else self._compute_shared(hidden_states)
        return self._mixed(hidden_states, self.router(hidden_states, padding_mask), shared), None

    def _mixed(self, hidden_states: Tensor, routing: tuple[Tensor, Tensor], shared: Tensor | None) -> Tensor:
        """The weighted sum of the chosen experts' outputs for each token, plus `shared`: [t, 1, h].

        routing: the result of `Router.forward`; shared: output of the shared expert, [t, 1, h]; None: there is none
        """
        sent, weights = self.preprocess(hidden_states, *routing)
        if isinstance(self.token_dispatcher, MoEFlexTokenDispatcher):
            skip_weights_of_zero(self.token_dispatcher)
        tokens, counts, weights = self.token_dispatcher.dispatch_postprocess(*self.dispatch(sent, weights))
        output = self.token_dispatcher.combine_preprocess(self._compute(tokens, counts, weights))
        combined: Tensor = self.postprocess(self.combine(output), shared)
        self._forget_routing()
        return combined

    def _forget_routing(self) -> None:
        """Free the tensors that describe the routing: the weights and choices of tokens, and their order by expert.

        Core would keep these tensors on the device until the layer's next forward pass, even if they are offloaded or
        recomputed in backward.
        """
        if isinstance(self.token_dispatcher, MoEAlltoAllTokenDispatcher):
            for name in ("probs", "routing_map", "reversed_local_input_permutation_mapping"):
                setattr(self.token_dispatcher, name, None)

    def _compute_shared(self, tokens: Tensor) -> Tensor:
        """The output of the shared expert, [t, 1, h] -> [t, 1, h].  It is a dense MLP, which tp splits."""
        output: Tensor
        shared = self.shared_experts
        if not self._recomputes:
            output = shared(tokens)
        elif self.config.fp8:
            output = te_checkpoint(shared, False, tensor_parallel.random.get_cuda_rng_tracker, self.tp_group, tokens)
        else:
            output = recomputed(shared, tokens, shared.parameters())
        return output

    def _compute(self, tokens: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        """The experts' outputs: tokens [n, h] that this rank has received, sorted by expert -> [n, h].

        counts: [experts], tokens of each expert; weights: [n], factors on the outputs
        """
        output: Tensor
        if not self._recomputes:
            output, _ = self.experts(tokens, counts, weights)
        elif self.config.fp8:  # Transformer Engine's checkpoint restores the first pass's scales
            tracker = tensor_parallel.random.get_cuda_rng_tracker
            output, _ = te_checkpoint(self.experts, False, tracker, self.tp_group, tokens, counts, weights)
        else:
            parameters = self.experts.parameters()
            output = recomputed(lambda rows: self.experts(rows, counts, weights)[0], tokens, [weights, *parameters])
        return output


def skip_weights_of_zero(dispatcher: MoEFlexTokenDispatcher) -> None:
    """Send no token to an expert for which it has weight 0.  Call this function before each dispatch with DeepEP.

    For DeepEP, core ignores the choices of the router and takes the experts with the top_k largest weights.  The
    weights of padding are all 0, so all padding would go to the same experts.  This function replaces the index of such
    an expert by -1, as core does for dropped choices.  DeepEP sends nothing to -1, and returns 0 for a token that goes
    to no expert.
    """
    manager: Any = dispatcher._comm_manager
    manager.token_indices = manager.token_indices.masked_fill(manager.token_probs == 0, -1)


def reduce_apart(chunk: torch.nn.Module) -> None:
    """Mark experts' weights, so that core reduces their gradients over all ranks that hold copies of them.

    Core marks experts only if ep is above 1.  With ep 1, core treats experts like dense weights, for which all tp ranks
    see the same tokens, and does not sum their gradients over tp.  But the tp ranks send different tokens to the copies
    of an expert, so each copy would have only a part of the gradient.
    """
    for name, param in chunk.named_parameters():
        if ".experts." in name:  # not in .shared_experts., which tp splits like a dense MLP
            param.allreduce = False  # type: ignore[attr-defined]
