"""Gathers unsharded gradients, one parameter at a time, each on one rank."""

from collections.abc import Iterator
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from sft.mcore.engine import Engine
from sft.mcore.gradients import gradient_chunks
from sft.parallel.collectives import all_gather_objects


def whole_gradients(engine: Engine) -> Iterator[tuple[str, Tensor | None]]:
    """Every parameter by name, in the same order on all ranks and layouts, with its gradient: fp32 on the CPU.

    The n-th parameter is on rank n modulo the number of ranks; other ranks get None.  Collective, step by step.
    """
    control, rank = engine.groups.control, engine.groups.rank
    local: dict[str, list[Tensor]] = {}
    descriptions = []
    for chunk in gradient_chunks(engine):
        local.setdefault(chunk.parameter, []).append(chunk.data)
        descriptions.append((chunk.parameter, chunk.shape, chunk.offset, tuple(chunk.data.shape), rank))
    by_name: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]]] = {}
    for of_rank in all_gather_objects(lambda: descriptions, control):
        for name, *described in of_rank:
            by_name.setdefault(name, []).append(tuple(described))  # type: ignore[arg-type]
    for index, (name, chunks) in enumerate(sorted(by_name.items())):
        owner, shape = index % engine.layout.world_size, chunks[0][0]
        assert sum(prod(size) for _, _, size, _ in chunks) == prod(shape), f"the chunks of {name} are not the whole"
        own = [data.cpu().contiguous() for data in local.get(name, [])]
        if rank != owner:
            for data in own:
                dist.send(data, owner, group=control)
            yield name, None
            continue
        whole = torch.empty(shape, dtype=torch.float32)
        for _, offset, size, holder in chunks:
            data = own.pop(0) if holder == rank else torch.empty(size, dtype=torch.float32)
            if holder != rank:
                dist.recv(data, holder, group=control)
            whole[tuple(slice(o, o + n) for o, n in zip(offset, size))] = data
        yield name, whole
