"""Adds biases to single projections.  megatron-core itself can only give biases to all linear layers or to none."""

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import ModuleSpec
from torch import Tensor

from sft.mcore.modules.stored import OwnWeights


def with_bias(linear: Any) -> Any:
    """A subclass of core's projection `linear` with a bias.  The projection returns the bias; its caller adds it."""

    class Biased(linear):
        def __init__(self, *sizes: int, bias: bool, **core: Any) -> None:
            super().__init__(*sizes, bias=True, **core)

    return Biased


class ExpertOutput(OwnWeights, RowParallelLinear):
    """The second projection of an expert, [n, e / etp] -> [n, h], with a bias that is split over etp.

    The dispatcher sums the outputs over etp.  A rank returns a bias [h] that is 0 outside of the rank's part, so the
    sum has each element of the bias once.  All ranks of etp see the same tokens, so a rank computes the complete
    gradient of its part.  Checkpoints hold the whole bias.
    """

    split_axes = {"weight": 1, "bias": 0}
    weight: torch.nn.Parameter

    def __init__(self, input_size: int, output_size: int, *, bias: bool, config: Any, **core: Any) -> None:
        super().__init__(input_size, output_size, bias=False, config=config, **core)
        ranks, weight = self.tp_group.size(), self.weight
        assert output_size % ranks == 0
        self.bias = torch.nn.Parameter(weight.new_zeros(output_size // ranks))
        self.bias.allreduce = weight.allreduce  # type: ignore[attr-defined]
        set_tensor_model_parallel_attributes(self.bias, True, 0, 1)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor]:
        """input_ [n, e / etp] -> [n, h], and the bias [h], which the caller multiplies by weights and adds."""
        output, _ = super().forward(input_)
        return output, self.spread_bias

    @property
    def spread_bias(self) -> Tensor:
        """The bias [h], which is 0 outside of the part of this rank."""
        before = self.tp_group.rank() * len(self.bias)
        after = self.output_size - before - len(self.bias)
        return torch.nn.functional.pad(self.bias, (before, after))


def bias_mlp(mlp: Any, *, has_experts: bool) -> None:
    """Give biases to the projections of an MLP or of experts.

    With Transformer Engine's experts, etp must be 1, because every rank of etp would hold the whole second bias.

    mlp: core's spec of the MLP, changed in place
    """
    parts = submodules_of(submodules_of(mlp).experts if has_experts else mlp)
    parts.linear_fc1 = with_bias(parts.linear_fc1)
    is_local = parts.linear_fc2 is RowParallelLinear
    parts.linear_fc2 = ExpertOutput if has_experts and is_local else with_bias(parts.linear_fc2)


def submodules_of(spec: Any) -> Any:
    """The submodules of core's spec of a module.  The spec is a ModuleSpec up to core 0.18, then a `partial`."""
    return spec.submodules if isinstance(spec, ModuleSpec) else spec.keywords["submodules"]


def with_submodules(spec: Any, parts: Any) -> Any:
    """A copy of core's spec of a module, with the submodules `parts`."""
    if isinstance(spec, ModuleSpec):
        return ModuleSpec(spec.module, params=spec.params, submodules=parts)
    return partial(spec.func, *spec.args, **{**spec.keywords, "submodules": parts})
