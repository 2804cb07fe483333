"""AdamW whose moments are in bf16 or int8 (optim.moments); weights and arithmetic are in fp32.

Transformer Engine's Adam has bf16 moments on GPUs, rounded to the nearest.  This one runs on any device, rounds at
random (`rounding.py`), and updates a parameter in pieces, so that its temporaries have the size of a piece.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.optim import Optimizer

from sft.config.train import ADAM, INT8_BLOCK
from sft.errors import ConfigError
from sft.mcore.optimizer import rounding
from sft.mcore.optimizer.inner import chained_optimizers
from sft.mcore.sharding.core_buffers import ShardParameter

# Elements of a piece.  On a CPU, its temporaries fit the cache of a core; on a GPU they take 60 MiB.
_PIECE = {"cpu": 1 << 15, "cuda": 1 << 20}
_FIRST, _SECOND = ADAM.moments
_SCALE = "_scale"  # suffix of the state with the scales of int8 moments


class LowBitAdamW(Optimizer):
    """AdamW with moments in bf16 or int8.  Counts its step in each group, as Transformer Engine's Adam does.

    groups: torch's parameter groups, with lr, betas, eps and weight_decay
    starts: the index of a tensor's first element in its flattened parameter, by default 0
    Raises ConfigError if an int8 block would begin in one tensor and end in another.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], kind: Literal["bf16", "int8"], starts: Mapping[Tensor, int]
    ) -> None:
        self.kind, self._starts = kind, dict(starts)
        if kind == "int8" and any(start % INT8_BLOCK for start in self._starts.values()):
            raise ConfigError(
                f"optim.moments = int8: the part of a weight that a rank updates begins within a block of {INT8_BLOCK} "
                "elements, because more than 1,024 ranks divide the weight.  Use optim.moments=bf16, or a smaller "
                "dp x cp."
            )
        self._tables: dict[tuple[str, torch.device], Tensor] = {}
        super().__init__([torch.zeros(0)], {})
        # torch's constructor refuses views of weights, which core's distributed optimizer has in fp32.
        self.param_groups = [{"step": 0, **group} for group in groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def read(self, param: Tensor) -> dict[str, Tensor]:
        """The moments of `param` by name: [n].  bf16: the states themselves.  int8: copies in fp32 on the host."""
        state = self._state(param)
        if self.kind == "bf16":
            return {name: state[name] for name in ADAM.moments}
        copies = {name: torch.empty(param.numel(), dtype=torch.float32) for name in ADAM.moments}
        for name, whole in copies.items():
            for start, number in rounding.pieces(param.numel(), _PIECE[param.device.type]):
                whole[start : start + number] = self._piece(param, name, start, number)
        return copies

    def write(self, param: Tensor, moments: Mapping[str, Tensor]) -> None:
        """Set the moments of `param` to the nearest values of `moments`, which `read` has returned and then changed."""
        for name, whole in moments.items() if self.kind == "int8" else ():
            for start, number in rounding.pieces(param.numel(), _PIECE[param.device.type]):
                self._put(param, name, start, whole[start : start + number].to(param.device), None)

    def _update(self, param: Tensor, group: Mapping[str, Any]) -> None:
        self._state(param)
        weight, gradient, step = param.data.view(-1), param.grad, group["step"]
        assert gradient is not None
        gradient, (beta1, beta2) = gradient.view(-1), group["betas"]
        rate, root = group["lr"] / (1.0 - beta1**step), (1.0 - beta2**step) ** 0.5
        for start, number in rounding.pieces(param.numel(), _PIECE[param.device.type]):
            grad = gradient[start : start + number].float()
            first = self._piece(param, _FIRST, start, number).lerp_(grad, 1.0 - beta1)
            second = self._piece(param, _SECOND, start, number).mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
            part = weight[start : start + number].mul_(1.0 - group["lr"] * group["weight_decay"])
            part.addcdiv_(first, second.sqrt().div_(root).add_(group["eps"]), value=-rate)
            bits = rounding.random_bits(step, self._starts.get(param, 0) + start, number, param.device)
            self._put(param, _FIRST, start, first, bits & 0xFFFF)
            self._put(param, _SECOND, start, second, (bits >> 16) & 0xFFFF)

    def _state(self, param: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[param]
        if not state:
            number, device = param.numel(), param.device
            for name in ADAM.moments:
                if self.kind == "bf16":
                    state[name] = torch.zeros(number, dtype=torch.bfloat16, device=device)
                else:
                    zero = int((self._table(name, device) == 0.0).nonzero())
                    state[name] = torch.full((number,), zero, dtype=torch.uint8, device=device)
                    state[name + _SCALE] = torch.zeros(-(-number // INT8_BLOCK), device=device)
        return state

    def _piece(self, param: Tensor, name: str, start: int, number: int) -> Tensor:
        """A copy of a piece of a moment, in fp32."""
        state = self.state[param]
        stored = state[name][start : start + number]
        if self.kind == "bf16":
            return stored.float()
        scales = state[name + _SCALE][start // INT8_BLOCK : -(-(start + number) // INT8_BLOCK)]
        return rounding.from_int8(stored, scales, self._table(name, param.device))

    def _put(self, param: Tensor, name: str, start: int, values: Tensor, noise: Tensor | None) -> None:
        state, end = self.state[param], start + values.numel()
        if self.kind == "bf16":
            state[name][start:end] = rounding.to_bf16(values, noise)
            return
        codes, scales = rounding.to_int8(values, self._table(name, param.device), noise)
        state[name][start:end] = codes
        state[name + _SCALE][start // INT8_BLOCK : -(-end // INT8_BLOCK)] = scales

    def _table(self, name: str, device: torch.device) -> Tensor:
        if (name, device) not in self._tables:
            self._tables[name, device] = rounding.dynamic_map(is_signed=name == _FIRST).to(device)
        return self._tables[name, device]


def replace_adam(optimizer: MegatronOptimizer, kind: Literal["fp32", "bf16", "int8"]) -> None:
    """Put a LowBitAdamW in the place of each Adam inside core's optimizer, before a step has been made."""
    if kind == "fp32":
        return
    for core in chained_optimizers(optimizer):
        core.optimizer = LowBitAdamW(core.optimizer.param_groups, kind, _starts(core))


def _starts(core: Any) -> dict[Tensor, int]:
    """The index of the first element of each slice of core's distributed optimizer in its flattened parameter."""
    if not isinstance(core, DistributedOptimizer):
        return {}
    starts = {}
    for param, (group, order) in core.model_param_group_index_map.items():
        in_param = core._get_model_param_range_map(param)["param"].start
        main = core.optimizer.param_groups[group]["params"][order]
        starts[main] = param.start if isinstance(param, ShardParameter) else in_param
    return starts
