"""Builds the optimizer and its learning-rate schedule, and makes updates, with a gradient norm in float64.

Step numbers count from 1.  The learning rate of the first update is above 0; the last update uses min_lr.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from torch import Tensor

from sft.config import Config, OptimConfig
from sft.config.schedule import Schedule
from sft.layers.adapters import Trained
from sft.mcore import device as devices
from sft.mcore.lora import adapted, freeze
from sft.mcore.lora.factors import PREFIX
from sft.mcore.optimizer import inner, low_bit_adam, muon, offload
from sft.mcore.process_groups import ProcessGroups
from sft.mcore.sharding.core_buffers import ShardParameter
from sft.mcore.sharding.model import publish_weights

# Elements per piece.  On a CPU, torch makes a float64 copy of a piece, 512 KiB, which fits the cache of a core.  On a
# GPU it makes no copy: the kernel converts each element that it reads.  A thread block adds 65,536 elements and stores
# a sum of 8 bytes.  For each piece, torch allocates as many sums as the largest piece has thread blocks: 2 KiB per
# piece, or 2 MiB for 8e9 parameters.
_PIECE = {"cpu": 1 << 16, "cuda": 1 << 24}


def build_optimizer(
    config: Config, chunks: list[DistributedDataParallel], trained: Trained, groups: ProcessGroups
) -> MegatronOptimizer:
    """The optimizer for the model chunks of this rank: core's AdamW, or Muon beside it.  Collective.

    Biases and norms have no weight decay.
    """
    optim = config.optim
    bf16 = config.run.precision == "bf16"
    core = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_eps=optim.epsilon,
        clip_grad=optim.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=config.parallel.distributed_optimizer,
    )
    if optim.offload_fraction:
        offload.enable_offload(core, optim.offload_fraction)
    overrides = {**_without_decay(), **_own(config, chunks, trained)}
    # Core would page-lock a bf16 copy of each offloaded parameter, and drop it for an fp32 copy.
    with devices.WithoutPinning() if optim.offload_fraction else nullcontext():
        optimizer = get_megatron_optimizer(core, chunks, config_overrides=overrides, use_gloo_process_groups=False)
    if optim.offload_fraction:
        offload.check_and_free(optimizer)
    if optim.has_muon:
        muon.install(optimizer, optim.muon, chunks, trained, groups)
    low_bit_adam.replace_adam(optimizer, optim.moments)
    inner.use_fused_kernel(optimizer)
    return optimizer


def _whole(param: Any) -> Any:
    """The weight that a parameter of the optimizer is a part of."""
    return param.whole if isinstance(param, ShardParameter) else param


def _without_decay() -> dict[ParamKey, ParamGroupOverride]:
    """Biases and vectors, such as the weights of norms, have no weight decay; nor have weights of which only some rows
    are trained."""
    has_none = ParamPredicate(
        name="vector or rows", fn=lambda param: _whole(param).dim() == 1 or freeze.trains_rows(_whole(param))
    )
    return {ParamKey(name="*.bias", predicate=has_none): {"wd_mult": 0.0}}


@dataclass(frozen=True)
class _Own:
    """The difference of a parameter from those with optim.lr and optim.weight_decay.

    is_muon       whether Muon updates it
    ratio         learning rate / optim.lr
    weight_decay  None: optim.weight_decay
    """

    is_muon: bool = False
    ratio: float = 1.0
    weight_decay: float | None = None

    def override(self, optim: OptimConfig) -> ParamGroupOverride:
        """lr 1e-4, min_lr 1e-5, ratio 16 -> max_lr 1.6e-3, min_lr 1.6e-4"""
        rates = {"max_lr": optim.lr * self.ratio, "min_lr": optim.min_lr * self.ratio}
        return {
            **({} if self.ratio == 1.0 else rates),
            **({} if self.weight_decay is None else {"start_wd": self.weight_decay, "end_wd": self.weight_decay}),
            **({muon.UPDATER: "muon"} if self.is_muon else {}),
        }


def _own(config: Config, chunks: list[DistributedDataParallel], trained: Trained) -> dict[ParamKey, ParamGroupOverride]:
    """Overrides for parameters with a learning rate or a weight decay of their own, or that Muon updates; {} if there
    are none.

    Muon has optim.muon.lr_ratio times the rate of AdamW.  The factor B of every adapter has lora.lr_ratio times the
    rate of A (LoRA+, arXiv:2402.12354).  A group of optim.groups multiplies these rates.  The schedule stays the same.
    """
    optim, lora_ratio = config.optim, config.lora.lr_ratio
    of_b = {id(b) for factors in adapted.factors_of(chunks) for b in factors.b} if lora_ratio != 1.0 else set()
    shards = muon.shards_of(chunks) if optim.has_muon or optim.groups else {}
    members: dict[_Own, set[int]] = defaultdict(set)
    for param in shards.keys() | of_b:
        parts = [shard for _, shard in shards.get(param, [])]
        is_muon = optim.has_muon and muon.updates(parts[0].key, trained)
        (group,) = {_group(part, trained) for part in parts} or {None}
        own_group = None if group is None else optim.groups[group]
        ratio = (optim.muon.lr_ratio if is_muon else 1.0) * (lora_ratio if param in of_b else 1.0)
        own = _Own(is_muon, ratio)
        if own_group is not None:
            own = _Own(is_muon, ratio * own_group.lr_ratio, own_group.weight_decay)
        if own != _Own():
            members[own].add(param)
    return {_key(str(own), ids): own.override(optim) for own, ids in members.items()}


def _group(shard: ShardedTensor, trained: Trained) -> int | None:
    """The group of optim.groups that has the weight or the adapter of which `shard` is a part."""
    if shard.key.startswith(PREFIX):
        return trained.groups.get((shard.key.removeprefix(PREFIX).rpartition(".lora_")[0], ()))
    return trained.groups.get((shard.key, tuple(shard.global_offset[: shard.prepend_axis_num])))


def _key(name: str, ids: Collection[int]) -> ParamKey:
    """The key of an override for the parameters with these ids."""
    return ParamKey(predicate=ParamPredicate(name=name, fn=lambda param: id(_whole(param)) in ids))


def update(optimizer: MegatronOptimizer, chunks: Iterable[torch.nn.Module], device: torch.device) -> float:
    """Clip the gradients and update the weights of `chunks`, if the gradient's norm is finite; else update nothing.

    Returns the norm before clipping.  Collective.  Core's `step` would divide all gradients by a non-finite norm, which
    would make every weight NaN.  Without Transformer Engine, core's norm also synchronises with the GPU once per
    weight.
    """
    freeze.keep_trained_rows(chunks)
    optimizer.prepare_grads()
    norm = _norm(optimizer, device)
    if math.isfinite(norm):
        for core in inner.chained_optimizers(optimizer):
            config, params = core.config, core.get_parameters()
            if config.clip_grad and params:
                decoupled = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(params, config.clip_grad, norm, decoupled)
        optimizer.step_with_ready_grads()
        publish_weights(chunks)
    return norm


def _norm(optimizer: MegatronOptimizer, device: torch.device) -> float:
    """The norm of the gradients of all ranks as one vector, from a float64 sum of squares.  Collective.

    The host synchronises with the GPU once.  The norm is infinite if the sum of squares overflows fp32: such gradients
    would also overflow Adam's mean of squares, and all further updates would be 0.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part in inner.all_chained(optimizer):  # experts have their own optimizer and process group
        gradients = getattr(part, "get_grads_for_grad_norm", None) or part.get_main_grads_for_grad_norm  # core 0.16
        squares = sum_of_squares([] if inner.is_empty(part) else gradients(), device)
        dist.all_reduce(squares, group=_world_or(part.get_grad_stats_parallel_group()))
        total += squares
    sum_of_all = total.item()
    return math.inf if sum_of_all > torch.finfo(torch.float32).max else math.sqrt(sum_of_all)


def _world_or(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """`group`, or None for torch's group of all ranks, if `group` has all ranks.

    The first collective of a group allocates buffers.  Those of torch's group exist already.
    """
    return None if group.size() == dist.get_world_size() else group


@torch.no_grad()
def sum_of_squares(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of contiguous gradients: float64 scalar on `device`, 0 without gradients.

    [3, 4] and [[12]] -> 169.0

    The host does not synchronise with the GPU.  On a CPU, torch's norm of an fp32 tensor adds the squares one after
    another in fp32, so rounding loses small squares that are added to a large sum.  The norm of 151,936 x 128 values
    with a few large rows was 1.5e-4 too small; the norm of 78,000,000 normal values was 7.5e-3 too small.
    `torch._foreach_norm` with a dtype adds in float64.  On a GPU it makes no float64 copy (torch's ForeachReduceOp.cu),
    unlike `torch.linalg.vector_norm`.  By arithmetic, an fp32 sum of 1e9 values on a GPU would have an error of at most
    3e-6 of the norm, because each value is rounded about 90 times.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for pieces in _by_device_and_dtype(gradients):
        norms = torch._foreach_norm(pieces, 2, dtype=torch.float64)
        total += torch.stack(norms).square_().sum().to(device)
    return total


def _by_device_and_dtype(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the pieces of all gradients, one list per device and dtype.  torch reduces a list in one GPU kernel."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        if gradient.numel():
            groups[gradient.device, gradient.dtype].extend(gradient.view(-1).split(_PIECE[gradient.device.type]))
    yield from groups.values()


def build_scheduler(optim: OptimConfig, optimizer: MegatronOptimizer, num_steps: int) -> OptimizerParamScheduler:
    """The scheduler that sets lr and weight decay of the optimizer's groups.  Call `step(1)` before each update."""
    schedule = Schedule.resolve(optim, num_steps)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=schedule.warmup_steps,
        lr_decay_steps=schedule.num_steps,
        lr_decay_style="WSD" if optim.schedule == "wsd" else optim.schedule,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=schedule.num_steps,
        wd_incr_style="constant",
        wsd_decay_steps=schedule.wsd_decay_steps,
        lr_wsd_decay_style=optim.wsd_decay,
    )
