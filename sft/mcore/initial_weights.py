"""Draws the random weights of a new run.

A value is a function of (seed, parameter name, position in the parameter), so it does not depend on the layout.  On a
CPU one generator draws a whole parameter in sequence, and a rank drops the values of other ranks (7 ns per value).  On
a GPU each block of rows has a seed, and a rank draws only the blocks that contain its rows.  So a GPU run and a CPU run
start from different values; model.init_from gives them the same values.

Only one block of fp32 values exists at a time.  A whole embedding of 151,936 x 8,192 would take 4.6 GiB in fp32.
If a run loads weights from a checkpoint (`checkpoint_io`), nothing is drawn.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from sft.config import ModelConfig
from sft.layers.weights import is_of_layer, weight_of
from sft.low_bits import nf4
from sft.mcore.engine import Engine, weights_changed
from sft.mcore.low_bits.frozen_base import frozen_weight
from sft.mcore.sharding.parts import held

# Values per block.  One GPU kernel draws a block.  A data-centre GPU has a thread for each of the 131,072 values.  In a
# larger block, the values that torch draws would depend on the number of threads.
_BLOCK_SIZE = {"cpu": 1 << 22, "cuda": 1 << 17}
_CPU = torch.device("cpu")
_DECAY_RANGE = (0.01, 16.0)  # range of exp(A_log) in linear attention
_VECTOR = 16  # torch on a CPU draws 16 values at once, so blocks of other sizes would give other values


@torch.no_grad()
def initialise(engine: Engine) -> None:
    """Set random weights.

    Matrices are normal with standard deviation model.init_std; matrices that write to the residual stream, with
    init_std / sqrt(2 num_layers) (GPT-2).  Sinks and the bias of a router are drawn like matrices (gpt-oss).  Other
    biases are 0.  Norms and other factors are 1.  In linear attention, exp(A_log) is uniform from 0.01 to 16.  Each
    expert has separate random weights.  Frozen weights in low bits are quantised in NF4.
    """
    whole, parts = held(engine.chunks, [chunk.module.sharded_state_dict() for chunk in engine.chunks])
    model, seed = engine.config.model, engine.config.run.seed
    frozen = [frozen_weight(engine.chunks, shard.data) for shard in whole]
    for held_weight in {weight for weight in frozen if weight is not None}:
        held_weight.forget()
    for shard, weight in zip((*whole, *parts), (*frozen, *(None for _ in parts))):
        if weight is None:
            _set_part(shard, model, seed)
        else:
            values = torch.empty(shard.data.shape, dtype=shard.data.dtype, device=shard.data.device)
            _set_part(replace(shard, data=values), model, seed)
            weight.hold(shard.data, nf4.quantised(values), values.dtype)
    weights_changed(engine)


def _set_part(shard: ShardedTensor, model: ModelConfig, seed: int) -> None:
    part, axes = shard.data, shard.prepend_axis_num
    name = f"{seed}:{shard.key}{shard.global_offset[:axes]}"  # with the indices of layer, expert, gate or up
    weight = weight_of(shard.key) if is_of_layer(shard.key) else None
    role = weight.role if weight else "matrix" if part.dim() > 1 else "norm"
    if role == "decay":
        whole = torch.empty(shard.global_shape[axes:]).uniform_(*_DECAY_RANGE, generator=_generator(_CPU, name))
        part.copy_(whole.log_()[shard.global_offset[axes] :][: len(part)])
    elif role == "bias":
        part.zero_()
    elif role in ("ones", "norm"):
        of_final = None if weight else model.final_norm_zero_centered
        is_offset = model.norm_zero_centered if of_final is None else of_final
        part.fill_(0.0 if role == "norm" and is_offset else 1.0)
    else:
        writes_residual = weight is not None and weight.writes_residual
        std = model.init_std / math.sqrt(2 * model.num_layers) if writes_residual else model.init_std
        draw = draw_in_sequence if part.device.type == "cpu" else draw_by_block
        draw(part, name, std, shape=shard.global_shape[axes:], offset=shard.global_offset[axes:])


def draw_in_sequence(part: Tensor, name: str, std: float, *, shape: Sequence[int], offset: Sequence[int]) -> None:
    """Set `part`, which begins at `offset` of a parameter of `shape`, to values that one generator draws in sequence.

    The generator draws the parameter from its first row; values outside of `part` are dropped.
    """
    generator = _generator(part.device, name)
    rows = max(1, _BLOCK_SIZE["cpu"] // math.prod(shape[1:]) // _VECTOR) * _VECTOR
    for start, stop in _blocks(shape[0], rows):
        if start >= offset[0] + part.shape[0]:
            break
        _copy_rows(torch.empty(stop - start, *shape[1:]).normal_(generator=generator).mul_(std), start, part, offset)


def draw_by_block(part: Tensor, name: str, std: float, *, shape: Sequence[int], offset: Sequence[int]) -> None:
    """Set `part`, which begins at `offset` of a parameter of `shape`, from the blocks of rows that contain its rows."""
    rows = max(1, _BLOCK_SIZE["cuda"] // math.prod(shape[1:]))
    for start, stop in _blocks(shape[0], rows):
        if start < offset[0] + part.shape[0] and stop > offset[0]:
            generator = _generator(part.device, f"{name}:{start}")
            block = torch.empty(stop - start, *shape[1:], device=part.device)
            _copy_rows(block.normal_(generator=generator).mul_(std), start, part, offset)


def _generator(device: torch.device, name: str) -> torch.Generator:
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))


def _blocks(num_rows: int, rows: int) -> Iterator[tuple[int, int]]:
    """First row and end of each block of `rows` rows; the last block also has the remaining rows.

    10 rows in blocks of 4 -> (0, 4), (4, 10)        3 rows in blocks of 4 -> (0, 3)
    """
    count = max(1, num_rows // rows)
    for index in range(count):
        yield index * rows, (index + 1) * rows if index + 1 < count else num_rows


def _copy_rows(block: Tensor, start: int, part: Tensor, offset: Sequence[int]) -> None:
    """Copy the values of `block` that belong to `part`.  block: whole rows of the parameter, from row `start` on"""
    first, last = max(start, offset[0]), min(start + block.shape[0], offset[0] + part.shape[0])
    if first < last:
        columns = tuple(slice(begin, begin + size) for begin, size in zip(offset[1:], part.shape[1:]))
        part[first - offset[0] : last - offset[0]].copy_(block[(slice(first - start, last - start), *columns)])
