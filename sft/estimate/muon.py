"""Estimates the FLOPs, messages and buffers of an update by Muon.  Arithmetic only.

Factors of adapters are left out of the FLOPs: a matrix with 16 rows costs little.
"""

from collections.abc import Iterator
from typing import NamedTuple

from sft.config.muon import BATCH
from sft.config.train import BF16, FP32
from sft.estimate.parameters import StageParameters
from sft.estimate.stage import Stage
from sft.layers.weights import name_in_layer, sizes_of

# Buffers of the elements of a batch, at most: sent, received, whole, stacked, the iterate, its successor.
COPIES = 6
# Rate of products in fp32 as a share of that in bf16: 67 of 989 TFLOP/s on an H100 (NVIDIA's data sheet).
FP32_RATE = 67 / 989


class Projections(NamedTuple):
    """`copies` projections [rows, columns] of all layers of a stage."""

    rows: int
    columns: int
    copies: int


def projections(stage: Stage) -> Iterator[Projections]:
    """All projections of a stage that Muon orthogonalises, of all its ranks together."""
    rows_of = {name_in_layer(key): rows for key, rows in stage.trained.muon.items()}
    blocks = [] if stage.block is None else [(stage.block, 1)]
    for group, count in [*((group, stage.num_on(group.numbers)) for group in stage.groups), *blocks]:
        sizes = sizes_of(group.model)
        for weight in group.weights:
            copies = count * (group.mlp.num_experts if weight.is_of_expert else 1)
            if copies and weight.is_muon and weight not in group.around:
                for name, listed in rows_of.items():
                    if name == weight.key or name.startswith(f"{weight.key}."):
                        for rows in listed:
                            yield Projections(sum(end - first for first, end in rows), weight.sizes(sizes)[-1], copies)


def flops(stage: Stage) -> float:
    """FLOPs of the Newton-Schulz iterations of one rank, if the ranks of a stage divide them equally."""
    if not stage.config.optim.has_muon or not stage.trains_layers:
        return 0.0
    config = stage.config.optim.muon
    total = sum(copies * config.flops(rows, columns) for rows, columns, copies in projections(stage))
    return total / stage_ranks(stage)


def stage_ranks(stage: Stage) -> int:
    return stage.layout.tp * stage.layout.cp * stage.layout.dp


def element_bytes(stage: Stage) -> int:
    return BF16 if stage.config.optim.muon.ns_dtype == "bf16" else FP32


def exchanged(stage: Stage, own: StageParameters) -> float:
    """Bytes that a rank receives in an update, at most: momentum of its matrices, and updates of its elements.

    An owner that holds elements of its matrices receives less.
    """
    ranks = stage_ranks(stage)
    if ranks == 1:
        return 0.0
    owned, updated = own.muon.owned(stage.layout), own.muon.updated(stage.config, stage.layout)
    return element_bytes(stage) * (ranks - 1) / ranks * (owned + updated)


def buffers(stage: Stage, own: StageParameters) -> float:
    """Bytes of an owner's temporary tensors in an update, at most."""
    if not stage.config.optim.has_muon:
        return 0.0
    largest = max((p.rows * p.columns for p in projections(stage)), default=0)
    return COPIES * element_bytes(stage) * min(max(BATCH, largest), max(own.muon.owned(stage.layout), largest))
