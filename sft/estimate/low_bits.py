"""Computes what a frozen base in low bits takes: bytes of its stored form, of dequantised weights, and their traffic.

sft/mcore/low_bits holds the weights.  A layer's matrices are dequantised while the layer computes, and its experts by
groups of up to 512 MiB.
"""

from dataclasses import dataclass

from sft.estimate.stage import Stage
from sft.layers.kinds import LayerGroup
from sft.layers.low_bits import GROUP_BYTES, weight_format
from sft.layers.weight import LayerWeight
from sft.layers.weights import sizes_of

# Bytes of temporary tensors for each number of the matrix that is being dequantised: its index (int32 for two 4-bit
# numbers), its value in fp32 twice.
TEMPORARY_BYTES = 10
# Bytes that torch's operations read and write for each number: the index, two values in fp32, and bf16 twice.
MOVED_BYTES = 26


@dataclass(frozen=True, kw_only=True)
class LowBitBase:
    """The frozen weights in low bits on one rank of a stage.

    numbers      of parameters in low bits
    num_bytes    bytes of their stored form
    layer        bytes of the dequantised matrices of the largest layer, without experts
    experts      bytes of the dequantised matrices of a group of experts
    temporary    bytes of temporary tensors while the largest matrix is dequantised
    expert_numbers  of parameters of experts in low bits
    """

    numbers: float
    num_bytes: float
    layer: float
    experts: float
    temporary: float
    expert_numbers: float

    @staticmethod
    def of(stage: Stage) -> "LowBitBase | None":
        """The base of a rank; None: no weight is in low bits, or their format is not known."""
        if weight_format(stage.config.model) is None:
            return None
        groups = [(group, stage.num_on(group.numbers)) for group in stage.groups]
        groups += [] if stage.block is None else [(stage.block, 1)]
        layers = [(_layer(group, stage), count) for group, count in groups if count]
        return LowBitBase(
            numbers=sum(layer.numbers * count for layer, count in layers),
            num_bytes=sum(layer.num_bytes * count for layer, count in layers),
            layer=max((layer.layer for layer, _ in layers), default=0.0),
            experts=max((layer.experts for layer, _ in layers), default=0.0),
            temporary=max((layer.temporary for layer, _ in layers), default=0.0),
            expert_numbers=sum(layer.expert_numbers * count for layer, count in layers),
        )

    def moved(self, *, repeats_layers: bool, repeats_experts: bool) -> float:
        """Bytes that dequantising reads and writes in a microbatch.

        Weights are dequantised in forward and in backward, in which a repeated layer uses the same values.  Experts
        are dequantised for each product.
        """
        products_of_experts = 3 if repeats_layers or repeats_experts else 2
        dense = self.numbers - self.expert_numbers
        return MOVED_BYTES * (2 * dense + products_of_experts * self.expert_numbers)


def _layer(group: LayerGroup, stage: Stage) -> LowBitBase:
    """The matrices in low bits of one layer of the group on a rank."""
    stored, layout, width = weight_format(stage.config.model), stage.layout, stage.rank.width
    assert stored is not None
    numbers = num_bytes = layer = experts = largest = of_experts = 0.0
    for weight in group.weights:
        share = 1.0 if not stored.shares else stored.shares.get(weight.key, 0.0)
        if not weight.is_linear or not share:
            continue
        rows, columns = _sizes(weight, group, stage)
        count = group.mlp.num_experts / layout.ep if weight.is_of_expert else 1
        numbers += share * count * rows * columns
        num_bytes += count * (share * stored.num_bytes(rows, columns))
        largest = max(largest, rows * columns)
        if weight.is_of_expert:
            of_experts += share * count * rows * columns
            matrix = width * rows * columns
            experts = max(experts, min(count, max(1, GROUP_BYTES // matrix)) * matrix)
        else:
            layer += width * rows * columns
    return LowBitBase(
        numbers=numbers,
        num_bytes=num_bytes,
        layer=layer,
        experts=experts,
        temporary=TEMPORARY_BYTES * largest,
        expert_numbers=of_experts,
    )


def _sizes(weight: LayerWeight, group: LayerGroup, stage: Stage) -> tuple[float, float]:
    """Rows and columns of a matrix on one rank."""
    rows, columns = weight.sizes(sizes_of(group.model))[-2:]
    parts = stage.layout.etp if weight.is_of_expert else stage.layout.tp
    if weight.split == "rows":
        return rows / parts, columns
    return rows, columns / (parts if weight.split else 1)
