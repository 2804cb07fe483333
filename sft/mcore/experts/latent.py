"""Implements experts that read a narrow projection of the token; their sum is projected back (Nemotron 3 Super).

    output = back(sum over chosen experts of weight * expert(down(h))) + shared expert(h)       h: the layer's input

The router and the shared expert read h.  Tokens are projected before they are sent, so messages have the smaller width.
Every tensor-parallel rank has both projections, and projects its own tokens.
"""

import copy
from functools import partial
from typing import Any

from megatron.core.transformer import ModuleSpec
from torch import Tensor

from sft.mcore.experts.layer import ExpertLayer
from sft.mcore.modules.duplicated_linear import DuplicatedLinear


class LatentExperts(ExpertLayer):
    """A layer of experts with both projections.

    latent_size: width of the tokens that experts read and write; the other arguments are those of ExpertLayer
    """

    def __init__(self, *args: Any, latent_size: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        width = self.config.hidden_size
        self.fc1_latent_proj = DuplicatedLinear(self.config, width, latent_size, self.tp_group)
        self.fc2_latent_proj = DuplicatedLinear(self.config, latent_size, width, self.tp_group)

    def _mixed(self, hidden_states: Tensor, routing: tuple[Tensor, Tensor], shared: Tensor | None) -> Tensor:
        latent, _ = self.fc1_latent_proj(hidden_states)
        output: Tensor
        output, _ = self.fc2_latent_proj(super()._mixed(latent, routing, shared=None))
        return output if shared is None else output + shared


def with_latent_size(experts: Any, latent_size: int) -> Any:
    """Core's spec of experts -> a spec of experts of this width.

    Core reads the width of experts from its config.  Only the config of the experts gets the width.  If the config of
    the layer had it, core would build projections that need Transformer Engine.
    """
    return _narrowed(experts, experts.module if isinstance(experts, ModuleSpec) else experts.func, latent_size)


def _narrowed(experts: Any, core: Any, latent_size: int) -> Any:
    """A spec like `experts`, of a subclass of its class `core`."""

    class Narrowed(core):
        def __init__(self, num_local_experts: int, config: Any, *args: Any, **kwargs: Any) -> None:
            own = copy.copy(config)
            own.moe_latent_size = latent_size
            super().__init__(num_local_experts, own, *args, **kwargs)

    if isinstance(experts, ModuleSpec):  # up to core 0.18
        return ModuleSpec(Narrowed, params=experts.params, submodules=experts.submodules)
    return partial(Narrowed, *experts.args, **experts.keywords)
